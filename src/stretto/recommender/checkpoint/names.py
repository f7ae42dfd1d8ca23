"""Names of table shards in a checkpoint, and the tables that its index describes.

`tables.C1.0of2.weight` contains rows 0, 2, ... of table C1; an optimiser state has its name instead of
`weight`. A table is saved in the shards it is trained in, and can be loaded into any others. A shard of a
hash table is `tables.C1.hash-0of2.weight`, with its rows in storage order; `map-ids` and so on map ids to
these rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.engine.checkpoint.files import DamageError
from stretto.engine.checkpoint.index import Index, SavedTensor
from stretto.errors import StrettoError
from stretto.recommender.placement import TableSpec

TABLES = "tables."  # prefix of the names of all table tensors
WEIGHT = "weight"
MAP = "map-"  # prefix of the kinds that form a hash table's id map
_NAME = re.compile(r"tables\.(.+)\.(hash-)?(\d{1,9})of(\d{1,9})\.([^.]+)")


class NamedTensor(NamedTuple):
    """A tensor in a checkpoint, with its name."""

    name: str
    saved: SavedTensor


@dataclass(frozen=True, kw_only=True)
class SavedTable:
    """A table in a checkpoint.

    Attributes:
        parts: for `weight` and each state, the tensor [rows of the part, ...] of each residue. Parts without
            rows are absent.
    """

    name: str
    rows: int
    dim: int
    modulus: int
    parts: Mapping[str, Mapping[int, NamedTensor]]

    @property
    def states(self) -> list[str]:
        return sorted(set(self.parts) - {WEIGHT})

    def dtype(self, kind: str) -> str:
        """Name of the torch dtype of `weight` or a state."""
        return self._first(kind).dtype

    def per_row(self, kind: str) -> bool:
        """True if `kind` has one number per row."""
        return len(self._first(kind).shape) == 1

    def _first(self, kind: str) -> SavedTensor:
        return next(iter(self.parts[kind].values())).saved


class SavedHash(NamedTuple):
    """A hash table in a checkpoint.

    Attributes:
        shards: each shard's rows, as a table that is not split.
        maps: each shard's id map: ids, rows, counts and so on, by name.
    """

    name: str
    dim: int
    shards: tuple[SavedTable, ...]
    maps: tuple[Mapping[str, NamedTensor], ...]


def part_name(table: str, residue: int, modulus: int, kind: str, hashed: bool = False) -> str:
    """Return the name of a shard's tensor.

    `kind` is `weight`, a state or, for a hash table, a tensor of its id map.
    """
    return f"{TABLES}{table}.{'hash-' if hashed else ''}{residue}of{modulus}.{kind}"


def find_table(name: str, tables: Sequence[TableSpec]) -> TableSpec:
    """Return the table with this name. Raises StrettoError if there is none."""
    for table in tables:
        if table.name == name:
            return table
    raise StrettoError(
        f"a shard of table {name}, which is not among the tables", hint="give the tables as they are stored"
    )


def saved_tables(index: Index) -> dict[str, SavedTable | SavedHash]:
    """Return all tables in a checkpoint by name.

    Raises:
        DamageError: a table is incomplete or inconsistent.
    """
    tables = dict[str, dict[tuple[bool, int], dict[str, dict[int, NamedTensor]]]]()
    for name, saved in index.items():
        if match := _NAME.fullmatch(name):
            table, hashed, residue, modulus, kind = match.groups()
            kinds = tables.setdefault(table, {}).setdefault((hashed is not None, int(modulus)), {})
            kinds.setdefault(kind, {})[int(residue)] = NamedTensor(name, saved)
    return {table: _build_table(table, splits) for table, splits in tables.items()}


def _build_table(
    name: str, splits: Mapping[tuple[bool, int], dict[str, dict[int, NamedTensor]]]
) -> SavedTable | SavedHash:
    """Build a table from its tensors by kind and residue, if they are complete and consistent."""
    ((hashed, modulus), kinds), *others = splits.items()
    if others or WEIGHT not in kinds:
        raise DamageError(f"table {name} exists in {1 + len(others)} splits, with {', '.join(sorted(kinds))}")
    dim = next(iter(kinds[WEIGHT].values())).saved.shape[-1:]
    if not dim:
        raise DamageError(f"table {name} has no rows")
    if not hashed:
        rows = sum(part.saved.shape[0] for part in kinds[WEIGHT].values())
        table = SavedTable(name=name, rows=rows, dim=dim[0], modulus=modulus, parts=kinds)
        parts = min(rows, modulus)
        for kind, saved in kinds.items():
            alike = {(len(part.saved.shape), part.saved.dtype) for part in saved.values()}
            if len(saved) != parts or len(alike) > 1 or max(saved) >= parts:
                raise DamageError(f"table {name}: {kind} is missing or differs in some of {modulus} parts")
            for residue, part in saved.items():
                # rows residue, residue + modulus, ... below `rows`
                _check_shape(table, kind, part, max(0, -(-(rows - residue) // modulus)))
        return table
    for kind, parts in kinds.items():
        if sorted(parts) != list(range(modulus)):
            raise DamageError(f"hash table {name}: {kind} is missing in some of {modulus} shards")
    shards, maps = list[SavedTable](), list[Mapping[str, NamedTensor]]()
    for shard in range(modulus):
        tensors = {kind: parts[shard] for kind, parts in kinds.items()}
        rows = tensors[WEIGHT].saved.shape[0]
        table = SavedTable(
            name=name,
            rows=rows,
            dim=dim[0],
            modulus=1,
            parts={kind: {0: part} for kind, part in tensors.items() if not kind.startswith(MAP)},
        )
        for kind, parts in table.parts.items():
            _check_shape(table, kind, parts[0], rows)
        shards.append(table)
        maps.append({kind.removeprefix(MAP): part for kind, part in tensors.items() if kind.startswith(MAP)})
    return SavedHash(name, dim[0], tuple(shards), tuple(maps))


def _check_shape(table: SavedTable, kind: str, part: NamedTensor, rows: int) -> None:
    if part.saved.shape != (rows, table.dim) and (kind == WEIGHT or part.saved.shape != (rows,)):
        raise DamageError(
            f"tensor {part.name} has shape {list(part.saved.shape)}, but the table has {table.rows} rows "
            f"of {table.dim}"
        )
