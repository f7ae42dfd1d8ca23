"""Under which names the shards of tables are in a checkpoint, and what an index says of a table.

Rows residue, residue + modulus, ... of table C1 are `tables.C1.0of2.weight`, and with `weight` the name of a
state that state. So a table is saved as it is split, and any split reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stretto.checkpoint.files import DamageError
from stretto.checkpoint.index import Index, SavedTensor
from stretto.errors import StrettoError
from stretto.layout.tables import TableSpec

TABLES = "tables."  # first part of the names of all that belongs to tables
WEIGHT = "weight"
_NAME = re.compile(r"tables\.(.+)\.(\d{1,9})of(\d{1,9})\.([^.]+)")


@dataclass(frozen=True)
class SavedTable:
    """A table as it lies in a checkpoint.

    parts: for `weight` and each state the tensor [rows of the part, ...] of each residue. A part without rows
        is not there.
    """

    name: str
    rows: int
    dim: int
    modulus: int
    parts: Mapping[str, Mapping[int, SavedTensor]]

    @property
    def states(self) -> list[str]:
        return sorted(set(self.parts) - {WEIGHT})

    def dtype(self, kind: str) -> str:
        """Of `weight` or a state, as torch calls it."""
        return next(iter(self.parts[kind].values())).dtype

    def per_row(self, kind: str) -> bool:
        """Whether it is one number for each row."""
        return len(next(iter(self.parts[kind].values())).shape) == 1


def part_name(table: str, residue: int, modulus: int, kind: str) -> str:
    """The tensor of a part of a table; `kind` is `weight` or a state."""
    return f"{TABLES}{table}.{residue}of{modulus}.{kind}"


def spec_of(name: str, tables: Sequence[TableSpec]) -> TableSpec:
    """The table of this name; raises StrettoError."""
    for table in tables:
        if table.name == name:
            return table
    raise StrettoError(
        f"a shard of table {name}, which is not among the tables", hint="give the tables as they are stored"
    )


def rows_of_part(rows: int, residue: int, modulus: int) -> int:
    """How many of `rows` are residue, residue + modulus, ..."""
    return max(0, -(-(rows - residue) // modulus))


def saved_tables(index: Index) -> dict[str, SavedTable]:
    """All tables in a checkpoint.

    Raises:
        DamageError: what is there of a table is not a whole table.
    """
    found = dict[str, dict[tuple[int, str], dict[int, SavedTensor]]]()
    for table, residue, modulus, kind, saved in _parts(index):
        found.setdefault(table, {}).setdefault((modulus, kind), {})[residue] = saved
    return {table: _table(table, parts) for table, parts in found.items()}


def _parts(index: Index) -> Iterator[tuple[str, int, int, str, SavedTensor]]:
    for name, saved in index.items():
        if match := _NAME.fullmatch(name):
            yield match[1], int(match[2]), int(match[3]), match[4], saved


def _table(name: str, found: Mapping[tuple[int, str], dict[int, SavedTensor]]) -> SavedTable:
    (modulus, *others), kinds = sorted({modulus for modulus, _ in found}), {kind for _, kind in found}
    if others or WEIGHT not in kinds:
        raise DamageError(f"table {name} is there in {1 + len(others)} splits, as {', '.join(sorted(kinds))}")
    weights = found[modulus, WEIGHT]
    rows = sum(saved.shape[0] if saved.shape else 0 for saved in weights.values())
    dim = next(iter(weights.values())).shape[-1] if rows else 0
    parts = min(rows, modulus)  # the others have no rows
    for (_, kind), saved in found.items():
        alike = {(len(each.shape), each.dtype) for each in saved.values()}
        if len(saved) != parts or len(alike) > 1 or max(saved) >= parts:
            raise DamageError(f"table {name}: {kind} is not there for each of {modulus} parts, all alike")
        for residue, each in saved.items():
            own = rows_of_part(rows, residue, modulus)
            if each.shape != (own, dim) and (kind == WEIGHT or each.shape != (own,)):
                raise DamageError(
                    f"table {name}, {kind} of part {residue} of {modulus}: shape {list(each.shape)}, where "
                    f"the table has {rows} rows of {dim}"
                )
    return SavedTable(name, rows, dim, modulus, {kind: saved for (_, kind), saved in found.items()})
