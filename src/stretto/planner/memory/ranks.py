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

from stretto.layout.cut import cut as cut_layers
from stretto.planner.counts.activations import ComputeConfig
from stretto.planner.counts.rank_parameters import Shares
from stretto.planner.counts.state_bytes import StateBytes, StateConfig, state_bytes
from stretto.planner.memory.layer import layer_memory
from stretto.planner.memory.stage import StageMemory, stage_memory
from stretto.planner.memory.transient import StageUnits, TransientMemory, distinct_units, stage_units
from stretto.program.action import Action, Kind
from stretto.program.lower import LOOKAHEAD, lower, send_releases
from stretto.program.messages import needed_by, sent_by
from stretto.program.program import Program
from stretto.spec.data_parallel import Gather
from stretto.spec.flops import Recompute, layer_costs
from stretto.spec.shape import ModelShape

_ID = 8  # bytes of a token's number


@dataclass(frozen=True, kw_only=True)
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
    how: ComputeConfig
    modes: tuple[Recompute, ...] = ()
    state_config: StateConfig = field(default_factory=StateConfig)
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
        return stage_units(self.shape, tuple(self.stages[stage]), self.shares, self.state_config, self.gather)

    def mode(self, layer: int) -> Recompute:
        """How a layer is recomputed."""
        if not 1 <= layer <= self.shape.layers:
            return "none"
        return self.modes[layer - 1] if self.modes else self.how.recompute

    def layers_of(self, rank: int) -> list[int]:
        """All layers of a pipeline rank, those of both copies where there are two."""
        depth = self.program.depth
        return [layer for s in self.program.stages_of(rank) for layer in self.stages[s % depth]]


@dataclass(frozen=True, kw_only=True)
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


def lasting_bytes(job: MemoryJob, rank: int) -> StateBytes:
    """Weights, gradients and states of one pipeline rank."""
    depth = job.program.depth
    return state_bytes(distinct_units([job.units(stage % depth) for stage in job.program.stages_of(rank)]))


def stage_memory_of(
    job: MemoryJob, stage: int, units: StageUnits | None = None, before: int = 0
) -> StageMemory:
    """The work of one stage of one copy.

    Args:
        units: of the stage, by default all of them.
        before: reductions of other microbatches that are under way; see `StageUnits.beside`.
    """
    how, units = job.how, units or job.units(stage)
    layers = [
        layer_memory(job.shape, replace(how, recompute=job.mode(layer)), layer, job.apart)
        for layer in job.stages[stage]
    ]
    return stage_memory(layers, how.element * how.shard * job.shape.hidden, units.beside(before))


# ------------------------------------------------------------------ the walk


class _Walk:
    """One rank's step."""

    def __init__(self, job: MemoryJob, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.program = job.lowered
        self.order = self.program.orders[rank]
        here = self.program.stages_of(rank)
        self.split = {a.stage for a in self.order if a.kind is Kind.W}
        self.held = Counter[str]()
        self.units = {s: job.units(s % self.program.depth) for s in here}
        self.passing = TransientMemory(self.units, self.order, self.held)
        self.works = dict[tuple[int, int], StageMemory]()
        self.work = {s: self._work(s, 0) for s in here}
        self.most = 0
        self.peak = 0
        self.at = "the step"
        self.during = 0
        self.fullest = self.held
        self.flying, self.flights = Counter[int](), dict.fromkeys(here, 0)
        self.versions = HeldVersions(self.program, self.order)

    def run(self) -> RankMemory:
        states = lasting_bytes(self.job, self.rank)
        sending = _releases(self.program, self.rank)
        self.held["messages"] = self._buffers()
        for action in self.order:
            for send in sending.get(action, ()):
                self.held["messages"] -= self._boundary(send.stage)
            self._act(action)
        self._update()
        batch = 2 * _ID * self.job.how.tokens * self.program.microbatches + _tables(self.job)
        return RankMemory(
            rank=self.rank,
            weights=states.weights,
            gradients=states.gradients,
            optimizer=states.optimizer,
            activations=self.fullest["activations"],
            ends=self.fullest["ends"],
            messages=self.fullest["messages"],
            transient=self.during,
            versions=self.fullest["versions"],
            batch=batch,
            held=states.total + batch + self.most,
            at=self.at,
            masters=states.masters,
            host=states.host,
            disk=states.disk,
            gathered=self.fullest["gathered"],
            open=self.fullest["open"],
            flights=self.flights,
            stages={s: work.kept + work.ends for s, work in self.work.items()},
        )

    def _act(self, action: Action) -> None:
        stage, kind, _ = action
        work, passing = self.work[stage], self.passing
        if kind is Kind.F:
            self._note(action, work.again if passing.waits(stage) else work.forward)
            self._forward(action)
            passing.forward(stage)
        elif kind is Kind.B or kind is Kind.I:
            passing.open(stage)
            self.most = max(self.most, self.held.total())
            self._note(action, self._during(action) - passing.replaced(action))
            self._backward(action)
            passing.backward(action)
        elif kind is Kind.W:
            self._note(action, max(work.products, self._last_product(stage) - work.queued))
            self.held["activations"] -= work.queued + work.boundary * (
                work.lent and self._found_gradient(action)
            )
            passing.backward(action)
        elif kind is Kind.UNSHARD:
            passing.gather(stage)
        elif kind is Kind.RESHARD:
            passing.release(stage)
        elif kind is Kind.REDUCE_GRAD:
            passing.reduce(stage)
            self._note(action, 0)
        elif kind is Kind.UPDATE:
            passing.updated(stage)
            self.held["versions"] += self.versions.update(stage) * self.units[stage].weights
        self.most = max(self.most, self.held.total())

    def _update(self) -> None:
        """All gradients have arrived, and the optimiser steps."""
        self.passing.end()
        if not self.program.versions:
            taken = sum(unit.updating for unit in distinct_units(list(self.units.values())))
            if (now := self.held.total() + taken) > self.peak:
                self.peak = now
                self.at = "the update"
                self.during = taken
                self.fullest = self.held.copy()

    def _note(self, action: Action, during: int) -> None:
        """An action takes so many bytes for itself."""
        if (now := self.held.total() + during) > self.peak:
            self.peak = now
            self.at = str(action)
            self.during = during
            self.fullest = self.held.copy()

    def _work(self, stage: int, before: int) -> StageMemory:
        """The work of a stage with so many reductions of other microbatches under way."""
        if (stage, before) not in self.works:
            depth, units = self.program.depth, self.passing.units[stage]
            self.works[stage, before] = stage_memory_of(self.job, stage % depth, units, before)
        return self.works[stage, before]

    def _during(self, action: Action) -> int:
        stage = action.stage
        work = self._work(stage, self.passing.before(stage))
        if action.kind is Kind.I:
            return work.split
        if stage not in self.split:
            return work.backward
        # I and W in one
        kept, flying = work.kept + work.ends, self.passing.flying(stage)
        least = max(work.split, work.queued + work.products - kept, self._last_product(stage) - kept)
        return least + flying

    def _last_product(self, stage: int) -> int:
        """Bytes of gradients at the end of a W, beyond those that are on their way."""
        return self.passing.units[stage].products(self.passing.before(stage)) - self.passing.flying(stage)

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


class HeldVersions:
    """The versions of one rank, followed as its order goes on."""

    def __init__(self, program: Program, order: Sequence[Action]) -> None:
        self._newest, self._copied = Counter[int](), set[tuple[int, int]]()
        self._last = dict[Action, tuple[int, int]]()
        if not program.versions:
            return
        last = dict[tuple[int, int], Action]()
        for action in order:
            if action.kind is Kind.B and action.microbatch is not None:
                last[action.stage, program.versions[action.stage][action.microbatch]] = action
        self._last = {action: key for key, action in last.items()}
        place = {action: at for at, action in enumerate(order)}
        self._at = {key: place[action] for key, action in last.items()}
        self._updates = {
            stage: [at for at, a in enumerate(order) if a.kind is Kind.UPDATE and a.stage == stage]
            for stage in {a.stage for a in order}
        }

    def update(self, stage: int) -> bool:
        """Whether the update leaves the weights before it where they are."""
        version = self._newest[stage]
        self._newest[stage] += 1
        if self._at.get((stage, version), -1) > self._updates[stage][version]:
            self._copied.add((stage, version))
            return True
        return False

    def done(self, action: Action) -> bool:
        """Whether a copy of weights goes with this backward."""
        key = self._last.get(action)
        if key is None or key not in self._copied:
            return False
        self._copied.remove(key)
        return True


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
    sends = dict[Action, list[Action]]()
    for send, point in send_releases(program, rank).items():
        if point is not None:
            sends.setdefault(point, []).append(send)
    return sends


def _tables(job: MemoryJob) -> int:
    """Sines and cosines of rotary positions."""
    if job.shape.family != "llama":
        return 0
    length = 1 << (job.how.sequence - 1).bit_length()
    return job.how.element * length * job.shape.head_dim
