"""Names of table shards in a checkpoint, and the tables that its index describes.

`tables.C1.0of2.weight` holds rows 0, 2, ... of table C1; an optimiser state has its name instead of `weight`.
A table is saved in the shards it is trained in, and can be loaded into any others. A shard of a hash table is
`tables.C1.hash-0of2.weight`, with its rows in storage order; `map-ids` and so on map ids to these rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.engine.checkpoint.files import DamageError
from stretto.engine.checkpoint.index import Index, SavedTensor
from stretto.errors import StrettoError
from stretto.recommender.placement import TableSpec

TABLES = "tables."  # prefix of the names of all table tensors
WEIGHT = "weight"
MAP = "map-"  # prefix of the kinds that form a hash table's id map
_NAME = re.compile(r"tables\.(.+)\.(hash-)?(\d{1,9})of(\d{1,9})\.([^.]+)")


@dataclass(frozen=True)
class Named:
    """A tensor in a checkpoint, with its name."""

    name: str
    saved: SavedTensor


@dataclass(frozen=True, kw_only=True)
class SavedTable:
    """A table in a checkpoint.

    parts: for `weight` and each state, the tensor [rows of the part, ...] of each residue. Parts without rows
        are absent.
    """

    name: str
    rows: int
    dim: int
    modulus: int
    parts: Mapping[str, Mapping[int, Named]]

    @property
    def states(self) -> list[str]:
        return sorted(set(self.parts) - {WEIGHT})

    def dtype(self, kind: str) -> str:
        """The dtype of `weight` or a state, by its name in torch."""
        return self._one(kind).dtype

    def per_row(self, kind: str) -> bool:
        """Whether `kind` has one number per row."""
        return len(self._one(kind).shape) == 1

    def _one(self, kind: str) -> SavedTensor:
        return next(iter(self.parts[kind].values())).saved


@dataclass(frozen=True)
class SavedHash:
    """A hash table in a checkpoint.

    shards: each shard's rows, as a table that is not split.
    maps: each shard's id map: ids, rows, counts and so on, by name.
    """

    name: str
    dim: int
    shards: tuple[SavedTable, ...]
    maps: tuple[Mapping[str, Named], ...]


def part_name(table: str, residue: int, modulus: int, kind: str, hashed: bool = False) -> str:
    """Name of a shard's tensor; `kind` is `weight`, a state or, for a hash table, a tensor of its id map."""
    return f"{TABLES}{table}.{'hash-' if hashed else ''}{residue}of{modulus}.{kind}"


def spec_of(name: str, tables: Sequence[TableSpec]) -> TableSpec:
    """The table with this name. Raises StrettoError if there is none."""
    for table in tables:
        if table.name == name:
            return table
    raise StrettoError(
        f"a shard of table {name}, which is not among the tables", hint="give the tables as they are stored"
    )


def rows_of_part(rows: int, residue: int, modulus: int) -> int:
    """Number of rows residue, residue + modulus, ... below `rows`."""
    return max(0, -(-(rows - residue) // modulus))


def saved_tables(index: Index) -> dict[str, SavedTable | SavedHash]:
    """All tables in a checkpoint.

    Raises:
        DamageError: a table is incomplete or inconsistent.
    """
    tables = dict[str, dict[tuple[bool, int], dict[str, dict[int, Named]]]]()
    for name, saved in index.items():
        if match := _NAME.fullmatch(name):
            table, hashed, residue, modulus, kind = match.groups()
            kinds = tables.setdefault(table, {}).setdefault((hashed is not None, int(modulus)), {})
            kinds.setdefault(kind, {})[int(residue)] = Named(name, saved)
    return {table: _table(table, splits) for table, splits in tables.items()}


def _table(
    name: str, splits: Mapping[tuple[bool, int], dict[str, dict[int, Named]]]
) -> SavedTable | SavedHash:
    ((hashed, modulus), kinds), *others = splits.items()
    if others or WEIGHT not in kinds:
        raise DamageError(f"table {name} is there in {1 + len(others)} splits, as {', '.join(sorted(kinds))}")
    dim = next(iter(kinds[WEIGHT].values())).saved.shape[-1:]
    if dim and hashed:
        return _hash(name, dim[0], modulus, kinds)
    if not dim:
        raise DamageError(f"table {name} has no rows")
    rows = sum(part.saved.shape[0] for part in kinds[WEIGHT].values())
    return _checked(SavedTable(name=name, rows=rows, dim=dim[0], modulus=modulus, parts=kinds))


def _checked(table: SavedTable) -> SavedTable:
    """The table, if every part with rows has each kind, in the right shape and with the same dtype."""
    parts = min(table.rows, table.modulus)
    for kind, saved in table.parts.items():
        alike = {(len(part.saved.shape), part.saved.dtype) for part in saved.values()}
        if len(saved) != parts or len(alike) > 1 or max(saved) >= parts:
            raise DamageError(
                f"table {table.name}: {kind} is not there for each of {table.modulus} parts, all alike"
            )
        for residue, part in saved.items():
            rows = rows_of_part(table.rows, residue, table.modulus)
            _has_shape(table, kind, part, rows)
    return table


def _has_shape(table: SavedTable, kind: str, part: Named, rows: int) -> None:
    if part.saved.shape != (rows, table.dim) and (kind == WEIGHT or part.saved.shape != (rows,)):
        raise DamageError(
            f"tensor {part.name} has shape {list(part.saved.shape)}, where the table has {table.rows} rows "
            f"of {table.dim}"
        )


def _hash(name: str, dim: int, modulus: int, kinds: dict[str, dict[int, Named]]) -> SavedHash:
    shards, maps = list[SavedTable](), list[Mapping[str, Named]]()
    for kind, parts in kinds.items():
        if sorted(parts) != list(range(modulus)):
            raise DamageError(f"hash table {name}: {kind} is not there for each of {modulus} shards")
    for shard in range(modulus):
        tensors = {kind: parts[shard] for kind, parts in kinds.items()}
        rows = tensors[WEIGHT].saved.shape[0]
        table = SavedTable(
            name=name,
            rows=rows,
            dim=dim,
            modulus=1,
            parts={kind: {0: part} for kind, part in tensors.items() if not kind.startswith(MAP)},
        )
        for kind, parts in table.parts.items():
            _has_shape(table, kind, parts[0], rows)
        shards.append(table)
        maps.append({kind.removeprefix(MAP): part for kind, part in tensors.items() if kind.startswith(MAP)})
    return SavedHash(name, dim, tuple(shards), tuple(maps))
