"""The mean square of a row's gradient, where the row's columns are on several ranks.

Each part of a table sees the same ids, so its rows are the same ones in the same order: what has to travel is
one number for each row. All parts add them up in the order of ranks, so that their states stay equal bit by
bit. Without it each part would follow its own columns, and the placement would change the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.parallel.tables.exchange import exchange
from stretto.parallel.tables.wiring import Pool, Wiring


@dataclass
class Seen:
    """Rows [u] of a pool that a step saw, ascending, and the squares [u] of their gradients' own columns."""

    pool: Pool
    rows: Tensor
    squares: Tensor


class RowStatistic:
    """Adds up squares over the parts of tables that are split by columns.

    Args:
        empty: a tensor without elements, of the gradients' type and device.

    Attributes:
        needed: there are such tables, on whichever rank.
    """

    def __init__(self, wiring: Wiring, rank: int, group: ProcessGroup | None, empty: Tensor) -> None:
        self._wiring, self._rank, self._group, self._empty = wiring, rank, group, empty
        self._ranks = {  # of each table that is split by columns
            number: sorted({part.rank for part in parts})
            for number, parts in enumerate(wiring.parts)
            if len(parts) > 1 and not wiring.by_rows[number]
        }
        self.needed = bool(self._ranks)

    def means(self, seen: Sequence[Seen]) -> list[Tensor]:
        """The mean squares [u] over whole rows, of each of this rank's pools of column shards. Collective
        over all ranks.

        Args:
            seen: of all pools of column shards that this rank has.
        """
        spans = [_spans(one) for one in seen]
        own = dict[int, Tensor]()
        for one, shards in zip(seen, spans, strict=True):
            for table, first, last in shards:
                part = one.squares[first:last]
                own[table] = own[table] + part if table in own else part
        totals = self._added(own)
        return [torch.cat([totals[table] for table, _, _ in shards]) for shards in spans]

    def _added(self, own: dict[int, Tensor]) -> dict[int, Tensor]:
        """The means by table, from this rank's squares."""
        world = self._wiring.world
        shared = [
            [t for t in sorted(own) if rank in self._ranks[t] and rank != self._rank] for rank in range(world)
        ]
        pieces = [own[table] for tables in shared for table in tables]
        sizes = [sum(len(own[table]) for table in tables) for tables in shared]
        arrived = dict[tuple[int, int], Tensor]()
        if self._group is not None:
            send = torch.cat(pieces) if pieces else self._empty
            for rank, (part, tables) in enumerate(
                zip(exchange(self._group, send, sizes, sizes).split(), shared, strict=True)
            ):
                each = part.split([len(own[table]) for table in tables])
                arrived |= {(table, rank): piece for table, piece in zip(tables, each, strict=True)}
        found = dict[int, Tensor]()
        for table, mine in own.items():
            total = torch.zeros_like(mine)
            for rank in self._ranks[table]:
                total += mine if rank == self._rank else arrived[table, rank]
            found[table] = total / self._wiring.tables[table].dim
        return found


def _spans(one: Seen) -> list[tuple[int, int, int]]:
    """Of each shard of the pool: its table, and where its rows begin and end."""
    pool = one.pool
    if pool.hashed:
        return [(pool.shards[0].table, 0, len(one.rows))]
    edges = torch.tensor([*pool.bases, pool.rows], device=one.rows.device)
    at = torch.searchsorted(one.rows, edges).tolist()
    return [(shard.table, at[i], at[i + 1]) for i, shard in enumerate(pool.shards)]
