"""The memory of every rank of a job: what is there all the time, and what its program makes it hold.

A rank's lowered program is walked action by action. A forward adds what its layers keep, a backward takes it
away, a message lies in a buffer from its receive, or until its send is proved to be done; and each action has
temporaries, of which the largest counts. What is predicted is the true peak of all tensors of a process, the
batch included; buffers inside of kernels and of communication libraries are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stretto.cost.activations import Computing
from stretto.cost.flops import Recompute
from stretto.cost.keeping import Keeping, state_bytes
from stretto.cost.layers import layer_costs
from stretto.cost.shape import ModelShape
from stretto.cost.states import Shares
from stretto.layout.cut import cut as cut_layers
from stretto.plan.sharing import StageUnits, lasting, stage_units
from stretto.plan.stagework import StageWork, stage_work
from stretto.plan.states import Gather
from stretto.plan.versions import HeldVersions
from stretto.plan.working import layer_work
from stretto.schedule.action import Action, Kind
from stretto.schedule.lower import LOOKAHEAD, lower, send_releases
from stretto.schedule.messages import needed_by, sent_by
from stretto.schedule.program import Program

_ID = 8  # bytes of a token's number


@dataclass(frozen=True)
class MemoryJob:
    """What the memory of ranks depends on.

    Attributes:
        program: of a step, not lowered; with `UNSHARD` and `RESHARD` where parameters are gathered by stages.
        how: a microbatch's computation; its `recompute` is what blocks do that `modes` does not name.
        modes: of each block.
        keeping: of weights, gradients and optimiser states.
        gather: what is gathered at once, where parameters are split.
        apart: weight gradients are formed apart and then added, as some libraries do; always in 16 bits.
        cut: the layers of each stage; None: as training cuts them.
    """

    shape: ModelShape
    program: Program
    how: Computing
    modes: tuple[Recompute, ...] = ()
    keeping: Keeping = field(default_factory=Keeping)
    gather: Gather | None = None
    apart: bool = False
    cut: tuple[range, ...] | None = None

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage of one copy."""
        return self.cut or tuple(cut_layers(layer_costs(self.shape, self.how.sequence), self.program.depth))

    @cached_property
    def lowered(self) -> Program:
        """The program as it runs."""
        return self.program if self.program.lowered else lower(self.program, lookahead=LOOKAHEAD)

    @property
    def shares(self) -> Shares:
        how = self.how
        expert_tp = how.tp if how.expert_tp is None else how.expert_tp
        return Shares(how.tp, how.ep, expert_tp, how.vocab_multiple)

    def units(self, stage: int) -> StageUnits:
        """The units of one stage of one copy."""
        return stage_units(self.shape, tuple(self.stages[stage]), self.shares, self.keeping, self.gather)

    def mode(self, layer: int) -> Recompute:
        """How a layer is recomputed."""
        if not 1 <= layer <= self.shape.layers:
            return "none"
        return self.modes[layer - 1] if self.modes else self.how.recompute

    def layers_of(self, rank: int) -> list[int]:
        """All layers of a pipeline rank, those of both copies where there are two."""
        depth = self.program.depth
        return [layer for s in self.program.stages_of(rank) for layer in self.stages[s % depth]]


@dataclass(frozen=True)
class RankMemory:
    """The memory of one pipeline rank at its fullest moment, bytes.

    Attributes:
        activations: of blocks, from forwards to backwards.
        ends: of embedding, head and loss.
        messages: buffers of receives, outputs and input gradients on their way.
        transient: temporaries of the action `at`.
        masters: what the optimiser updates in place of weights of 16 bits, or of another device.
        host, disk: states, masters and parameters that are not on the device.
        gathered: whole weights that are there for a while, of which the rank keeps a part.
        open: whole gradients that are there for a while, of which it keeps a part.
        versions: copies of weights that older microbatches compute with.
        batch: tokens and targets of a step, and tables of positions.
        held: most bytes between two actions.
        flights: by stage, most microbatches whose activations are held at once.
        stages: by stage, bytes that one microbatch keeps.
    """

    rank: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    ends: int
    messages: int
    transient: int
    versions: int
    batch: int
    held: int
    at: str
    masters: int = 0
    host: int = 0
    disk: int = 0
    gathered: int = 0
    open: int = 0
    flights: dict[int, int] = field(default_factory=dict[int, int])
    stages: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def states(self) -> int:
        """Weights, gradients, masters and optimiser, on the device."""
        return self.weights + self.gradients + self.masters + self.optimizer

    @property
    def total(self) -> int:
        """The true peak."""
        moving = self.activations + self.ends + self.messages + self.transient + self.versions
        return self.states + moving + self.gathered + self.open + self.batch


def rank_memory(job: MemoryJob) -> list[RankMemory]:
    """The memory of each pipeline rank; ranks that differ in other axes hold as much."""
    return [one_rank(job, rank) for rank in range(job.program.ranks)]


def one_rank(job: MemoryJob, rank: int) -> RankMemory:
    """The memory of one pipeline rank."""
    return _Walk(job, rank).run()


def work_of(job: MemoryJob, stage: int) -> StageWork:
    """The work of one stage of one copy."""
    how = job.how
    layers = [
        layer_work(job.shape, replace(how, recompute=job.mode(layer)), layer, job.apart)
        for layer in job.stages[stage]
    ]
    return stage_work(layers, how.element * how.shard * job.shape.hidden, job.units(stage).beside())


# ------------------------------------------------------------------ the walk


class _Walk:
    """One rank's step."""

    def __init__(self, job: MemoryJob, rank: int) -> None:
        self.job, self.rank, self.program = job, rank, job.lowered
        self.order = self.program.orders[rank]
        depth = self.program.depth
        here = self.program.stages_of(rank)
        works = {d: work_of(job, d) for d in {s % depth for s in here}}
        self.work = {s: works[s % depth] for s in here}
        self.units = {s: job.units(s % depth) for s in here}
        self.waiting, self.flying_units = set[int](), {s: list[int]() for s in here}
        self.opened = set[int]()
        self.split = {a.stage for a in self.order if a.kind is Kind.W}
        self.held = Counter[str]()
        self.most, self.peak, self.at, self.during = 0, 0, "the step", 0
        self.fullest = self.held
        self.flying, self.flights = Counter[int](), dict.fromkeys(here, 0)
        self.versions = HeldVersions(self.program, self.order)

    def run(self) -> RankMemory:
        states = state_bytes(lasting(list(self.units.values())))
        sending = _releases(self.program, self.rank)
        self.held["messages"] = self._buffers()
        for action in self.order:
            for send in sending.get(action, ()):
                self.held["messages"] -= self._boundary(send.stage)
            self._act(action)
        self._update()
        batch = 2 * _ID * self.job.how.tokens * self.program.microbatches + _tables(self.job)
        return RankMemory(
            self.rank,
            states.weights,
            states.gradients,
            states.optimizer,
            self.fullest["activations"],
            self.fullest["ends"],
            self.fullest["messages"],
            self.during,
            self.fullest["versions"],
            batch,
            states.total + batch + self.most,
            self.at,
            states.masters,
            states.host,
            states.disk,
            self.fullest["gathered"],
            self.fullest["open"],
            self.flights,
            {s: work.kept + work.ends for s, work in self.work.items()},
        )

    def _act(self, action: Action) -> None:
        stage, kind, _ = action
        units = self.units[stage]
        if kind is Kind.F:
            work = self.work[stage]
            self._note(action, work.again if stage in self.waiting else work.forward)
            self._forward(action)
            self._wait_for_backward(stage)
        elif kind is Kind.B or kind is Kind.I:
            self._open(stage)
            self._note(action, self._during(action) - self._replaced(action))
            self._backward(action)
            self._let_go(stage)
            if kind is Kind.B:
                self._fly(stage)
        elif kind is Kind.W:
            work = self.work[stage]
            self._note(action, work.products + units.products - sum(self.flying_units[stage]))
            self._fly(stage)
            self.held["activations"] -= work.queued + work.boundary * (
                work.lent and self._found_gradient(action)
            )
        elif kind is Kind.UNSHARD or kind is Kind.RESHARD:
            self.held["gathered"] += units.gathered if kind is Kind.UNSHARD else -units.gathered
        elif kind is Kind.REDUCE_GRAD:
            self._note(action, units.arriving)
        elif kind is Kind.UPDATE:
            self.held["versions"] += self.versions.update(stage) * units.weights
        self.most = max(self.most, self.held.total())

    # ------------------------------------------------------------------ what is shared

    def _wait_for_backward(self, stage: int) -> None:
        """The weights of the last layer stay until the backward."""
        if stage not in self.waiting:
            self.waiting.add(stage)
            self.held["gathered"] += self.units[stage].waiting

    def _let_go(self, stage: int) -> None:
        """What was gathered layer by layer goes with a backward."""
        if stage in self.waiting:
            self.waiting.remove(stage)
            self.held["gathered"] -= self.units[stage].waiting

    def _replaced(self, action: Action) -> int:
        """What is held, and is counted in what a backward takes for itself."""
        units = self.units[action.stage]
        waiting = units.waiting if action.stage in self.waiting else 0
        return waiting + (sum(self.flying_units[action.stage]) if action.kind is Kind.B else 0)

    def _fly(self, stage: int) -> None:
        """A microbatch's gradients are on their way; those before the last two have arrived."""
        flying = self.flying_units[stage]
        self.held["open"] -= sum(flying)
        flying[:] = [*flying, *self.units[stage].flying][-2:]
        self.held["open"] += sum(flying)

    def _open(self, stage: int) -> None:
        """The first backward of a stage makes room for its whole gradient."""
        if stage not in self.opened:
            self.opened.add(stage)
            self.held["open"] += self.units[stage].open

    def _update(self) -> None:
        """All gradients have arrived, and the optimiser steps."""
        self.held["open"] = 0
        if not self.program.versions:
            taken = sum(unit.updating for unit in lasting(list(self.units.values())))
            if (now := self.held.total() + taken) > self.peak:
                self.peak, self.at, self.during, self.fullest = now, "the update", taken, self.held.copy()

    def _note(self, action: Action, during: int) -> None:
        """An action takes so many bytes for itself."""
        if (now := self.held.total() + during) > self.peak:
            self.peak, self.at, self.during, self.fullest = now, str(action), during, self.held.copy()

    def _during(self, action: Action) -> int:
        work = self.work[action.stage]
        if action.kind is Kind.I:
            return work.split
        if action.stage in self.split:  # I and W in one
            return max(work.split, work.queued + work.products - work.kept - work.ends)
        return work.backward

    def _forward(self, action: Action) -> None:
        stage, work = action.stage, self.work[action.stage]
        self.held["activations"] += work.kept
        self.held["ends"] += work.ends
        self.flying[stage] += 1
        self.flights[stage] = max(self.flights[stage], self.flying[stage])
        if not self.program.is_last(stage):
            self.held[self._way(action)] += work.boundary

    def _backward(self, action: Action) -> None:
        stage, kind, mb = action
        work, program = self.work[stage], self.program
        self.held["activations"] -= work.kept
        self.held["ends"] -= work.ends
        self.flying[stage] -= 1
        if kind is Kind.I:
            self.held["activations"] += work.queued
        if self._found_gradient(action) and not (kind is Kind.I and work.lent):
            self.held["activations"] -= work.boundary
        if not program.is_first(stage):
            if needed_by(program, Action(stage, Kind.F, mb)) is None:
                self.held["activations"] -= work.boundary  # the input that the stage before left here
            self.held[self._way(action)] += work.boundary
        if self.versions.done(action):
            self.held["versions"] -= self.units[stage].weights

    def _found_gradient(self, action: Action) -> bool:
        """Whether the next stage left the gradient on this rank, instead of sending it."""
        stage, _, mb = action
        here = needed_by(self.program, Action(stage, Kind.B, mb)) is None
        return here and not self.program.is_last(stage)

    def _way(self, action: Action) -> str:
        return "messages" if sent_by(self.program, action) else "activations"

    def _boundary(self, stage: int) -> int:
        return self.work[stage].boundary

    def _buffers(self) -> int:
        """Bytes of all buffers that messages come to."""
        return sum(n * self._boundary(stage) for (stage, _), n in receive_buffers(self.order).items())


def receive_buffers(order: Sequence[Action]) -> Counter[tuple[int, Kind]]:
    """Buffers for the messages of each stage and direction: a message lies in its buffer from its receive to
    the last backward action of its microbatch on that stage.
    """
    ends = {(a.stage, a.microbatch): at for at, a in enumerate(order) if a.kind.is_compute}
    most, now = Counter[tuple[int, Kind]](), Counter[tuple[int, Kind]]()
    freed = dict[int, list[tuple[int, Kind]]]()
    for at, action in enumerate(order):
        if action.kind in (Kind.RECV_F, Kind.RECV_B):
            pool = (action.stage, action.kind)
            now[pool] += 1
            most[pool] = max(most[pool], now[pool])
            freed.setdefault(ends[action.stage, action.microbatch], []).append(pool)
        for pool in freed.pop(at, ()):
            now[pool] -= 1
    return most


def _releases(program: Program, rank: int) -> dict[Action, list[Action]]:
    """The sends whose tensors are freed at the start of each action; the rest live to the end."""
    found = dict[Action, list[Action]]()
    for send, point in send_releases(program, rank).items():
        if point is not None:
            found.setdefault(point, []).append(send)
    return found


def _tables(job: MemoryJob) -> int:
    """Sines and cosines of rotary positions."""
    if job.shape.family != "llama":
        return 0
    length = 1 << (job.how.sequence - 1).bit_length()
    return job.how.element * length * job.shape.head_dim
