"""Lower bounds on memory, from what a rank holds at a peak state of its schedule.

Counted are sharded states, inputs and kept activations of microbatches in flight, and the temporaries of the
backward that is about to begin. Buffers that only the lowered program reveals are left out, so that a bound
is below the exact memory, but by little: candidates that do not fit are seldom replayed.

A peak state is taken from a real program, so that whatever a rank holds then bounds its peak from below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from operator import add, mul, sub
from typing import NamedTuple

from stretto.errors import StrettoError
from stretto.job.chain import is_block, kind_counts, layer_of, non_blocks_among
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.finetune import TrainedParameters
from stretto.job.flops import Recompute as Mode
from stretto.job.job import Job, RecomputeMode
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


_Recomputed = tuple[RecomputeMode, int | None]  # mode and first blocks of a stage: what activations depend on


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
    F, B = ActionKind.F, ActionKind.B
    I, W = ActionKind.I, ActionKind.W
    split = {stage for stage, kind, _ in order if kind is W}
    flights, waiting = [0] * len(index), [0] * len(index)
    best = dict[tuple[int, float], tuple[float, PeakState]]()
    for stage, kind, _ in order:
        stage_index = index[stage]
        if kind is F:
            flights[stage_index] += 1
        elif kind is B or kind is I:
            total, total_waiting = sum(flights), sum(waiting)
            for weight in _WAITING_WEIGHTS:
                score = total + weight * total_waiting
                previous = best.get((stage_index, weight))
                if previous is None or score > previous[0]:
                    best[stage_index, weight] = score, PeakState(tuple(flights), tuple(waiting), stage_index)
            flights[stage_index] -= 1
            waiting[stage_index] += kind is I and stage in split
        elif kind is W:
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


class _Stage(NamedTuple):
    """The layers of a stage, as far as memory depends on them.

    Attributes:
        counts: number of blocks of each kind.
        final: kind of its last block, with which its backward begins.
        ends: how many of `MemoryBounds.ends` it has: embedding, head, and the layer between two stacks.
        start: its first block if its blocks are of several kinds, else None.
        head: True if it ends with the head.
    """

    counts: tuple[int, ...]
    final: int
    ends: tuple[int, ...]
    start: int | None
    head: bool


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A pipeline rank.

    Attributes:
        distinct: its different stages; those with the same numbers of blocks are one.
        peaks: its peak states: microbatches in flight and waiting for each of these, and which of them begins
            a backward.
    """

    distinct: tuple[_Stage, ...]
    peaks: tuple[PeakState, ...]


class _LayerBytes(NamedTuple):
    """Bytes of each of some layers for one microbatch: kept with its input, kept between I and W, and the
    peak of its backward beyond what it keeps.
    """

    saved: tuple[int, ...]
    held_until_w: tuple[int, ...]
    backward: tuple[int, ...]


# for each recomputation the mode of blocks that are not among the first, recomputed ones, how many of each
# kind these are, and the mode of the last block
_Again = list[tuple[Mode, tuple[int, ...], Mode]]


class _StageBytes(NamedTuple):
    """Bytes of a stage for one microbatch: in flight and of a backward with each recomputation, and kept
    between I and W.
    """

    in_flight: list[int]
    backward: list[int]
    waiting: int


class MemoryBounds:
    """Lower bounds on the memory of the fullest of some ranks (`sampled_ranks`)."""

    def __init__(self, task: SearchTask, work: SearchWork | None = None) -> None:
        self.task, self.work = task, work or SearchWork()
        # the first layer of each kind of block
        self._kinds = first_blocks(task.shape)
        self.ends = tuple(non_blocks_among(task.shape, range(task.shape.chain)))  # that are no blocks
        self._ranks = dict[object, tuple[_Rank, ...]]()
        self._states = dict[object, tuple[int, ...]]()
        self._layers = dict[object, _LayerBytes]()
        # schedules that place layers alike share these
        self._sizes = dict[object, dict[_Stage, _StageBytes]]()
        self._places = dict[object, int]()
        self._bounds = dict[Candidate, MemoryBound]()
        self._activations = dict[object, dict[_Recomputed, tuple[int, ...]]]()  # of sampled ranks
        # the stages of the sampled ranks; one object for all schedules that place layers alike
        self._placed = dict[object, tuple[tuple[range, ...], ...]]()
        self._placements = dict[tuple[tuple[range, ...], ...], tuple[tuple[range, ...], ...]]()

    def states(self, layout: Layout, expert_tp: int | None, dp: DataParallelSettings, saving: Saving) -> int:
        """A bound for every schedule: states shared evenly over pipeline ranks."""
        sizes = layout.tp, layout.cp, layout.ep, layout.dp, layout.pp, expert_tp
        key = sizes, dp, saving.offload, saving.parameters
        if key not in self._places:
            job, shares = self._job(layout, dp, saving)
            self._places[key] = _states(job, shares, (range(self.task.shape.chain),)) // layout.pp
        return self._places[key]

    def _job(self, layout: Layout, dp: DataParallelSettings, saving: Saving) -> tuple[Job, Shares]:
        """The job as far as its states depend on it."""
        dp = replace(dp, offload=saving.offload, offload_parameters=saving.parameters)
        job = replace(self.task.job, layout=layout, dp=dp)
        return job, Shares.of(ComputeConfig.of(job))

    def of(self, candidate: Candidate) -> MemoryBound:
        """Return the bound of a candidate."""
        if candidate not in self._bounds:
            self.work.add("memory bound")
            parallelism, choice = candidate.parallelism, candidate.schedule
            states = self._of_states(parallelism, choice, candidate.dp, candidate.saving)
            activations = self._of_activations([parallelism], choice, [candidate.saving])[0][0]
            each = map(MemoryBound, states, activations)
            self._bounds[candidate] = max(each, key=lambda bound: bound.total)
        return self._bounds[candidate]

    def of_rows(
        self,
        parallelisms: Sequence[Parallelism],
        choice: ScheduleChoice,
        dp: Sequence[DataParallelSettings],
        savings: Sequence[Saving],
    ) -> list[list[int]]:
        """Bounds of parallelisms whose ranks a schedule fills equally (`filling_microbatches`), each with
        every one of a row of savings.

        Args:
            dp: the sharing of states of each parallelism.
            savings: they differ in recomputation only.
        """
        states = [
            self._of_states(parallelism, choice, sharing, savings[0])
            for parallelism, sharing in zip(parallelisms, dp, strict=True)
        ]
        activations = self._of_activations(parallelisms, choice, savings)
        return [
            [max(map(add, of_states, of_saving)) for of_saving in of_savings]
            for of_states, of_savings in zip(states, activations, strict=True)
        ]

    def _of_activations(
        self, parallelisms: Sequence[Parallelism], choice: ScheduleChoice, savings: Sequence[Saving]
    ) -> list[list[tuple[int, ...]]]:
        """Bytes of activations of each parallelism with each saving, on the sampled ranks."""
        recomputed: list[_Recomputed] = [(s.recompute.mode, s.recompute.blocks) for s in savings]
        entries = [self._activations.setdefault((parallelism, choice), {}) for parallelism in parallelisms]
        different = {*recomputed}
        missing = [index for index, entry in enumerate(entries) if not different <= entry.keys()]
        if missing:
            self.work.add("bounds", len(missing))
            rows = self._activation_bytes([parallelisms[n] for n in missing], choice, recomputed)
            for index, row in zip(missing, rows, strict=True):
                entries[index].update(zip(recomputed, row, strict=True))
        return [[entry[r] for r in recomputed] for entry in entries]

    def _activation_bytes(
        self, parallelisms: Sequence[Parallelism], choice: ScheduleChoice, recomputed: Sequence[_Recomputed]
    ) -> list[list[tuple[int, ...]]]:
        """Bytes of activations of each parallelism with each recomputation, on the sampled ranks."""
        ranks = self._of_ranks(parallelisms[0], choice)
        # blocks that are not among the first recomputed ones of a stage
        modes, repeated = list[Mode](), list[int]()
        for mode, blocks in recomputed:
            every = mode in ("full", "auto") and blocks is None
            modes.append("full" if every else "none" if mode in ("full", "auto") else mode)
            repeated.append(0 if every else blocks or 0)
        stages = dict[_Stage, _Again]()
        for stage in dict.fromkeys(stage for rank in ranks for stage in rank.distinct):
            again = zip(modes, [self._first(stage, n) for n in repeated], strict=True)
            stages[stage] = [(mode, n, "full" if n == stage.counts else mode) for mode, n in again]
        different: set[Mode] = {"full", *modes}
        result = list[list[tuple[int, ...]]]()
        for parallelism in parallelisms:
            sizes = self._sizes.setdefault((self._split(parallelism), *recomputed), {})
            if missing := [stage for stage in stages if stage not in sizes]:
                layers = {mode: self._of_layers(parallelism, self._kinds, mode) for mode in sorted(different)}
                ends = self._of_layers(parallelism, self.ends, "none")
                sizes |= {stage: _stage_bytes(stage, stages[stage], layers, ends) for stage in missing}
            of_ranks = [_fullest(rank.peaks, [sizes[stage] for stage in rank.distinct]) for rank in ranks]
            result.append(list(zip(*of_ranks, strict=True)))
        return result

    def _first(self, stage: _Stage, n: int) -> tuple[int, ...]:
        """The first blocks of a stage, at most all, of each kind."""
        if stage.start is None:
            return tuple(min(n, count) for count in stage.counts)
        return kind_counts(self.task.shape, range(stage.start, stage.start + min(n, sum(stage.counts))))

    def _kind_of(self, layer: int) -> int:
        """Index of a layer's kind of block; the first for the embedding, which may be all of a stage."""
        shape = self.task.shape
        block = layer if is_block(shape, layer) else layer - 1 if layer > 1 else 1
        return kind_counts(shape, range(block, block + 1)).index(1)

    def _of_ranks(self, parallelism: Parallelism, choice: ScheduleChoice) -> tuple[_Rank, ...]:
        pp = parallelism.layout.pp
        microbatches = filling_microbatches(choice, pp, self.task.microbatches(parallelism))
        key = choice, pp, microbatches
        if key not in self._ranks:
            self.work.add("program", 3 * depth_of(choice, pp) * microbatches)
            full, ranks = peak_states(choice, pp, microbatches), list[_Rank]()
            for rank, placed in zip(sampled_ranks(pp), self._stages(choice, pp), strict=True):
                stages = [self._stage(stage) for stage in placed]
                distinct = tuple(dict.fromkeys(stages))
                index = [distinct.index(stage) for stage in stages]
                peaks = _highest_peaks(full[rank], [stage.head for stage in stages]) if full else ()
                ranks.append(_Rank(distinct=distinct, peaks=_of_distinct(peaks, index)))
            self._ranks[key] = tuple(ranks)
        return self._ranks[key]

    def _stages(self, choice: ScheduleChoice, pp: int) -> tuple[tuple[range, ...], ...]:
        """The layers of each stage of the sampled ranks."""
        if (choice, pp) not in self._placed:
            program = existing_program(choice, pp)
            stages = self.task.stages(program.depth)
            placed = tuple(
                tuple(stages[stage % program.depth] for stage in program.stages_of(rank))
                for rank in sampled_ranks(pp)
            )
            self._placed[choice, pp] = self._placements.setdefault(placed, placed)
        return self._placed[choice, pp]

    def _stage(self, stage: range) -> _Stage:
        shape = self.task.shape
        counts, start = kind_counts(shape, stage), stage.start + (not is_block(shape, stage.start))
        # which kinds the first blocks are matters only if there are several kinds in the stage
        return _Stage(
            counts=counts,
            final=self._kind_of(stage.stop - 1),
            ends=tuple(int(layer in stage) for layer in self.ends),
            start=start if sum(map(bool, counts)) > 1 else None,
            head=shape.chain - 1 in stage,
        )

    def _of_states(
        self, parallelism: Parallelism, choice: ScheduleChoice, dp: DataParallelSettings, saving: Saving
    ) -> tuple[int, ...]:
        """Bytes of the states of each sampled rank."""
        layout = parallelism.layout
        placed = self._stages(choice, layout.pp)
        key = (layout, parallelism.expert_tp, id(placed), dp, saving.offload, saving.parameters)
        if key not in self._states:
            job, shares = self._job(layout, dp, saving)
            # when the rank is fullest, some stage computes, with its weights gathered
            self._states[key] = tuple(
                _states(job, shares, stages) + min(_gathered(job, shares, stage) for stage in stages)
                for stages in placed
            )
        return self._states[key]

    def _split(self, parallelism: Parallelism) -> object:
        """What the bytes of layers depend on."""
        layout = parallelism.layout
        sizes = layout.tp, layout.cp, layout.ep, parallelism.expert_tp, parallelism.micro_batch
        return sizes, parallelism.sequence_parallel, parallelism.context

    def _of_layers(self, parallelism: Parallelism, layers: tuple[int, ...], mode: Mode) -> _LayerBytes:
        """The bytes of single layers."""
        key = self._split(parallelism), layers, mode
        if key not in self._layers:
            plain = ScheduleChoice(PLAIN), DataParallelSettings(), Saving()
            compute = ComputeConfig.of(Candidate(parallelism, *plain).job(self.task))
            each = [self._layer(replace(compute, recompute=mode), layer) for layer in layers]
            self._layers[key] = _LayerBytes(*zip(*each, strict=True))
        return self._layers[key]

    def _layer(self, compute: ComputeConfig, layer: int) -> tuple[int, int, int]:
        self.work.add("layer memory")
        layer_compute = compute.for_layer(layer_of(self.task.shape, layer))
        boundary = layer_compute.element * layer_compute.shard * self.task.shape.hidden
        # which layers are reached depends on where they are, and these stand for all of their kind
        reached = not self.task.job.trained.freeze
        work = layer_memory(self.task.shape, compute, layer, reached=reached)
        alone = stage_memory([work], boundary)
        saved = work.saved - (work.input_bytes if work.ends and layer == 0 else 0)
        return saved, max(0, work.queued), max(0, min(alone.backward, alone.split))


def _stage_bytes(
    stage: _Stage, again: _Again, layers: Mapping[str, _LayerBytes], ends: _LayerBytes
) -> _StageBytes:
    """Bytes of a stage with each recomputation, with a layer of each kind by mode."""
    full, of_ends = layers["full"], sum(map(mul, ends.saved, stage.ends))
    # bytes if no first blocks are recomputed, and how many more each of them has, by its kind
    plain, more = dict[str, int](), dict[str, list[int]]()
    for mode, of_mode in layers.items():
        plain[mode] = of_ends + sum(map(mul, of_mode.saved, stage.counts))
        more[mode] = list(map(sub, full.saved, of_mode.saved))
    in_flight = [plain[mode] + sum(map(mul, more[mode], counts)) for mode, counts, _ in again]
    waiting = sum(map(mul, full.held_until_w, stage.counts))
    if stage.head:
        backward, waiting = [ends.backward[-1]] * len(again), waiting + ends.held_until_w[-1]
    else:
        backward = [layers[last].backward[stage.final] for _, _, last in again]
    return _StageBytes(in_flight, backward, max(0, waiting - min(full.saved)))


def _fullest(peaks: Sequence[PeakState], stages: Sequence[_StageBytes]) -> list[int]:
    """Bytes of the fullest peak state of a rank with each recomputation."""
    fullest = [0] * len(stages[0].in_flight)
    for peak in peaks:
        waiting = sum(count * stage.waiting for count, stage in zip(peak.waiting, stages, strict=True))
        sizes = [waiting + backward for backward in stages[peak.stage_index].backward]
        for count, stage in zip(peak.in_flight, stages, strict=True):
            sizes = [size + count * each for size, each in zip(sizes, stage.in_flight, strict=True)]
        fullest = list(map(max, fullest, sizes))
    return fullest


def _highest_peaks(full: Sequence[PeakState], ends: Sequence[bool]) -> tuple[PeakState, ...]:
    """The states that may be the fullest: with the most in flight or waiting, and at the head."""
    highest = (
        max(full, key=lambda peak: sum(peak.in_flight)),
        max(full, key=lambda peak: sum(peak.waiting)),
    )
    return tuple(dict.fromkeys((full[0], *highest, *(peak for peak in full if ends[peak.stage_index]))))


def _of_distinct(peaks: Sequence[PeakState], index: Sequence[int]) -> tuple[PeakState, ...]:
    """The peaks with the microbatches of each distinct stage, by its index for each stage; without
    duplicates.
    """
    result = dict[PeakState, None]()
    for peak in peaks:
        in_flight, waiting = [0] * (max(index) + 1), [0] * (max(index) + 1)
        for distinct, flights, waits in zip(index, peak.in_flight, peak.waiting, strict=True):
            in_flight[distinct] += flights
            waiting[distinct] += waits
        result[PeakState(tuple(in_flight), tuple(waiting), index[peak.stage_index])] = None
    return tuple(result)


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


def _states(job: Job, shares: Shares, stages: tuple[range, ...]) -> int:
    """Bytes of the states of a rank's stages, without padding and without parameters that stay
    in more bits.
    """
    elements = _elements_of(job.shape, stages, shares, job.trained)
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


def _gathered(job: Job, shares: Shares, stage: range) -> int:
    """Bytes of a stage's weights if they are gathered stage by stage, else 0."""
    if job.dp.gathers(job.layout.pp) != "stage" or job.dp.sizes(job.copies).parameters == 1:
        return 0
    elements = _elements_of(job.shape, (stage,), shares, job.trained)
    return ELEMENT_BYTES[job.precision.dtype] * (elements.dense + elements.frozen_dense)
