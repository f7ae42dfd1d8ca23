"""Cut a model of uneven layers into the stages of a schedule, so that its step takes least time.

The cost of a cut is the replay of the schedule's program, so that ranks with several stages, the fill of the
pipeline and messages count as they do in a run. An even cut is improved by moving boundaries, then branch and
bound looks for better ones. The critical path of each replay is a sum over stages that bounds the time of
every cut from below; the least that the remaining stages can add to it is computed by dynamic programming,
and these bounds alone exclude most cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import fsum, inf

from stretto.errors import StrettoError
from stretto.layout.cut import cut as even_cut
from stretto.planner.cutting.profile import ModelProfile
from stretto.planner.cutting.rows import Cut, Row, StageSums
from stretto.program.program import Program
from stretto.program.replay import Costs, simulate
from stretto.program.replay.timeline import Timeline

_CLOSE = 1 - 1e-9  # a cut must be better by more than this factor to be looked for
_MOST_ROWS = 48  # each row prunes more and makes each step slower


@dataclass(kw_only=True)
class CutSearch:
    """Looks for the cut of least value.

    Attributes:
        layers, depth: number of layers, and of stages.
        value: returns the value of a whole cut, inf if it is not allowed; and a row that is a lower bound for
            every cut and exact for this one, or None if no such row exists.
        rows: lower bounds on the value of every cut.
        limits: rows, with the largest value that an allowed cut may have.
        budget: steps of `prove`.
        open: least bound among the cuts that the budget left unexamined.
    """

    layers: int
    depth: int
    value: Callable[[Cut], tuple[float, Callable[[], Row] | None]]
    rows: list[Row]
    limits: Sequence[tuple[Row, float]] = ()
    budget: int = 100_000
    best: float = inf
    cut: Cut | None = None
    open: float = inf
    _spent: int = 0
    _offered: set[Cut] = field(default_factory=set[Cut])

    def offer(self, cut: Cut) -> bool:
        """Evaluate a cut; return True if it is better than all before."""
        if cut in self._offered or any(row.of(cut) > limit for row, limit in self.limits):
            return False
        if self.best < inf and any(row.of(cut) >= self.best * _CLOSE for row in self.rows):
            return False
        self._offered.add(cut)
        value, row = self.value(cut)
        if row is not None and len(self.rows) < _MOST_ROWS:
            self.rows.append(row())
        if value >= self.best:
            return False
        self.best, self.cut = value, cut
        return True

    def descend(self) -> None:
        """Move boundaries, alone and neighbours together, as long as that helps."""
        better = self.cut is not None
        while better:
            assert self.cut is not None
            better = any(self.offer(cut) for cut in _neighbours(self.cut))

    def prove(self) -> bool:
        """Examine all cuts that may be better; return True if the budget sufficed."""
        self._extend((0,), [], [])
        return self.open == inf

    @property
    def bound(self) -> float:
        """A lower bound for all allowed cuts; after `prove`."""
        return min(self.best, self.open)

    def _extend(self, marks: Cut, sums: Sequence[float], limit_values: Sequence[float]) -> None:
        """Go through all cuts that begin with `marks`.

        Args:
            sums: the value of `marks` by row, for the rows known when it was computed.
            limit_values: the value of `marks` by limit.
        """
        s, i = len(marks) - 1, marks[-1]
        if s == self.depth:
            self.offer(marks)
            return
        rows, limits = list(self.rows), self.limits
        sums = [*sums, *(_prefix_sum(row, marks) for row in rows[len(sums) :])]
        limit_values = limit_values or [_prefix_sum(row, marks) for row, _ in limits]
        if (
            max((a + row.suffix[s][i] for a, row in zip(sums, rows, strict=True)), default=0.0)
            >= self.best * _CLOSE
        ):
            return
        children = list[tuple[float, int]]()
        for j in (
            range(i + 1, self.layers - (self.depth - s - 1) + 1) if s + 1 < self.depth else (self.layers,)
        ):
            self._spent += 1
            if any(
                a + row.stage(s, i, j) + row.suffix[s + 1][j] > limit
                for a, (row, limit) in zip(limit_values, limits, strict=True)
            ):
                continue
            bound = max(
                (a + row.stage(s, i, j) + row.suffix[s + 1][j] for a, row in zip(sums, rows, strict=True)),
                default=0.0,
            )
            children.append((bound, j))
        for bound, j in sorted(children):
            if self.best < inf and bound >= self.best * _CLOSE:
                return
            if self._spent > self.budget:
                self.open = min(self.open, bound)
                return
            self._extend(
                (*marks, j),
                [a + row.stage(s, i, j) for a, row in zip(sums, rows, strict=True)],
                [a + row.stage(s, i, j) for a, (row, _) in zip(limit_values, limits, strict=True)],
            )


def _prefix_sum(row: Row, marks: Cut) -> float:
    return fsum(row.stage(s, i, j) for s, (i, j) in enumerate(pairwise(marks)))


def _neighbours(cut: Cut) -> Iterator[Cut]:
    """The cut with some boundaries, one or several in a row, moved by one or two layers."""
    inner = range(1, len(cut) - 1)
    for length in range(1, len(inner) + 1):
        for first in range(1, len(inner) - length + 2):
            for step in (1, -1, 2, -2) if length == 1 else (1, -1):
                moved = (
                    *cut[:first],
                    *(boundary + step for boundary in cut[first : first + length]),
                    *cut[first + length :],
                )
                if moved[first - 1] < moved[first] and moved[first + length - 1] < moved[first + length]:
                    yield moved


GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A cut with its time and memory.

    Attributes:
        stages: the layers of each stage, as `Pipeline(cut=...)` takes them.
        seconds: time of a step.
        memory: peak bytes of each rank: states and activations in flight.
        bound: no cut within the memory takes less; equal to `seconds` if the search has proved it.
        starts: simple cuts, by name: equal numbers of layers, of parameters, and equal work.
        start_seconds: seconds of the simple cuts; inf if memory is not enough.
    """

    profile: ModelProfile
    program: Program
    stages: tuple[range, ...]
    seconds: float
    memory: tuple[float, ...]
    bound: float
    starts: Mapping[str, tuple[range, ...]]
    start_seconds: Mapping[str, float]
    hop: float = 0.0
    bandwidth: float = inf

    @property
    def proved(self) -> bool:
        """True if no cut is better."""
        return self.bound >= self.seconds * (1 - 1e-6)

    @cached_property
    def timeline(self) -> Timeline:
        """The step replayed."""
        profile = self.profile.layers
        times = list[tuple[float, float, float]]()
        for stage in self.stages:
            layers = [profile[layer] for layer in stage]
            back, weight = (fsum(layer.halves[half] for layer in layers) for half in range(2))
            times.append((fsum(layer.forward for layer in layers), back, weight))
        return simulate(
            self.program,
            Costs(
                per_stage=times,
                hop=self.hop,
                message_bytes=[profile[stage.stop - 1].output for stage in self.stages[:-1]],
                bandwidth=self.bandwidth,
            ),
        )


def partition(
    profile: ModelProfile,
    program: Program,
    *,
    memory: float | None = None,
    must_fit: bool = True,
    states: float = 4.0,
    hop: float = 0.0,
    bandwidth: float = inf,
    others: Mapping[str, Sequence[range]] | None = None,
    budget: int = 100_000,
) -> Partition:
    """The cut of a profiled model that makes the program's step shortest.

    Args:
        program: program of a schedule, not lowered.
        memory: bytes that a rank may hold; temporaries of single actions are not counted.
        must_fit: if no cut fits, raise; else return the one whose fullest rank holds the least.
        states: bytes kept for each byte of weights; 4: weights, gradients and both moments of Adam, all in
            one precision.
        hop, bandwidth: seconds of a message between ranks, and bytes a second.
        others: cuts to start from and to compare with, in addition to the simple ones.
        budget: steps of the search.

    Raises:
        StrettoError: fewer layers than stages, or nothing fits the memory and it must; names the smallest
            memory that suffices.
    """
    layers, depth = len(profile.layers), program.depth
    if layers < depth:
        raise StrettoError(
            f"{layers} layers over {depth} stages", hint=f"use at most {layers} stages, or split layers"
        )
    sums = StageSums(profile, program, states, hop, bandwidth)
    # cuts that ignore the schedule
    costs = {
        "layers": [1.0] * layers,
        "parameters": [1.0 + layer.parameters for layer in profile.layers],
        "work": [layer.forward + layer.backward for layer in profile.layers],
    }
    starts = {name: marks(even_cut(weights, depth)) for name, weights in costs.items()}
    starts |= {name: marks(stages) for name, stages in (others or {}).items()}

    def value(cut: Cut) -> tuple[float, Callable[[], Row] | None]:
        """The time of a cut, inf if it is not allowed, and its critical path."""
        if not _shared_in_one_stage(sums, cut) or (memory is not None and max(sums.memory(cut)) > memory):
            return inf, None
        seconds, counts = sums.replay(cut)
        return seconds, lambda: sums.chain(counts)

    limits: list[tuple[Row, float]] = []
    fitting = None
    if memory is not None:
        fitting, needs, proved = _least_memory(sums, starts.values(), memory, budget)
        if needs > memory and must_fit:
            fullest = max(range(program.ranks), key=sums.memory(fitting).__getitem__)
            raise StrettoError(
                f"memory is {memory / GIB:.4g} GiB: {'every cut' if proved else 'the best cut found'} needs "
                f"{needs / GIB:.4g} GiB or more, on rank {fullest} with the best one",
                hint=f"smaller microbatches, shorter samples, more ranks, or {1.01 * needs / GIB:.3g} GiB",
            )
        memory = max(memory, needs / _CLOSE)  # rows add the same bytes in another order
        limits = [(row, memory) for rank in range(program.ranks) for row in sums.memory_rows(rank)]
    search = CutSearch(
        layers=layers, depth=depth, value=value, rows=sums.work(), limits=limits, budget=budget
    )
    for cut in (*starts.values(), *([fitting] if fitting else [])):
        search.offer(cut)
    search.descend()
    search.prove()
    if search.cut is None:
        raise StrettoError(
            f"schedule {program.name} updates each stage separately, and no cut was found that keeps layers "
            "with shared weights in one stage",
            hint="untie them, or use a schedule that updates at the end, such as 1f1b",
        )
    return Partition(
        profile=profile,
        program=program,
        stages=_stages(search.cut),
        seconds=search.best,
        memory=tuple(sums.memory(search.cut)),
        bound=search.bound,
        starts={name: _stages(cut) for name, cut in starts.items()},
        start_seconds={name: value(cut)[0] for name, cut in starts.items()},
        hop=hop,
        bandwidth=bandwidth,
    )


def _stages(cut: Cut) -> tuple[range, ...]:
    return tuple(range(i, j) for i, j in pairwise(cut))


def marks(stages: Sequence[range]) -> Cut:
    """The first layer of each stage, and the number of layers."""
    return (*(stage.start for stage in stages), stages[-1].stop)


def _shared_in_one_stage(sums: StageSums, cut: Cut) -> bool:
    """True if layers that share weights share a stage, as they must if each stage is updated on its own."""
    if not sums.program.versions:
        return True
    stage_of = [s for s, (i, j) in enumerate(pairwise(cut)) for _ in range(i, j)]
    return all(len({stage_of[layer] for layer in weights.layers}) == 1 for weights in sums.shared)


def _least_memory(
    sums: StageSums, starts: Iterable[Cut], memory: float, budget: int
) -> tuple[Cut, float, bool]:
    """A cut within the memory, or the one whose fullest rank holds the least; the bytes of that rank; if it
    does not fit, True if no cut needs less.
    """
    rows = [row for rank in range(sums.program.ranks) for row in sums.memory_rows(rank)]
    search = CutSearch(
        layers=sums.layers,
        depth=sums.depth,
        value=lambda cut: (max(sums.memory(cut)), None),
        rows=rows,
        budget=budget,
    )
    for cut in starts:
        search.offer(cut)
    search.descend()
    assert search.cut is not None
    if search.best > memory:
        search.prove()
    return search.cut, search.best, search.bound >= search.best
