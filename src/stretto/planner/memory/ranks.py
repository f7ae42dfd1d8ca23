"""The memory of every rank of a job: what is held all the time, and what its program makes it hold.

A rank's lowered program is walked action by action. A forward adds what its layers keep, a backward removes
it, a message occupies a buffer from its receive, or until its send is known to be done; and each action has
temporaries, of which the largest counts. The prediction is the peak of all tensors of a process, the batch
included, without buffers inside of kernels and of communication libraries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from stretto.job.chain import blocks_among, layer_of
from stretto.job.data_parallel import Gather
from stretto.job.flops import Recompute
from stretto.job.program import stages_of
from stretto.job.shape import ModelShape
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.counts.rank_parameters import Shares, reached_by_backward, trained_share
from stretto.planner.counts.state_bytes import StateBytes, StateConfig, muon_temporaries, state_bytes
from stretto.planner.memory.layer import LayerMemory, layer_memory
from stretto.planner.memory.stage import StageMemory, stage_memory
from stretto.planner.memory.transient import StageUnits, TransientMemory, distinct_units, stage_units
from stretto.program.action import COMPUTE, TRANSFER, Action, ActionKind
from stretto.program.lower import LOOKAHEAD, lower, send_releases
from stretto.program.program import Program

_ID = 8  # bytes of a token id


@dataclass(frozen=True, kw_only=True)
class MemoryJob:
    """Everything on which the memory of ranks depends.

    Attributes:
        program: the program of a step, not lowered; with `UNSHARD` and `RESHARD` if parameters are
            gathered by stages.
        compute: the computation of a microbatch; its `recompute` holds for blocks that `modes` does not name.
        modes: recomputation of each block.
        state_config: configuration of weights, gradients and optimiser states.
        gather: gather sharded parameters by layers or by stages, or None if they are not sharded.
        saves_in_background: a copy of each checkpoint stays in host memory while it is written.
        separate_gradients: weight gradients are formed separately and then accumulated, as some libraries do;
            those of 16 bits always are.
        cut: the layers of each stage, or None for those that training cuts.
    """

    shape: ModelShape
    program: Program
    compute: ComputeConfig
    modes: tuple[Recompute, ...] = ()
    state_config: StateConfig = field(default_factory=StateConfig)
    gather: Gather | None = None
    saves_in_background: bool = False
    separate_gradients: bool = False
    cut: tuple[range, ...] | None = None

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The layers of each stage of one copy."""
        return self.cut or stages_of(
            self.shape, self.compute.sequence, self.program.depth, target=self.compute.target
        )

    @cached_property
    def lowered(self) -> Program:
        """The program with its messages and reductions."""
        return self.program if self.program.lowered else lower(self.program, lookahead=LOOKAHEAD)

    @property
    def shares(self) -> Shares:
        return Shares.of(self.compute)

    def units(self, stage: int) -> StageUnits:
        """The units of one stage of one copy."""
        return stage_units(self.shape, tuple(self.stages[stage]), self.shares, self.state_config, self.gather)

    def mode(self, layer: int) -> Recompute:
        """The mode of recomputation of a layer."""
        if (block := layer_of(self.shape, layer).block) is None:
            return "none"
        return self.modes[block] if self.modes else self.compute.recompute

    def layers_of(self, rank: int) -> list[int]:
        """All layers of a pipeline rank, of both copies if the program has two."""
        depth = self.program.depth
        return [layer for s in self.program.stages_of(rank) for layer in self.stages[s % depth]]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one pipeline rank at its peak, bytes.

    Attributes:
        activations: activations of blocks, from forwards to backwards.
        ends: activations of embedding, head and loss.
        messages: receive buffers, outputs and input gradients that are being sent.
        transient: temporaries of the action `at`.
        masters: weights that the optimiser updates in place of those of 16 bits, or of another device.
        saving: bytes of the copy from which checkpoints are written in the background, if host and device
            share their memory; else they are a part of `host`.
        host, disk: states, masters and parameters that are not on the device.
        gathered: whole weights that are held for a while, of which the rank keeps a shard.
        open: whole gradients that are held for a while, of which it keeps a shard.
        versions: copies of weights that older microbatches compute with.
        batch: tokens and targets of a step, tables of positions, and a framework's buckets.
        between_actions: the most bytes between two actions.
        flights: most microbatches whose activations are held at once, by stage.
        stages: bytes that one microbatch keeps, by stage.
    """

    rank: int
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    ends: int = 0
    messages: int = 0
    transient: int = 0
    versions: int = 0
    batch: int = 0
    between_actions: int = 0
    at: str = "the step"
    masters: int = 0
    saving: int = 0
    host: int = 0
    disk: int = 0
    gathered: int = 0
    open: int = 0
    flights: dict[int, int] = field(default_factory=dict[int, int])
    stages: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def states(self) -> int:
        """Weights, gradients, masters and optimiser states on the device."""
        return self.weights + self.gradients + self.masters + self.optimizer

    @property
    def total(self) -> int:
        """Peak bytes on the device."""
        moving = self.activations + self.ends + self.messages + self.transient + self.versions
        return self.states + moving + self.gathered + self.open + self.batch + self.saving


def rank_record(rank: RankMemory) -> dict[str, Any]:
    """A rank's memory as JSON, with the sums; `held` is between actions."""
    record = asdict(rank)
    between = record.pop("between_actions")
    return {**record, "held": between, "states": rank.states, "total": rank.total}


def rank_memory(job: MemoryJob) -> list[RankMemory]:
    """The memory of each pipeline rank; ranks that differ on other axes hold the same."""
    return [one_rank(job, rank) for rank in range(job.program.ranks)]


def one_rank(job: MemoryJob, rank: int) -> RankMemory:
    """The memory of one pipeline rank."""
    return _Walk(job, rank).run()


def lasting_bytes(job: MemoryJob, rank: int) -> StateBytes:
    """Weights, gradients and states that one pipeline rank holds all the time."""
    depth = job.program.depth
    return state_bytes(distinct_units([job.units(stage % depth) for stage in job.program.stages_of(rank)]))


def copied_bytes(job: MemoryJob, rank: int) -> int:
    """Bytes that a pipeline rank copies for a checkpoint that is written in the background. If the
    parameters of a stage are tied to those of another, one of the two has them, and this counts both.
    """
    depth = job.program.depth
    units = distinct_units([job.units(stage % depth) for stage in job.program.stages_of(rank)])
    return sum(unit.saved for unit in units) // job.program.copies


def stage_memory_of(
    job: MemoryJob, stage: int, units: StageUnits | None = None, before: int = 0
) -> StageMemory:
    """The memory of one stage of one copy.

    Args:
        units: units of the stage; by default all of them.
        before: reductions of earlier microbatches that are under way; see `StageUnits.resident`.
    """
    shape, compute = job.shape, job.compute
    trained = job.state_config.trained
    layers = job.stages[stage]
    alike, memories = dict[object, LayerMemory](), list[LayerMemory]()  # equal layers once
    for layer in layers:
        chain_layer, mode = layer_of(shape, layer), job.mode(layer)
        reached = layer >= reached_by_backward(shape, layers, trained)
        updated = not trained.freeze or trained_share(shape, layer, trained) > 0
        key = chain_layer.kind, id(chain_layer.shape), chain_layer.decoder, mode, reached, updated
        if key not in alike:
            of_mode = replace(compute, recompute=mode)
            alike[key] = layer_memory(shape, of_mode, layer, job.separate_gradients, reached, trained=updated)
        memories.append(alike[key])
    last = compute.for_layer(layer_of(shape, layers[-1]))
    return stage_memory(
        memories,
        boundary=compute.element * last.shard * shape.hidden,
        resident=(units or job.units(stage)).resident(before),
        split=(units or job.units(stage)).resident(before, split=True),
        messages=(message_bytes(shape, compute, layers[0]), message_bytes(shape, compute, layers[-1] + 1)),
    )


@lru_cache(maxsize=4096)
def message_bytes(shape: ModelShape, compute: ComputeConfig, layer: int) -> int:
    """Bytes of what is sent to the stage that begins with a layer: an activation, and within the decoder of
    an encoder-decoder model the memory too.
    """
    token_bytes = compute.element * shape.hidden
    if not shape.encoder_layers or layer <= shape.encoder_layers + 1:
        return token_bytes * compute.shard
    decoder = compute.for_layer(layer_of(shape, shape.chain - 1))
    return token_bytes * (decoder.shard + (decoder.for_memory.shard if layer < shape.chain - 1 else 0))


def largest_message(shape: ModelShape, compute: ComputeConfig) -> int:
    """Bytes of the largest message between stages."""
    return max(message_bytes(shape, compute, layer) for layer in (1, shape.encoder_layers + 2))


def tensors_between(shape: ModelShape, layer: int) -> int:
    """Tensors of that message."""
    return 2 if shape.encoder_layers and shape.encoder_layers + 1 < layer < shape.chain - 1 else 1


# ------------------------------------------------------------------ the walk


class _Walk:
    """One rank's step."""

    def __init__(self, job: MemoryJob, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.program = job.lowered
        self.order = self.program.orders[rank]
        stages = self.program.stages_of(rank)
        self.split = {a.stage for a in self.order if a.kind is ActionKind.W}
        self.bytes = Counter[str]()
        self.units = {s: job.units(s % self.program.depth) for s in stages}
        self.transient = TransientMemory(self.units, self.order, self.bytes)
        self.works = dict[tuple[int, int], StageMemory]()
        self.work = {s: self._work(s, 0) for s in stages}
        self.most_held = 0
        self.peak = 0
        self.at = "the step"
        self.during = 0
        self.fullest = self.bytes
        self.flying, self.flights = Counter[int](), dict.fromkeys(stages, 0)
        self.versions = HeldVersions(self.program, self.order)

    def run(self) -> RankMemory:
        states = lasting_bytes(self.job, self.rank)
        # the sends whose tensors are freed at the start of each action; the others live to the end
        sending = dict[Action, list[Action]]()
        for send, point in send_releases(self.program, self.rank).items():
            if point is not None:
                sending.setdefault(point, []).append(send)
        self.bytes["messages"] = sum(
            count * (self.work[stage].enters if kind is ActionKind.RECV_F else self.work[stage].returns)
            for (stage, kind), count in receive_buffers(self.order).items()
        )
        for action in self.order:
            if action.kind in TRANSFER:
                continue
            for send in sending.get(action, ()):
                work = self.work[send.stage]
                if send.kind is ActionKind.SEND_B:
                    self.bytes["messages"] -= work.enters
                elif not self.job.compute.framework.frees_sent:
                    self.bytes["messages"] -= work.boundary
            self._act(action)
        # all gradients have arrived, and the optimiser steps
        self.transient.end()
        if not self.program.versions:
            units = distinct_units(list(self.units.values()))
            taken = sum(unit.updating for unit in units) + muon_temporaries(units)
            if (now := self.bytes.total() + taken) > self.peak:
                self.peak = now
                self.at = "the update"
                self.during = taken
                self.fullest = self.bytes.copy()
        batch = step_ids(self.job, self.program.step_microbatches) + _tables(self.job, self.rank)
        batch += self.job.compute.framework.buckets
        copied = copied_bytes(self.job, self.rank) if self.job.saves_in_background else 0
        saving = copied if self.job.state_config.unified_memory else 0
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
            between_actions=states.total + batch + saving + self.most_held,
            at=self.at,
            masters=states.masters,
            saving=saving,
            host=states.host + copied - saving,
            disk=states.disk,
            gathered=self.fullest["gathered"],
            open=self.fullest["open"],
            flights=self.flights,
            stages={s: work.saved + work.ends for s, work in self.work.items()},
        )

    def _act(self, action: Action) -> None:
        stage, kind, _ = action
        work, transient = self.work[stage], self.transient
        if kind is ActionKind.F:
            self._note(action, work.again if transient.waits(stage) else work.forward)
            self._forward(action)
            transient.forward(stage)
        elif kind is ActionKind.B or kind is ActionKind.I:
            transient.open(stage)
            self.most_held = max(self.most_held, self.bytes.total())
            self._note(action, self._during(action) - transient.replaced(action))
            self._backward(action)
            transient.backward(action)
        elif kind is ActionKind.W:
            self._note(action, max(work.products, self._last_product(stage) - work.queued))
            self.bytes["activations"] -= work.queued + work.boundary * (
                work.lent and self._gradient_is_local(action)
            )
            transient.backward(action)
        elif kind is ActionKind.UNSHARD:
            transient.gather(stage)
        elif kind is ActionKind.RESHARD:
            transient.release(stage)
        elif kind is ActionKind.REDUCE_GRAD:
            transient.reduce(stage)
            self._note(action, 0)
        elif kind is ActionKind.UPDATE:
            transient.updated(stage)
            self.bytes["versions"] += self.versions.update(stage) * self.units[stage].weights
        self.most_held = max(self.most_held, self.bytes.total())

    def _note(self, action: Action, during: int) -> None:
        """Record an action that takes `during` bytes beyond what is held."""
        if (now := self.bytes.total() + during) > self.peak:
            self.peak = now
            self.at = str(action)
            self.during = during
            self.fullest = self.bytes.copy()

    def _work(self, stage: int, before: int) -> StageMemory:
        """The memory of a stage while `before` reductions of earlier microbatches run."""
        if (stage, before) not in self.works:
            depth, units = self.program.depth, self.transient.units[stage]
            self.works[stage, before] = stage_memory_of(self.job, stage % depth, units, before)
        return self.works[stage, before]

    def _during(self, action: Action) -> int:
        stage = action.stage
        work = self._work(stage, self.transient.before(stage))
        if action.kind is ActionKind.I:
            return work.split
        if stage not in self.split:
            return work.backward
        # B is I, then W
        saved, flying = work.saved + work.ends, self.transient.flying(stage)
        later = max(work.queued + work.products - saved, self._last_product(stage) - saved)
        return max(work.split, later + flying)

    def _last_product(self, stage: int) -> int:
        """Bytes of gradients at the end of a W, beyond those in flight."""
        return self.transient.units[stage].products(self.transient.before(stage)) - self.transient.flying(
            stage
        )

    def _forward(self, action: Action) -> None:
        stage, work = action.stage, self.work[action.stage]
        self.bytes["activations"] += work.saved
        self.bytes["ends"] += work.ends
        self.flying[stage] += 1
        self.flights[stage] = max(self.flights[stage], self.flying[stage])
        category = self._category(action)
        is_freed = category == "messages" and self.job.compute.framework.frees_sent
        if not is_freed and not self.program.is_last(stage):
            self.bytes[category] += work.boundary

    def _backward(self, action: Action) -> None:
        stage, kind, _ = action
        work, program = self.work[stage], self.program
        self.bytes["activations"] -= work.saved
        self.bytes["ends"] -= work.ends
        self.flying[stage] -= 1
        if kind is ActionKind.I:
            self.bytes["activations"] += work.queued
        if self._gradient_is_local(action) and not (kind is ActionKind.I and work.lent):
            self.bytes["activations"] -= work.boundary
        if not program.is_first(stage):
            if not program.sends[stage - 1]:
                self.bytes["activations"] -= work.enters  # the input, made by a stage on this rank
            self.bytes[self._category(action)] += work.enters
        if self.versions.done(action):
            self.bytes["versions"] -= self.units[stage].weights

    def _gradient_is_local(self, action: Action) -> bool:
        """True if the next stage is on this rank too and left the gradient here instead of sending it."""
        return not self.program.sends[action.stage] and not self.program.is_last(action.stage)

    def _category(self, action: Action) -> str:
        source = action.stage - (action.kind is not ActionKind.F)  # no stage -1, the last, sends its output
        return "messages" if self.program.sends[source] else "activations"


class HeldVersions:
    """The versions of weights that a rank holds besides the newest, if weights change within the step."""

    def __init__(self, program: Program, order: Sequence[Action]) -> None:
        self._newest, self._copied = Counter[int](), set[tuple[int, int]]()
        self._last = dict[Action, tuple[int, int]]()
        if not program.versions:
            return
        last = dict[tuple[int, int], Action]()
        for action in order:
            if action.kind is ActionKind.B and action.microbatch is not None:
                last[action.stage, program.versions[action.stage][action.microbatch]] = action
        self._last = {action: key for key, action in last.items()}
        positions = {action: position for position, action in enumerate(order)}
        self._at = {key: positions[action] for key, action in last.items()}
        self._updates = {
            stage: [
                position
                for position, a in enumerate(order)
                if a.kind is ActionKind.UPDATE and a.stage == stage
            ]
            for stage in {a.stage for a in order}
        }

    def update(self, stage: int) -> bool:
        """True if an update must leave the weights before it in memory."""
        version = self._newest[stage]
        self._newest[stage] += 1
        if self._at.get((stage, version), -1) > self._updates[stage][version]:
            self._copied.add((stage, version))
            return True
        return False

    def done(self, action: Action) -> bool:
        """True if a copy of weights is freed with this backward."""
        key = self._last.get(action)
        if key is None or key not in self._copied:
            return False
        self._copied.remove(key)
        return True


def receive_buffers(order: Sequence[Action]) -> Counter[tuple[int, ActionKind]]:
    """Buffers for the messages of each stage and direction: a message occupies its buffer from its receive to
    the last backward action of its microbatch on that stage.
    """
    ends = {(a.stage, a.microbatch): position for position, a in enumerate(order) if a.kind in COMPUTE}
    spans = dict[tuple[int, ActionKind], list[tuple[int, int]]]()
    for position, (stage, kind, microbatch) in enumerate(order):
        if kind is ActionKind.RECV_F or kind is ActionKind.RECV_B:
            spans.setdefault((stage, kind), []).append((position, ends[stage, microbatch]))
    largest = Counter[tuple[int, ActionKind]]()
    for pool, of_pool in spans.items():
        freed = sorted(end for _, end in of_pool)
        largest[pool] = max(n + 1 - bisect_left(freed, at) for n, (at, _) in enumerate(of_pool))
    return largest


def step_ids(job: MemoryJob, microbatches: int) -> int:
    """Bytes of the ids and targets of some microbatches; in an encoder-decoder model of the encoder's tokens,
    and of the decoder's tokens and targets.
    """
    compute = job.compute
    ids = 2 * compute.tokens
    if job.shape.encoder_layers:
        ids = compute.tokens + 2 * compute.for_layer(layer_of(job.shape, job.shape.chain - 1)).tokens
    return _ID * ids * microbatches


def _tables(job: MemoryJob, rank: int) -> int:
    """Bytes of the sines and cosines of rotary positions, or of the buckets of distances in each stack."""
    if job.shape.relative:
        hows = (
            job.compute.for_layer(layer_of(job.shape, layer))
            for layer in blocks_among(job.shape, job.layers_of(rank))
        )
        return sum(_ID * length**2 for length in {compute.sequence for compute in hows})
    if not job.shape.rotary:
        return 0
    length = 1 << (job.compute.sequence - 1).bit_length()
    return job.compute.element * length * job.shape.rope_dim
