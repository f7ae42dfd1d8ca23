"""What all ranks have to do and to keep, table by table added and taken away, and how long a step is then.

A step: owners look up; sums go to the samples' ranks while the bottom MLP runs; interaction and top MLP;
gradients go back while the bottom MLP's backward runs; owners update while dense gradients are reduced. Ids
and rows of the next batch are on their way meanwhile. Each exchange waits for the slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.planner.machines.cluster import Cluster, Collective, Group
from stretto.planner.time.collectives import collective_seconds
from stretto.recommender.planner.network_times import NetworkTime
from stretto.recommender.planner.options import (
    DEVICE,
    DISK,
    FETCH,
    HOST,
    IDS,
    LOOKUP,
    SENT,
    UPDATE,
    Load,
    Option,
)
from stretto.recommender.planner.table_times import Work

_ROUNDING = 1 + 1e-9  # of sums of parts that were added and taken away


@dataclass(frozen=True)
class Limits:
    """Bytes that tables and their states may take of a rank's device, and of its part of host and files."""

    device: float
    host: float
    disk: float

    def of(self) -> tuple[float, float, float]:
        return self.device, self.host, self.disk


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and in parts, which add up to it.

    parts: "lookup", "exchange" (what of both exchanges nothing hides), "network", "update", "reduce" (what of
        the dense reduction nothing hides, and of copied tables' rows), "fetch" (what of fetching rows and
        ids nothing hides), "program".
    """

    seconds: float
    parts: Mapping[str, float]


class Board:
    """The loads of all ranks."""

    def __init__(self, work: Work, network: NetworkTime, dense: float, limits: Limits) -> None:
        """`dense`: bytes of the gradients that all ranks reduce."""
        self.work = work
        self.network = network
        self.limits = limits
        ranks = work.ranks
        fields = zip((DEVICE, HOST, DISK), limits.of(), strict=True)
        self._limits = [(field, limit * _ROUNDING) for field, limit in fields]
        self.columns = [[0.0] * ranks for _ in range(8)]
        self.all = [0.0] * 8  # of every rank, beside its column
        self.lookup = self.update = self.gathered = 0.0
        self.parts = 0
        self._group = Group(ranks, min(work.local, ranks))
        computing = work.cluster.computing
        self._slower = max(1.0, min(work.local, ranks) / computing) if computing else 1.0
        self._reduce = self._collective("all-reduce", dense)
        self._second_a_byte = 2.0 / _wire(work.cluster, self._group) if ranks > 1 else 0.0

    def add(self, option: Option, ranks: Sequence[int], sign: float = 1.0) -> None:
        """Put a table's parts on ranks, in their order; with a sign of -1 take them away."""
        self.lookup += sign * option.lookup
        self.update += sign * option.update
        self.gathered += sign * option.gathered
        self.parts += int(sign) * len(option.parts)
        if option.alike:
            first, other = option.parts[0], option.parts[-1]
            self.all = [old + sign * value for old, value in zip(self.all, other, strict=True)]
            if first is not other:
                for column, one, rest in zip(self.columns, first, other, strict=True):
                    column[ranks[0]] += sign * (one - rest)
            return
        for rank, load in zip(ranks, option.parts, strict=True):
            for column, value in zip(self.columns, load, strict=True):
                column[rank] += sign * value

    def most(self, field: int) -> float:
        """What the rank with most of it has of a load's field."""
        return max(self.columns[field]) + self.all[field]

    def room(self, rank: int, load: Load) -> bool:
        """Whether a part fits what is left of a rank's memory."""
        for field, limit in self._limits:
            if load[field] and self.columns[field][rank] + self.all[field] + load[field] > limit:
                return False
        return True

    def room_everywhere(self, load: Load) -> bool:
        """Whether a part fits every rank."""
        return all(
            not load[field] or self.most(field) + load[field] <= limit for field, limit in self._limits
        )

    def fits(self) -> bool:
        """Whether every rank keeps its limits."""
        return all(self.most(field) <= limit for field, limit in self._limits)

    def loads(self) -> list[float]:
        """Seconds that each rank's own parts take, roughly: for choosing among ranks."""
        columns = self.columns
        wire = self._second_a_byte
        base = self.busy_of(self.all)
        four = zip(columns[LOOKUP], columns[UPDATE], columns[FETCH], columns[SENT], strict=True)
        return [base + lookup + update + fetch + wire * sent for lookup, update, fetch, sent in four]

    def busy_of(self, load: Sequence[float]) -> float:
        """The same of one part."""
        return load[LOOKUP] + load[UPDATE] + load[FETCH] + load[SENT] * self._second_a_byte

    def seconds(self) -> float:
        """Of a step."""
        return self.step().seconds

    def step(self) -> StepTime:
        """A step with its parts."""
        program = self.work.program
        net = self.network
        slower = self._slower
        lookup = slower * (self.most(LOOKUP) + self.lookup)
        update = slower * (self.most(UPDATE) + self.update)
        sums = self._collective("all-to-all", self.most(SENT))
        bottom, back = slower * net.bottom, slower * net.bottom_back
        rest, dense = slower * net.rest, slower * net.update
        gather = self._collective("all-gather", self.gathered)
        if program.beside:
            exchange = max(0.0, sums - bottom) + max(0.0, sums - back)
            reduce = max(0.0, self._reduce - update) + gather
        else:
            exchange, reduce = 2 * sums, self._reduce + gather
        host = program.host + program.each * self.parts / self.work.ranks
        here = lookup + exchange + bottom + back + rest + dense + update + reduce + host
        fetch, ids = self.most(FETCH), self._collective("all-to-all", self.most(IDS))
        if program.ahead:  # both take the same wires and memory, beside all else
            hidden = fetch + ids if program.cached_host else ids
            fetch = fetch + ids - hidden + max(0.0, hidden - here)
        else:
            fetch += ids
        parts = {
            "lookup": lookup,
            "exchange": exchange,
            "network": bottom + back + rest + dense,
            "update": update,
            "reduce": reduce,
            "fetch": fetch,
            "program": host,
        }
        return StepTime(here + fetch, parts)

    def _collective(self, kind: Collective, size: float) -> float:
        if self.work.ranks == 1 or size < 1.0:  # what adding and taking away leaves
            return 0.0
        return collective_seconds(self.work.cluster, kind, size, self._group)


def _wire(cluster: Cluster, group: Group) -> float:
    """Bytes/s of a large exchange."""
    size = float(1 << 26)
    return size / collective_seconds(cluster, "all-to-all", size, group)
