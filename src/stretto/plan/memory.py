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
from stretto.cost.layers import layer_costs
from stretto.cost.shape import ModelShape
from stretto.cost.states import Optimiser, Shares, StateBytes, elements_of, state_bytes
from stretto.layout.cut import cut as cut_layers
from stretto.plan.stagework import StageWork, stage_work
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
        program: of a step, not lowered.
        how: a microbatch's computation; its `recompute` is what blocks do that `modes` does not name.
        modes: of each block.
        weight: bytes of an element of weights, gradients and optimiser states.
        apart: weight gradients are formed apart and then added, as some libraries do; always in 16 bits.
        cut: the layers of each stage; None: as training cuts them.
    """

    shape: ModelShape
    program: Program
    how: Computing
    modes: tuple[Recompute, ...] = ()
    optimiser: Optimiser = "adamw"
    momentum: float = 0.0
    weight: int = 4
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
    flights: dict[int, int] = field(default_factory=dict[int, int])
    stages: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def states(self) -> int:
        """Weights, gradients and optimiser."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The true peak."""
        moving = self.activations + self.ends + self.messages + self.transient + self.versions
        return self.states + moving + self.batch


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
    return stage_work(layers, how.residual * how.shard * job.shape.hidden)


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
        self.split = {a.stage for a in self.order if a.kind is Kind.W}
        self.held = Counter[str]()
        self.most, self.peak, self.at, self.during = 0, 0, "the step", 0
        self.fullest = self.held
        self.flying, self.flights = Counter[int](), dict.fromkeys(here, 0)
        self.versions = _Versions(self.program, self.order)

    def run(self) -> RankMemory:
        states, sending = _states(self.job, self.rank), _releases(self.program, self.rank)
        self.held["messages"] = self._buffers()
        for action in self.order:
            for send in sending.get(action, ()):
                self.held["messages"] -= self._boundary(send.stage)
            self._act(action)
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
            self.flights,
            {s: work.kept + work.ends for s, work in self.work.items()},
        )

    def _act(self, action: Action) -> None:
        stage, kind, _ = action
        if kind is Kind.F:
            self._note(action, self.work[stage].forward)
            self._forward(action)
        elif kind is Kind.B or kind is Kind.I:
            self._note(action, self._during(action))
            self._backward(action)
        elif kind is Kind.W:
            self._note(action, self.work[stage].products)
            work = self.work[stage]
            self.held["activations"] -= work.queued + work.boundary * (
                work.lent and self._found_gradient(action)
            )
        elif kind is Kind.UPDATE:
            self.held["versions"] += self.versions.update(stage) * self._weights(stage)
        self.most = max(self.most, self.held.total())

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
            self.held["versions"] -= self._weights(stage)

    def _found_gradient(self, action: Action) -> bool:
        """Whether the next stage left the gradient on this rank, instead of sending it."""
        stage, _, mb = action
        here = needed_by(self.program, Action(stage, Kind.B, mb)) is None
        return here and not self.program.is_last(stage)

    def _way(self, action: Action) -> str:
        return "messages" if sent_by(self.program, action) else "activations"

    def _boundary(self, stage: int) -> int:
        return self.work[stage].boundary

    def _weights(self, stage: int) -> int:
        layers = self.job.stages[stage % self.program.depth]
        return self.job.weight * sum(elements_of(self.job.shape, layers, self.job.shares).values())

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


class _Versions:
    """Which weights of a rank's stages are held beside the newest, where they change within the step."""

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


def _states(job: MemoryJob, rank: int) -> StateBytes:
    elements = elements_of(job.shape, job.layers_of(rank), job.shares)
    return state_bytes(elements, job.weight, job.optimiser, job.momentum)


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
