"""Lower bounds on memory, from what a rank holds at a peak state of its schedule.

Counted are sharded states, inputs and kept activations of microbatches in flight, and the temporaries of the
backward that is about to begin. Buffers that only the lowered program reveals are left out, so that a bound
is below the exact memory, but by little: candidates that do not fit are seldom replayed.

A peak state is taken from a real program, so that whatever a rank holds then bounds its peak from below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from stretto.errors import StrettoError
from stretto.job.chain import is_block, kind_counts, layer_of, non_blocks_among
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.finetune import TrainedParameters
from stretto.job.flops import Recompute as Mode
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.counts.compute import ELEMENT_BYTES, ComputeConfig
from stretto.planner.counts.rank_parameters import Shares
from stretto.planner.machines.device import Device
from stretto.planner.memory.fits import Fit, fit
from stretto.planner.memory.layer import layer_memory
from stretto.planner.memory.ranks import RankMemory
from stretto.planner.memory.stage import stage_memory
from stretto.planner.search.space import depth_of, existing_program, first_blocks
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, SearchTask
from stretto.planner.search.work import SearchWork
from stretto.planner.time.data_parallel import Elements, stage_elements
from stretto.program import PLAIN, schedule
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program
from stretto.program.schedules.traits import is_searched

# bytes of a microbatch between I and W over those of one in flight: fewer, or many more with recomputation
_WAITING_WEIGHTS = 0.5, 8.0
_DEEP_PIPELINE = 64  # ranks from which on programs are so expensive that a looser bound pays off
_SAMPLE_RANKS, _SAMPLE_MICROBATCHES = 2, 16  # ranks, and more microbatches than most schedules hold on them


class PeakState(NamedTuple):
    """The microbatches that a rank holds when it begins a backward.

    Attributes:
        in_flight: for each of its stages, microbatches between forward and backward, this one included.
        waiting: for each stage, microbatches between I and W.
        stage_index: index of the stage that begins the backward, among the rank's.
    """

    in_flight: tuple[int, ...]
    waiting: tuple[int, ...]
    stage_index: int


def filling_microbatches(choice: ScheduleChoice, pp: int, microbatches: int) -> int:
    """A number of microbatches that nearly fills a schedule's ranks: with more they hold no less.

    It is the same for most batches, so that few programs have to be made; if ranks hold their whole batch, it
    is the whole batch.
    """
    if _holds_all(choice, microbatches):
        return microbatches
    times = 1 if pp >= _DEEP_PIPELINE else 2
    return min(microbatches, times * max(pp, dict(choice.options).get("group") or 1))


def sampled_ranks(pp: int) -> tuple[int, ...]:
    """The pipeline ranks that bounds look at: the first, the second, which often has more blocks, the middle
    and the last.
    """
    return tuple(sorted({0, min(1, pp - 1), pp // 2, pp - 1}))


@lru_cache(maxsize=4096)
def peak_states(choice: ScheduleChoice, pp: int, microbatches: int) -> dict[int, tuple[PeakState, ...]]:
    """For each of the sampled ranks the fullest states at which each of its stages begins a backward, the
    fullest of all first; empty if the schedule does not exist for this number of microbatches, or is searched
    for.
    """
    if is_searched(choice.name):
        return {}
    try:
        program = schedule(choice.name, pp, microbatches, **dict(choice.options))
    except StrettoError:
        return {}  # the rules refuse such a job
    return {rank: _of_rank(program, rank) for rank in sampled_ranks(pp)}


@lru_cache(maxsize=4096)
def _holds_all(choice: ScheduleChoice, microbatches: int) -> bool:
    """True if each of two ranks holds the whole batch at once."""
    options = tuple((name, value) for name, value in choice.options if name != "group")
    states = peak_states(
        ScheduleChoice(choice.name, options), _SAMPLE_RANKS, min(_SAMPLE_MICROBATCHES, microbatches)
    )
    return bool(states) and all(
        {*of_rank[0].in_flight} == {min(_SAMPLE_MICROBATCHES, microbatches)} for of_rank in states.values()
    )


def _of_rank(program: Program, rank: int) -> tuple[PeakState, ...]:
    index = {stage: stage_index for stage_index, stage in enumerate(program.stages_of(rank))}
    order: Sequence[Action] = program.orders[rank]
    split = {a.stage for a in order if a.kind is ActionKind.W}
    flights, waiting = [0] * len(index), [0] * len(index)
    best = dict[tuple[int, float], tuple[float, PeakState]]()
    for stage, kind, _ in order:
        stage_index = index[stage]
        if kind is ActionKind.F:
            flights[stage_index] += 1
        elif kind is ActionKind.B or kind is ActionKind.I:
            for weight in _WAITING_WEIGHTS:
                score = sum(flights) + weight * sum(waiting)
                previous = best.get((stage_index, weight))
                if previous is None or score > previous[0]:
                    best[stage_index, weight] = score, PeakState(tuple(flights), tuple(waiting), stage_index)
            flights[stage_index] -= 1
            waiting[stage_index] += kind is ActionKind.I and stage in split
        elif kind is ActionKind.W:
            waiting[stage_index] -= 1
    return tuple({peak: None for _, peak in sorted(best.values(), key=lambda entry: -entry[0])})


@dataclass(frozen=True)
class MemoryBound:
    """Bytes that some rank holds at least.

    Attributes:
        states: weights, gradients, masters, optimiser states.
        activations: activations of microbatches in flight, and temporaries of the current backward.
    """

    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.activations

    def fit(self, device: Device, reserve: float | None) -> Fit:
        """Fit of the bound on the device: if even this does not fit, no such candidate does."""
        return fit([RankMemory(rank=0, weights=self.states, activations=self.activations)], device, reserve)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Layers and peak states of a pipeline rank.

    Attributes:
        counts: number of blocks of each kind, for each stage.
        finals: kind of each stage's last block, with which its backward begins.
        ends: for each stage, how many of `MemoryBounds.ends` it has: embedding, head, and the layer between
            two stacks.
        first, last: for each stage, True if it begins with a layer that is no block, or ends with the head.
        peaks: its peak states.
    """

    stages: tuple[range, ...]
    counts: tuple[tuple[int, ...], ...]
    finals: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    first: tuple[bool, ...]
    last: tuple[bool, ...]
    peaks: tuple[PeakState, ...]


class _Layer(NamedTuple):
    """Bytes of a layer for one microbatch: kept with its input, kept between I and W, and the peak of its
    backward beyond what it keeps.
    """

    saved: int
    held_until_w: int
    backward: int


class MemoryBounds:
    """Lower bounds on the memory of the fullest of some ranks (`sampled_ranks`)."""

    def __init__(self, task: SearchTask, work: SearchWork | None = None) -> None:
        self.task, self.work = task, work or SearchWork()
        # the first layer of each kind of block
        self._kinds = first_blocks(task.shape)
        self.ends = non_blocks_among(task.shape, range(task.shape.chain))  # the layers that are no blocks
        self._ranks = dict[object, tuple[_Rank, ...]]()
        self._states = dict[object, tuple[int, ...]]()
        self._layers = dict[object, _Layer]()
        self._alike = dict[object, tuple[_Layer, ...]]()  # a block of each kind
        self._places = dict[object, int]()
        self._bounds = dict[Candidate, MemoryBound]()

    def states(self, layout: Layout, expert_tp: int | None, dp: DataParallelSettings, saving: Saving) -> int:
        """A bound for every schedule: states shared evenly over pipeline ranks."""
        sizes = layout.tp, layout.cp, layout.ep, layout.dp, layout.pp, expert_tp
        key = sizes, dp, saving.offload, saving.parameters
        if key not in self._places:
            parallelism = Parallelism(
                layout=layout, expert_tp=expert_tp, micro_batch=1, sequence_parallel=False, context="ring"
            )
            job = Candidate(parallelism, ScheduleChoice(PLAIN), dp, saving).job(self.task)
            self._places[key] = _states(job, (range(self.task.shape.chain),)) // layout.pp
        return self._places[key]

    def parallelism(self, parallelism: Parallelism, dp: DataParallelSettings, saving: Saving) -> int:
        """A bound for every schedule: the states, and one microbatch in one block."""
        mode = saving.recompute.mode
        blocks = self._blocks(parallelism, "full" if mode == "auto" else mode)
        states = self.states(parallelism.layout, parallelism.expert_tp, dp, saving)
        # the rank with the largest blocks is unknown, and with it the states that it holds
        pick = max if parallelism.layout.pp == 1 else min
        return states + pick(block.saved + block.backward for block in blocks)

    def of(self, candidate: Candidate) -> MemoryBound:
        """Return the bound of a candidate."""
        if candidate not in self._bounds:
            self.work.add("memory bound")
            self._bounds[candidate] = self._of(candidate)
        return self._bounds[candidate]

    def _of(self, candidate: Candidate) -> MemoryBound:
        ranks = self._of_ranks(candidate)
        states = self._of_states(candidate, ranks)
        parallelism, again = candidate.parallelism, candidate.saving.recompute
        full = self._blocks(parallelism, "full")
        end_layers = [self._layer(parallelism, layer, "none") for layer in self.ends]
        head = end_layers[-1]
        if again.mode in ("full", "auto") and again.blocks is None:
            partial, recomputed = full, 0
        else:
            partial = self._blocks(parallelism, "none" if again.mode in ("full", "auto") else again.mode)
            recomputed = again.blocks or 0
        inputs = min(block.saved for block in full)
        shape, bounds = self.task.shape, list[MemoryBound]()
        for rank, state_bytes in zip(ranks, states, strict=True):
            saved, waits = list[int](), list[int]()
            workers = list[_Layer]()
            for stage_index, (stage, every) in enumerate(zip(rank.stages, rank.counts, strict=True)):
                starts, ends = rank.first[stage_index], rank.last[stage_index]
                start = stage.start + starts
                repeated = (
                    kind_counts(shape, range(start, min(start + recomputed, shape.chain)))
                    if recomputed
                    else (0,) * len(full)
                )
                if sum(repeated) > sum(every):
                    repeated = every
                total = sum(
                    n * layer.saved for n, layer in zip(rank.ends[stage_index], end_layers, strict=True)
                )
                for n, repeats, full_block, block in zip(every, repeated, full, partial, strict=True):
                    total += repeats * full_block.saved + (n - repeats) * block.saved
                saved.append(total)
                waiting = sum(n * block.held_until_w for n, block in zip(every, full, strict=True))
                waits.append(max(0, waiting + ends * head.held_until_w - inputs))
                workers.append(
                    head if ends else (partial if sum(every) > recomputed else full)[rank.finals[stage_index]]
                )
            activations = 0
            for peak in rank.peaks:
                now = sum(map(int.__mul__, peak.in_flight, saved))
                now += sum(map(int.__mul__, peak.waiting, waits)) + workers[peak.stage_index].backward
                activations = max(activations, now)
            bounds.append(MemoryBound(state_bytes, activations))
        return max(bounds, key=lambda bound: bound.total)

    def _kind_of(self, layer: int) -> int:
        """Index of a layer's kind of block; the first for the embedding, which may be all of a stage."""
        shape = self.task.shape
        block = layer if is_block(shape, layer) else layer - 1 if layer > 1 else 1
        return kind_counts(shape, range(block, block + 1)).index(1)

    def _blocks(self, parallelism: Parallelism, mode: Mode) -> tuple[_Layer, ...]:
        """A block of each kind."""
        key = parallelism, mode
        if key not in self._alike:
            self._alike[key] = tuple(self._layer(parallelism, layer, mode) for layer in self._kinds)
        return self._alike[key]

    def _of_ranks(self, candidate: Candidate) -> tuple[_Rank, ...]:
        layout = candidate.parallelism.layout
        choice = candidate.schedule
        task = self.task
        microbatches = task.global_batch // (layout.dp * candidate.parallelism.micro_batch)
        microbatches = filling_microbatches(choice, layout.pp, microbatches)
        key = choice, layout.pp, microbatches
        if key not in self._ranks:
            depth = depth_of(choice, layout.pp)
            self.work.add("program", 3 * depth * microbatches)
            program = existing_program(choice, layout.pp)
            stages, head = task.stages(program.depth), task.shape.chain - 1
            full = peak_states(choice, layout.pp, microbatches)
            ranks = list[_Rank]()
            for rank in sampled_ranks(layout.pp):
                local = tuple(stages[stage % program.depth] for stage in program.stages_of(rank))
                ends = tuple(head in stage for stage in local)
                ranks.append(
                    _Rank(
                        stages=local,
                        counts=tuple(kind_counts(task.shape, stage) for stage in local),
                        finals=tuple(self._kind_of(stage.stop - 1) for stage in local),
                        ends=tuple(tuple(int(layer in stage) for layer in self.ends) for stage in local),
                        first=tuple(not is_block(task.shape, stage.start) for stage in local),
                        last=ends,
                        peaks=_highest_peaks(full[rank], ends) if full else (),
                    )
                )
            self._ranks[key] = tuple(ranks)
        return self._ranks[key]

    def _of_states(self, candidate: Candidate, ranks: tuple[_Rank, ...]) -> tuple[int, ...]:
        parallelism, saving = candidate.parallelism, candidate.saving
        key = (
            parallelism.layout,
            parallelism.expert_tp,
            candidate.schedule,
            candidate.dp,
            saving.offload,
            saving.parameters,
        )
        if key not in self._states:
            job = candidate.job(self.task)
            states = list[int]()
            for rank in ranks:
                # when the rank is fullest, some stage computes, with its weights gathered
                gathered = min(_gathered(job, stage) for stage in rank.stages)
                states.append(_states(job, rank.stages) + gathered)
            self._states[key] = tuple(states)
        return self._states[key]

    def _layer(self, parallelism: Parallelism, layer: int, mode: Mode) -> _Layer:
        """The bytes of a single layer."""
        layout = parallelism.layout
        sizes = (
            layout.tp,
            layout.cp,
            layout.ep,
            parallelism.expert_tp,
            parallelism.micro_batch,
            parallelism.sequence_parallel,
        )
        key = sizes, parallelism.context, layer, mode
        if key not in self._layers:
            self.work.add("layer memory")
            job = Candidate(parallelism, ScheduleChoice(PLAIN), DataParallelSettings(), Saving()).job(
                self.task
            )
            compute = replace(ComputeConfig.of(job), recompute=mode)
            layer_compute = compute.for_layer(layer_of(self.task.shape, layer))
            boundary = layer_compute.element * layer_compute.shard * self.task.shape.hidden
            work = layer_memory(self.task.shape, compute, layer)
            alone = stage_memory([work], boundary)
            self._layers[key] = _Layer(
                saved=work.saved - (work.input_bytes if work.ends and layer == 0 else 0),
                held_until_w=max(0, work.queued),
                backward=max(0, min(alone.backward, alone.split)),
            )
        return self._layers[key]


def _highest_peaks(full: Sequence[PeakState], ends: Sequence[bool]) -> tuple[PeakState, ...]:
    """The states that may be the fullest: with the most in flight or waiting, and at the head."""
    highest = (
        max(full, key=lambda peak: sum(peak.in_flight)),
        max(full, key=lambda peak: sum(peak.waiting)),
    )
    return tuple(dict.fromkeys((full[0], *highest, *(peak for peak in full if ends[peak.stage_index]))))


@lru_cache(maxsize=64)
def memory_budget(device: Device, reserve: float | None) -> float:
    """The most bytes of tensors that are more likely to fit a device than not."""
    if device.memory == inf:
        return inf
    low, high = 0, int(2 * device.memory)
    while high - low > 1:
        middle = (low + high) // 2
        if not MemoryBound(middle, 0).fit(device, reserve).likely:
            high = middle
        else:
            low = middle
    return low


def _elements(job: Job, stages: Sequence[range]) -> Elements:
    """Parameters of these stages; a tied one is counted once."""
    return _elements_of(job.shape, tuple(stages), Shares.of(ComputeConfig.of(job)), job.trained)


@lru_cache(maxsize=16384)
def _elements_of(
    shape: ModelShape, stages: tuple[range, ...], shares: Shares, trained: TrainedParameters
) -> Elements:
    if trained.freeze:  # blocks of one kind may differ in what is frozen
        layers = tuple(sorted({layer for stage in stages for layer in stage}))
        return stage_elements(shape, layers, shares, trained)
    ends = {layer for stage in stages for layer in non_blocks_among(shape, stage)}
    total = stage_elements(shape, tuple(sorted(ends)), shares, trained)
    for stage in stages:
        for first, count in zip(first_blocks(shape), kind_counts(shape, stage), strict=True):
            if count:
                each = stage_elements(shape, (first,), shares, trained)
                total = sum([each] * count, total)
    return total


def _states(job: Job, stages: Sequence[range]) -> int:
    """Bytes of the states of a rank's stages, without padding and without parameters that stay
    in more bits.
    """
    elements = _elements(job, stages)
    weight = ELEMENT_BYTES[job.precision.dtype]
    half, away = weight == 2, job.dp.offload != "none" and not job.unified_memory
    gradient = 2 if half and job.precision.gradients == "same" else max(4, weight)
    means = (
        2 * (job.optimiser.moment_bytes or max(4, weight)) if job.optimiser.name in ("adamw", "lamb") else 0
    )
    lasting = 0 if away else means + (4 if half else 0)
    total = 0.0
    experts = job.layout.size("expert_dp") if job.shape.moe else 1
    for count, frozen, copies in (
        (elements.dense, elements.frozen_dense, job.copies),
        (elements.expert, elements.frozen_expert, experts),
    ):
        sizes = job.dp.sizes(job.copies).for_copies(copies)
        weights = 0 if job.dp.offload_parameters != "none" else weight / sizes.parameters
        total += frozen * weights + count * (weights + gradient / sizes.gradients + lasting / sizes.states)
    return int(total)


def _gathered(job: Job, stage: range) -> int:
    """Bytes of a stage's weights if they are gathered stage by stage, else 0."""
    if job.dp.gathers(job.layout.pp) != "stage" or job.dp.sizes(job.copies).parameters == 1:
        return 0
    elements = _elements(job, (stage,))
    return ELEMENT_BYTES[job.precision.dtype] * (elements.dense + elements.frozen_dense)
