"""The memory of every rank of a job: what is held all the time, and what its program makes it hold.

A rank's order is walked action by action, with messages where lowering puts them (`program.rank_orders`). A
forward adds what its layers keep, a backward removes it, a message occupies a buffer from its receive, or
until its send is known to be done; and each action has temporaries, of which the largest counts. The
prediction is the peak of all tensors of a process, the batch included, without buffers inside of kernels and
of communication libraries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import add
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
from stretto.program.action import COMPUTE, Action, ActionKind
from stretto.program.lower import LOOKAHEAD, lower
from stretto.program.program import Program
from stretto.program.rank_orders import EVENTS, NUMBERS, OTHER, program_orders

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
        return lower(self.program, lookahead=LOOKAHEAD)

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

    @cached_property
    def kinds(self) -> list[int]:
        """A number for each layer, the same for those with equal memory."""
        numbers = dict[object, int]()
        layers = (layer_of(self.shape, layer) for layer in range(self.shape.chain))
        keys = ((of.kind, of.shape, of.decoder, self.mode(layer)) for layer, of in enumerate(layers))
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    @cached_property
    def stage_memories(self) -> dict[object, StageMemory]:
        """Memories of stages so far (`stage_memory_of`): most are alike."""
        return {}

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
    return _state_bytes(tuple(job.units(stage % depth) for stage in job.program.stages_of(rank)))[0]


@lru_cache(maxsize=4096)
def _state_bytes(stages: tuple[StageUnits, ...]) -> tuple[StateBytes, int]:
    """Weights, gradients and states of a rank with these stages, and bytes of its update's temporaries."""
    units = distinct_units(stages)
    return state_bytes(units), sum(unit.updating for unit in units) + muon_temporaries(units)


def copied_bytes(job: MemoryJob, rank: int) -> int:
    """Bytes that a pipeline rank copies for a checkpoint that is written in the background. If the
    parameters of a stage are tied to those of another, one of the two has them, and this counts both.
    """
    depth = job.program.depth
    units = distinct_units([job.units(stage % depth) for stage in job.program.stages_of(rank)])
    return sum(unit.saved for unit in units) // job.program.copies


def stage_memory_of(
    job: MemoryJob, stage: int, units: StageUnits | None = None, before: int = 0, splits: bool = True
) -> StageMemory:
    """The memory of one stage of one copy.

    Args:
        units: units of the stage; by default all of them.
        before: reductions of earlier microbatches that are under way; see `StageUnits.resident`.
        splits: its backwards are split.
    """
    shape, compute = job.shape, job.compute
    layers, units = job.stages[stage], units or job.units(stage)
    resident = units.resident(before)
    split = units.resident(before, split=True) if splits else ()
    messages = message_bytes(shape, compute, layers[0]), message_bytes(shape, compute, layers[-1] + 1)
    trained = job.state_config.trained
    kinds = tuple(job.kinds[layers.start : layers.stop])
    key = kinds, resident, split, messages, stage if trained.freeze else None
    if key not in job.stage_memories:
        alike, memories = dict[object, LayerMemory](), list[LayerMemory]()  # equal layers once
        for layer in layers:
            reached = layer >= reached_by_backward(shape, layers, trained)
            updated = not trained.freeze or trained_share(shape, layer, trained) > 0
            kind = job.kinds[layer], reached, updated
            if kind not in alike:
                of_mode = replace(compute, recompute=job.mode(layer))
                separate = job.separate_gradients
                alike[kind] = layer_memory(shape, of_mode, layer, separate, reached, trained=updated)
            memories.append(alike[kind])
        last = compute.for_layer(layer_of(shape, layers[-1]))
        job.stage_memories[key] = stage_memory(
            memories,
            boundary=compute.element * last.shard * shape.hidden,
            resident=resident,
            split=split,
            messages=messages,
            splits=splits,
        )
    return job.stage_memories[key]


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

_NO_TIME = -(2**62)  # bytes taken by an event that takes no time, which is never the peak


class _Walk:
    """One rank's step."""

    def __init__(self, job: MemoryJob, rank: int) -> None:
        self.job, self.rank = job, rank
        self.program = job.program
        self.order = order = program_orders(job.program).of(rank)
        weights = {EVENTS * place + NUMBERS[ActionKind.W]: stage for place, stage in enumerate(order.stages)}
        self.split = frozenset(weights[event] for event in weights.keys() & {*order.events})
        self.units = {stage: job.units(stage % self.program.depth) for stage in order.stages}
        self.transient = TransientMemory(self.units, self.split)
        self.works = dict[tuple[int, int], StageMemory]()
        self.work = {stage: self._work(stage, 0) for stage in order.stages}

    def run(self) -> RankMemory:
        order, job = self.order, self.job
        states, updating = _state_bytes(tuple(self.units.values()))
        works = zip(order.receives, self.work.values(), strict=True)
        received = sum(
            outputs * work.enters + gradients * work.returns for (outputs, gradients), work in works
        )
        of_events, changes = self._bytes_of_events()
        sums = [*map(sum, changes)]
        # before each event, and at the end
        live = [*accumulate(map(sums.__getitem__, order.events), initial=received)]
        taken = [*map(of_events.__getitem__, order.events)]
        totals, between = [*map(add, live, taken)], max(live)
        # weights and gradients that come and go, while an event takes its bytes and after it
        noted = after = [(0, 0, 0)] * len(taken)
        if self.transient.moves or self.program.versions:
            taken, noted, after = self._follow_transients(taken)
            pairs = zip(live[:-1] + live[1:], noted + after, strict=True)
            present = [lasting + sum(moving) for lasting, moving in pairs]
            totals, between = [*map(add, present, taken)], max(present)
        at = totals.index(max(totals))
        actions = sum(event % EVENTS <= OTHER for event in order.events[:at])
        peak, during = str(order.actions[actions]), taken[at]
        versions, gathered, opened = noted[at]
        # all gradients have arrived, and the optimiser steps
        if not self.program.versions and live[-1] + after[-1][1] + updating > totals[at]:
            at, peak = len(taken), "the update"
            during, gathered = updating, after[-1][1]
            versions = opened = 0
        until = Counter(order.events[:at])
        activations, ends, messages = (
            sum(count * changes[event][row] for event, count in until.items()) for row in range(3)
        )
        batch = step_ids(job, self.program.step_microbatches) + _tables(job, self.rank)
        batch += job.compute.framework.buckets
        copied = copied_bytes(job, self.rank) if job.saves_in_background else 0
        saving = copied if job.state_config.unified_memory else 0
        return RankMemory(
            rank=self.rank,
            weights=states.weights,
            gradients=states.gradients,
            optimizer=states.optimizer,
            activations=activations,
            ends=ends,
            messages=messages + received,
            transient=during,
            versions=versions,
            batch=batch,
            between_actions=states.total + batch + saving + between,
            at=peak,
            masters=states.masters,
            saving=saving,
            host=states.host + copied - saving,
            disk=states.disk,
            gathered=gathered,
            open=opened,
            flights=dict(zip(order.stages, order.flights, strict=True)),
            stages={stage: work.saved + work.ends for stage, work in self.work.items()},
        )

    def _bytes_of_events(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """For each number of an event the bytes that it takes while it computes, and by how much activations,
        ends and messages are more after it.
        """
        taken, changes = list[int](), list[tuple[int, int, int]]()
        for stage, work in self.work.items():
            sends, returns = self.program.sends[stage], self.program.sends[stage - 1]
            # the next stage is on this rank too, and leaves its gradient here instead of sending it
            local = 0 if sends or self.program.is_last(stage) else work.boundary
            output = 0 if self.job.compute.framework.frees_sent else work.boundary
            gradient = work.enters if returns else 0  # else it takes the place of the input
            lent = local if work.lent else 0
            backwards = (self._during(stage, kind) for kind in (ActionKind.B, ActionKind.I, ActionKind.W))
            taken += [work.forward, *backwards, 0, *[_NO_TIME] * 3]
            changes += [
                (work.saved + local, work.ends, output if sends else 0),
                (-work.saved - local, -work.ends, gradient),
                (work.queued - work.saved - local + lent, -work.ends, gradient),
                (-work.queued - lent, 0, 0),
                (0, 0, 0),
                (0, 0, 0),
                (0, 0, -output),
                (0, 0, -work.enters),
            ]
        return taken, changes

    def _follow_transients(
        self, taken: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """The bytes that each event takes while weights and gradients come and go, and the bytes of versions,
        gathered weights and open gradients then and after it.
        """
        noted, after = list[tuple[int, int, int]](), list[tuple[int, int, int]]()
        taken = list(taken)
        versions, of_versions = HeldVersions(self.program, self.program.orders[self.rank]), 0
        transient, actions = self.transient, iter(self.order.actions)
        for n, event in enumerate(self.order.events):
            if event % EVENTS > OTHER:
                noted.append((of_versions, transient.gathered, transient.open))
                after.append(noted[-1])
                continue
            action = next(actions)
            stage, kind, _ = action
            if kind is ActionKind.F and transient.waits(stage):
                taken[n] = self.work[stage].again
            elif kind is ActionKind.B or kind is ActionKind.I:
                transient.open_gradients(stage)
                taken[n] = self._during(stage, kind) - transient.replaced(stage)
            elif kind is ActionKind.W:
                taken[n] = self._during(stage, kind)
            elif kind is ActionKind.REDUCE_GRAD:
                transient.reduce(stage)
            noted.append((of_versions, transient.gathered, transient.open))
            if kind is ActionKind.F:
                transient.forward(stage)
            elif kind in COMPUTE:
                transient.backward(action)
                of_versions -= versions.done(action) * self.units[stage].weights
            elif kind is ActionKind.UNSHARD:
                transient.gather(stage)
            elif kind is ActionKind.RESHARD:
                transient.release(stage)
            elif kind is ActionKind.UPDATE:
                transient.updated(stage)
                of_versions += versions.update(stage) * self.units[stage].weights
            after.append((of_versions, transient.gathered, transient.open))
        return taken, noted, after

    def _work(self, stage: int, before: int) -> StageMemory:
        """The memory of a stage while `before` reductions of earlier microbatches run."""
        if (stage, before) not in self.works:
            depth, units = self.program.depth, self.transient.units[stage]
            splits = stage in self.split
            self.works[stage, before] = stage_memory_of(self.job, stage % depth, units, before, splits)
        return self.works[stage, before]

    def _during(self, stage: int, kind: ActionKind) -> int:
        """Bytes that a B, I or W takes now, beyond what is held before it."""
        transient = self.transient
        before, flying = transient.before(stage), transient.flying(stage)
        # gradients at the end of a W, beyond those in flight
        last = transient.units[stage].products(before) - flying if stage in self.split else 0
        work = self._work(stage, 0 if kind is ActionKind.W else before)
        if kind is ActionKind.W:
            return max(work.products, last - work.queued)
        if kind is ActionKind.I:
            return work.split
        if stage not in self.split:
            return work.backward
        # B is I, then W
        saved = work.saved + work.ends
        return max(work.split, max(work.queued + work.products - saved, last - saved) + flying)


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
