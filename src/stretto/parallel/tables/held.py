"""A shard of a table on the rank that has it: a run of rows of a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from stretto.layout.tables import TableShard
from stretto.offload.rows.store import RowStore
from stretto.parallel.tables.ids.hash import HashIds


@dataclass(frozen=True)
class HeldShard:
    """The shard's own row l is row `base` + l of `store`; of a hash table, `ids` says whose row that is."""

    shard: TableShard
    store: RowStore
    base: int
    ids: HashIds | None = None

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Own rows [start, stop) on the CPU: `weight` [rows, width] and each state by name, [rows, width] or
        [rows].
        """
        return self.store.read(self.base + start, self.base + stop)

    def write(self, start: int, values: Mapping[str, Tensor]) -> None:
        """Set own rows from `start` on; what is not named stays."""
        self.store.write(self.base + start, values)
