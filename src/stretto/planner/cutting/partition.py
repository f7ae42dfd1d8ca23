"""Cut a model of uneven layers into the stages of a schedule, so that its step takes least time.

The schedule's own program decides: a cut is worth what its replay takes, so that ranks with several stages,
the fill of the pipeline and messages count as they do when it runs. An even cut is improved by moving
boundaries, then branch and bound looks for better ones. Each replay's critical path is a sum over stages that
no cut is faster than; the least that stages to come can add to it is found by dynamic programming, and most
cuts are left out because of such bounds alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from stretto.errors import StrettoError
from stretto.layout.cut import cut as even_cut
from stretto.planner.cutting.profile import ModelProfile
from stretto.planner.cutting.rows import Cut, Row, Table
from stretto.planner.cutting.search import CutSearch
from stretto.program.program import Program
from stretto.program.replay import Costs, simulate
from stretto.program.replay.timeline import Timeline

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A cut, and what it comes to.

    Attributes:
        stages: the layers of each stage, as `Pipeline(cut=...)` takes them.
        seconds: of a step.
        memory: bytes of each rank: states, and activations in flight at its fullest moment.
        bound: no cut within the memory takes less; the same as `seconds` where that was proved.
        starts: other cuts, by name: as many layers each, as many parameters, as much work.
        beside: seconds of these; inf where memory is not enough.
    """

    profile: ModelProfile
    program: Program
    stages: tuple[range, ...]
    seconds: float
    memory: tuple[float, ...]
    bound: float
    starts: Mapping[str, tuple[range, ...]]
    beside: Mapping[str, float]
    hop: float = 0.0
    bandwidth: float = inf

    @property
    def proved(self) -> bool:
        """Whether no cut is better."""
        return self.bound >= self.seconds * (1 - 1e-6)

    @cached_property
    def timeline(self) -> Timeline:
        """The step replayed."""
        profile = self.profile.layers
        return simulate(
            self.program,
            Costs(
                per_stage=[self._time(stage) for stage in self.stages],
                hop=self.hop,
                message_bytes=[profile[stage.stop - 1].output for stage in self.stages[:-1]],
                bandwidth=self.bandwidth,
            ),
        )

    def _time(self, stage: range) -> tuple[float, float, float]:
        layers = [self.profile.layers[at] for at in stage]
        back, weight = (sum(layer.halves[half] for layer in layers) for half in range(2))
        return sum(layer.forward for layer in layers), back, weight


def partition(
    profile: ModelProfile,
    program: Program,
    *,
    memory: float | None = None,
    states: float = 4.0,
    hop: float = 0.0,
    bandwidth: float = inf,
    others: Mapping[str, Sequence[range]] | None = None,
    budget: int = 100_000,
) -> Partition:
    """The cut of a profiled model that makes the program's step shortest.

    Args:
        program: of a schedule, not lowered.
        memory: bytes that a rank may hold; temporaries of single actions are not counted.
        states: bytes kept for each byte of weights; 4: weights, gradients and both means of Adam, all in one
            precision.
        hop, bandwidth: seconds of a message between ranks, and bytes a second.
        others: cuts to start from and to compare with, beside those that are always looked at.
        budget: steps of the search.

    Raises:
        StrettoError: fewer layers than stages, or nothing fits the memory; tells the least that is possible.
    """
    layers, depth = len(profile.layers), program.depth
    if layers < depth:
        raise StrettoError(
            f"{layers} layers over {depth} stages", hint=f"use at most {layers} stages, or split layers"
        )
    table = Table(profile, program, states, hop, bandwidth)
    starts = _starts(profile, depth) | {name: marks(stages) for name, stages in (others or {}).items()}
    limits: list[tuple[Row, float]] = []
    fitting, value = None, _timed(table, memory)
    if memory is not None:
        fitting = _least_memory(table, starts.values(), memory, budget)
        limits = [(row, memory) for rank in range(program.ranks) for row in table.holding(rank)]
    search = CutSearch(
        layers=layers, depth=depth, value=value, rows=table.work(), limits=limits, budget=budget
    )
    for cut in (*starts.values(), *([fitting] if fitting else [])):
        search.offer(cut)
    search.descend()
    search.prove()
    if search.cut is None:
        raise _nothing(table)
    return Partition(
        profile=profile,
        program=program,
        stages=_stages(search.cut),
        seconds=search.best,
        memory=tuple(table.memory(search.cut)),
        bound=search.bound,
        starts={name: _stages(cut) for name, cut in starts.items()},
        beside={name: value(cut)[0] for name, cut in starts.items()},
        hop=hop,
        bandwidth=bandwidth,
    )


def _starts(profile: ModelProfile, depth: int) -> dict[str, Cut]:
    """Cuts that do not know the schedule."""
    layers = profile.layers
    costs = {
        "layers": [1.0] * len(layers),
        "parameters": [1.0 + layer.parameters for layer in layers],
        "work": [layer.forward + layer.backward for layer in layers],
    }
    return {name: marks(even_cut(weights, depth)) for name, weights in costs.items()}


def _stages(cut: Cut) -> tuple[range, ...]:
    return tuple(range(i, j) for i, j in pairwise(cut))


def marks(stages: Sequence[range]) -> Cut:
    """The first layer of each stage, and the number of layers."""
    return (*(stage.start for stage in stages), stages[-1].stop)


def _timed(table: Table, memory: float | None) -> Callable[[Cut], tuple[float, Callable[[], Row] | None]]:
    """The time of a cut, where it is allowed."""

    def value(cut: Cut) -> tuple[float, Callable[[], Row] | None]:
        if not _together(table, cut) or (memory is not None and max(table.memory(cut)) > memory):
            return inf, None
        seconds, counts = table.replay(cut)
        return seconds, lambda: table.chain(counts)

    return value


def _together(table: Table, cut: Cut) -> bool:
    """Whether layers that share weights share a stage, where each stage is updated by itself."""
    if not table.program.versions:
        return True
    stage_of = [s for s, (i, j) in enumerate(pairwise(cut)) for _ in range(i, j)]
    return all(len({stage_of[at] for at in one.layers}) == 1 for one in table.shared)


def _least_memory(table: Table, starts: Iterable[Cut], memory: float, budget: int) -> Cut:
    """A cut within the memory.

    Raises:
        StrettoError: there is none, or none was found.
    """
    rows = [row for rank in range(table.program.ranks) for row in table.holding(rank)]
    search = CutSearch(
        layers=table.layers,
        depth=table.depth,
        value=lambda cut: (max(table.memory(cut)), None),
        rows=rows,
        budget=budget,
    )
    for cut in starts:
        search.offer(cut)
    search.descend()
    assert search.cut is not None
    if search.best > memory:
        search.prove()
    if search.best > memory:
        needs, short = search.best / GIB, search.bound < search.best
        fullest = max(range(table.program.ranks), key=table.memory(search.cut).__getitem__)
        raise StrettoError(
            f"memory is {memory / GIB:.4g} GiB: {'the best cut found' if short else 'every cut'} needs "
            f"{needs:.4g} GiB or more, on rank {fullest} with the best one",
            hint=f"give it {1.01 * needs:.3g} GiB, smaller microbatches, more ranks, or recompute",
        )
    return search.cut


def _nothing(table: Table) -> StrettoError:
    return StrettoError(
        f"schedule {table.program.name} updates each stage by itself, and no cut was found that keeps layers "
        "with shared weights in one stage",
        hint="untie them, or use a schedule that updates at the end, such as 1f1b",
    )
