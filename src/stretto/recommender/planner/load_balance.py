"""Load and memory use of all ranks as tables are added and removed, and the resulting step time.

A step: each rank looks up rows of its table shards; the all-to-all of pooled embeddings overlaps the bottom
MLP; interaction and top MLP run forward and backward; the all-to-all of gradients overlaps the bottom MLP's
backward; the row update overlaps the all-reduce of dense gradients. Ids and rows of the next batch are
prefetched meanwhile. Every collective waits for the slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.planner.machines.cluster import Collective, NodeGroup
from stretto.planner.time.collectives import collective_seconds
from stretto.recommender.planner.network_times import NetworkTime
from stretto.recommender.planner.options import Option
from stretto.recommender.planner.table_times import (
    DEVICE,
    DISK,
    FETCH,
    HOST,
    IDS,
    LOOKUP,
    SENT,
    UPDATE,
    Load,
    Work,
)

_ROUNDING = 1 + 1e-9  # tolerance for rounding errors of adding and removing parts


@dataclass(frozen=True)
class Limits:
    """Bytes per rank for tables and their optimiser states on the device, in host memory and in files."""

    device: float
    host: float
    disk: float

    def by_place(self) -> dict[str, float]:
        """The limits by the place of tables."""
        return {"device": self.device, "cpu": self.host, "disk": self.disk}


@dataclass(frozen=True)
class TableStepTime:
    """Step time in seconds, and its breakdown.

    parts: "lookup"; "exchange", exposed time of both all-to-alls; "network", dense layers; "update";
        "reduce", exposed time of the dense all-reduce, plus the all-gather for replicated tables; "fetch",
        exposed time of fetching rows and ids; "program", host overhead. They sum to `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]


class LoadBalance:
    """Loads of all ranks, stored as one list over ranks per field of `Load`."""

    def __init__(self, work: Work, network: NetworkTime, dense: float, limits: Limits) -> None:
        """Start without tables, with `dense` bytes of dense gradients in the all-reduce."""
        self.work = work
        self.network = network
        ranks = work.ranks
        limited = zip((DEVICE, HOST, DISK), limits.by_place().values(), strict=True)
        self._limits = [(field, limit * _ROUNDING) for field, limit in limited]
        self.columns = [[0.0] * ranks for _ in range(8)]
        self.everywhere = [0.0] * 8  # load that every rank has, on top of `columns`
        self.lookup = self.update = self.gathered = 0.0
        self.parts = 0
        self._group = NodeGroup(ranks, min(work.local, ranks))
        computing = work.cluster.computing
        self._slower = max(1.0, min(work.local, ranks) / computing) if computing else 1.0
        self._reduce = self._collective("all-reduce", dense)
        self._seconds_per_byte = 0.0  # of a large all-to-all, forward and backward
        if ranks > 1:
            size = float(1 << 26)
            rate = size / collective_seconds(work.cluster, "all-to-all", size, self._group)
            self._seconds_per_byte = 2.0 / rate

    def add(self, option: Option, ranks: Sequence[int], sign: float = 1.0) -> None:
        """Add the parts of an option to the ranks in order; with `sign` -1, remove them."""
        self.lookup += sign * option.lookup
        self.update += sign * option.update
        self.gathered += sign * option.gathered
        self.parts += int(sign) * len(option.parts)
        if option.alike:
            first, other = option.parts[0], option.parts[-1]
            self.everywhere = [old + sign * value for old, value in zip(self.everywhere, other, strict=True)]
            if first is not other:
                for column, of_first, of_other in zip(self.columns, first, other, strict=True):
                    column[ranks[0]] += sign * (of_first - of_other)
            return
        for rank, load in zip(ranks, option.parts, strict=True):
            for column, value in zip(self.columns, load, strict=True):
                column[rank] += sign * value

    def maximum(self, field: int) -> float:
        """The maximum of a field over all ranks."""
        return max(self.columns[field]) + self.everywhere[field]

    def fits_rank(self, rank: int, load: Load) -> bool:
        """True if a part fits in the free memory of a rank."""
        for field, limit in self._limits:
            if load[field] and self.columns[field][rank] + self.everywhere[field] + load[field] > limit:
                return False
        return True

    def fits_everywhere(self, load: Load) -> bool:
        """True if a part fits on every rank."""
        return all(
            not load[field] or self.maximum(field) + load[field] <= limit for field, limit in self._limits
        )

    def fits(self) -> bool:
        """True if every rank is within the memory limits."""
        return all(self.maximum(field) <= limit for field, limit in self._limits)

    def loads(self) -> list[float]:
        """Approximate seconds of each rank, for ranking candidates."""
        columns = self.columns
        wire = self._seconds_per_byte
        base = self.busy_seconds(self.everywhere)
        four = zip(columns[LOOKUP], columns[UPDATE], columns[FETCH], columns[SENT], strict=True)
        return [base + lookup + update + fetch + wire * sent for lookup, update, fetch, sent in four]

    def busy_seconds(self, load: Sequence[float]) -> float:
        """Approximate seconds of one part."""
        return load[LOOKUP] + load[UPDATE] + load[FETCH] + load[SENT] * self._seconds_per_byte

    def seconds(self) -> float:
        """Step time."""
        return self.step().seconds

    def bytes_sent(self, dense: float) -> float:
        """Bytes that leave the busiest rank in a step, expected: sums of its own tables, its share of the ids
        and of the gradients for all tables, copied tables' gradients, and the all-reduce of `dense` bytes.
        """
        ranks = self.work.ranks
        every = sum(self.columns[SENT]) + sum(self.columns[IDS])
        every += ranks * (self.everywhere[SENT] + self.everywhere[IDS])
        return (self.maximum(SENT) + every / ranks + self.gathered + 2 * dense) * (ranks - 1) / ranks

    def step(self) -> TableStepTime:
        """Step time with its breakdown."""
        program = self.work.program
        net = self.network
        slower = self._slower
        lookup = slower * (self.maximum(LOOKUP) + self.lookup)
        update = slower * (self.maximum(UPDATE) + self.update)
        sums = self._collective("all-to-all", self.maximum(SENT))
        bottom, back = slower * net.bottom, slower * net.bottom_back
        joint, dense = slower * net.joint, slower * net.update
        gather = self._collective("all-gather", self.gathered)
        if program.overlap:
            exchange = max(0.0, sums - bottom) + max(0.0, sums - back)
            reduce = max(0.0, self._reduce - update) + gather
        else:
            exchange, reduce = 2 * sums, self._reduce + gather
        host = program.host + program.each * self.parts / self.work.ranks
        step = lookup + exchange + bottom + back + joint + dense + update + reduce + host
        fetch, ids = self.maximum(FETCH), self._collective("all-to-all", self.maximum(IDS))
        if program.prefetch:  # during the remaining step; rows and ids share links and memory
            hidden = fetch + ids if program.cached_host else ids
            fetch = fetch + ids - hidden + max(0.0, hidden - step)
        else:
            fetch += ids
        parts = {
            "lookup": lookup,
            "exchange": exchange,
            "network": bottom + back + joint + dense,
            "update": update,
            "reduce": reduce,
            "fetch": fetch,
            "program": host,
        }
        return TableStepTime(step + fetch, parts)

    def _collective(self, kind: Collective, size: float) -> float:
        if self.work.ranks == 1 or size < 1.0:  # left over from rounding
            return 0.0
        return collective_seconds(self.work.cluster, kind, size, self._group)
