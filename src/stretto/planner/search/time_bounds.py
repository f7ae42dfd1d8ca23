"""Lower bounds on the time of a step, for candidates of which some choices are still open.

The bounds use the same functions of layers and of data-parallel ranks as `planner.time.step`, without the
order of microbatches. No rank begins before the forwards of all stages before its first one; from then on it
does all of its work; and after its last backward gradients pass back through those stages. Then comes the
optimiser. Between the steps of an asynchronous schedule no rank waits, so that only its work counts.
Waiting, messages between stages and late data can only add to that, and a replay never gets shorter when an
action gets longer, so that a bound for some choices holds for all candidates that have them. They are the
bounds of `program.replay.lower_bound` for stages of blocks of few kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import fsum
from typing import NamedTuple

from stretto.job.chain import block_kinds, is_block, kind_counts, layer_of, non_blocks_among
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.flops import Recompute as Mode
from stretto.job.flops import model_flops_per_step
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.counts.compute import ComputeConfig
from stretto.planner.estimate import precision_of
from stretto.planner.machines.cluster import Cluster
from stretto.planner.search.space import existing_program, first_blocks, small_program
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, SearchTask
from stretto.planner.search.work import SearchWork
from stretto.planner.time.constants import products
from stretto.planner.time.data_parallel import DataTime, data_time
from stretto.planner.time.layer import LayerTime, layer_time
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.program.schedules.registry import PLAIN
from stretto.program.schedules.traits import is_searched, updates_within

Counts = Sequence[tuple[int, int]]  # index of a layer or of a kind of block, and its number, if it is not 0


class LayerSeconds(NamedTuple):
    """Seconds of a layer for one microbatch.

    Attributes:
        forward: its forward.
        back: the least that gradients on their way back wait for, whether backwards are split or not.
        work: the least of all its actions together.
    """

    forward: float
    back: float
    work: float


@dataclass(frozen=True, kw_only=True)
class RankLayers:
    """The layers of a pipeline rank.

    Attributes:
        stages: indices of its stages in the model.
        blocks: number of blocks of each kind, for each stage.
        counts: number of each layer that is no block, and of blocks of each kind, in all of its stages.
        before: as `counts`, of those that forwards pass before the rank's first forward, and gradients
            after its last backward.
    """

    stages: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    counts: Counts
    before: Counts


@lru_cache(maxsize=4096)
def rank_layers(
    choice: ScheduleChoice, pp: int, stages: tuple[range, ...], shape: ModelShape
) -> tuple[RankLayers, ...]:
    """The layers of the first, the middle and the last rank, and of the one with the most blocks; without
    duplicates.
    """
    program = existing_program(choice, pp)
    counts = [kind_counts(shape, stage) for stage in stages]
    ends = non_blocks_among(shape, range(shape.chain))
    distinct = dict[RankLayers, None]()
    fullest = max(range(pp), key=lambda r: sum(sum(counts[s % program.depth]) for s in program.stages_of(r)))
    for rank in sorted({0, pp // 2, pp - 1, fullest}):
        rank_stages = [stage % program.depth for stage in program.stages_of(rank)]
        first, blocks = stages[min(rank_stages)].start, tuple(counts[s] for s in rank_stages)
        ends_of_rank = [sum(layer in stages[s] for s in rank_stages) for layer in ends]
        layers_of_rank = RankLayers(
            stages=tuple(rank_stages),
            blocks=blocks,
            counts=_counts((*ends_of_rank, *map(sum, zip(*blocks, strict=True)))),
            before=_counts((*(int(layer < first) for layer in ends), *kind_counts(shape, range(first)))),
        )
        distinct[layers_of_rank] = None
    return tuple(distinct)


@lru_cache(maxsize=4096)
def recomputed_blocks(
    stages: tuple[range, ...], shape: ModelShape, first_blocks: int | None
) -> tuple[tuple[int, ...], ...]:
    """Recomputed blocks of each kind in each stage: its first `first_blocks`, or all if None."""
    starts = [stage.start + (not is_block(shape, stage.start)) for stage in stages]
    ends = [
        stage.stop if first_blocks is None else start + first_blocks
        for start, stage in zip(starts, stages, strict=True)
    ]
    return tuple(
        kind_counts(shape, range(start, min(end, stage.stop)))
        for start, end, stage in zip(starts, ends, stages, strict=True)
    )


@lru_cache(maxsize=4096)
def _backwards(choice: ScheduleChoice, pp: int) -> str:
    """The kinds of backwards in a schedule: all `split`, `none` split, or `both` kinds."""
    if is_searched(choice.name):
        return "both"
    # some schedules split backwards with few microbatches, and not with many
    programs = small_program(choice, pp), small_program(choice, _SAMPLE_RANKS, _SAMPLE_MICROBATCHES)
    orders = [order for program in programs if program is not None for order in program.orders]
    kinds = {action.kind for order in orders for action in order}
    return "none" if ActionKind.W not in kinds else "both" if ActionKind.B in kinds else "split"


_SAMPLE_RANKS, _SAMPLE_MICROBATCHES = 2, 16  # ranks, and more microbatches than fill them


class _RankStages(NamedTuple):
    """Stages of a pipeline rank, with the data-parallel times of each."""

    rank: int
    stages: tuple[range, ...]
    data: tuple[DataTime, ...]


@dataclass(frozen=True)
class Layers:
    """Seconds of each kind of block, and of the layers that are no blocks: embedding, head, and what lies
    between two stacks.
    """

    blocks: tuple[LayerSeconds, ...]
    ends: tuple[LayerSeconds, ...]

    @cached_property
    def columns(self) -> tuple[tuple[float, ...], ...]:
        """The parts of `LayerSeconds` and the round trips, each of all layers, the blocks last."""
        layers = (*self.ends, *self.blocks)
        return tuple(zip(*((*layer, _round_trip(layer)) for layer in layers), strict=True))

    def work(self, counts: Sequence[int]) -> float:
        """The least work of these counts of blocks of each kind."""
        return fsum(n * block.work for n, block in zip(counts, self.blocks, strict=True))

    def forward(self, counts: Sequence[int]) -> float:
        """Their forwards."""
        return fsum(n * block.forward for n, block in zip(counts, self.blocks, strict=True))

    def round_trip(self, counts: Sequence[int]) -> float:
        """Their forwards and what gradients on their way back wait for."""
        return fsum(n * _round_trip(block) for n, block in zip(counts, self.blocks, strict=True))


class TimeBounds:
    """Bounds for the candidates of one task, in seconds of a step."""

    def __init__(self, task: SearchTask, work: SearchWork | None = None) -> None:
        self.task, self.work = task, work or SearchWork()
        self._kinds = first_blocks(task.shape)
        self._ends = tuple(non_blocks_among(task.shape, range(task.shape.chain)))
        self._all = tuple(count for _, count in block_kinds(task.shape))
        self._sized = {task.devices: task.cluster}
        self._layers = dict[object, Layers]()
        self._parts = dict[object, list[LayerTime]]()
        self._alone = dict[object, LayerTime]()
        self._blocks = dict[object, float]()  # work of all blocks
        self._ideal = dict[int, float]()  # by number of devices
        self._data = dict[object, tuple[_RankStages, ...]]()
        self._orders = dict[object, float]()
        self._ranks = dict[tuple[ScheduleChoice, int], tuple[RankLayers, ...]]()
        self._stages = dict[object, list[list[tuple[float, float, float]]]]()
        names = task.fixed.get("schedule", ())
        self._drains = not task.asynchronous and not any(map(updates_within, names))  # every schedule

    def cluster(self, world: int) -> Cluster:
        """The task's cluster with `world` devices: one object for each number, since caches compare clusters
        by identity.
        """
        if world not in self._sized:
            self._sized[world] = self.task.cluster.sized(world)
        return self._sized[world]

    def layers(self, parallelism: Parallelism, mode: Mode, backwards: str) -> Layers:
        """Seconds of embedding, blocks and head."""
        key = self._split(parallelism), mode, backwards
        if key not in self._layers:
            blocks = self._times(parallelism, mode, self._kinds)
            ends = self._times(parallelism, "none", self._ends)
            self._layers[key] = Layers(
                blocks=tuple(_seconds(time, backwards) for time in blocks),
                ends=tuple(_seconds(time, backwards) for time in ends),
            )
        return self._layers[key]

    def _split(self, parallelism: Parallelism, experts: bool = True) -> object:
        """What the times of layers depend on, with experts or without."""
        layout = parallelism.layout
        # groups over tp, cp and experts span the same nodes for any number of replicas and stages
        sizes = layout.tp, layout.cp, parallelism.micro_batch, self.cluster(layout.world).node
        of_experts = (layout.ep, parallelism.expert_tp) if experts else ()
        return sizes, of_experts, parallelism.sequence_parallel, parallelism.context

    def _times(self, parallelism: Parallelism, mode: Mode, layers: tuple[int, ...]) -> list[LayerTime]:
        key = self._split(parallelism), mode, layers
        if key not in self._parts:
            self.work.add("layers")
            self._parts[key] = [self._time(parallelism, mode, layer) for layer in layers]
        return self._parts[key]

    def _time(self, parallelism: Parallelism, mode: Mode, index: int) -> LayerTime:
        """The time of one layer; without experts it is the same however they are split."""
        layer = layer_of(self.task.shape, index)
        experts = layer.kind == "block" and layer.shape.moe is not None
        key = self._split(parallelism, experts), mode, index
        if key not in self._alone:
            plain = ScheduleChoice(PLAIN), DataParallelSettings(), Saving()
            compute = ComputeConfig.of(Candidate(parallelism, *plain).job(self.task)).for_layer(layer)
            time = layer_time(
                shape=layer.shape,
                kind=layer.kind,
                compute=compute if mode == "none" else replace(compute, recompute=mode),
                layout=parallelism.layout,
                cluster=self.cluster(parallelism.layout.world),
                precision=precision_of(self.task.job),
                software=self.task.assumptions.software,
            )
            if self.task.job.trained.freeze:  # which layers of a kind have a backward depends on their place
                time = time.partly_trained(reached=False, share=0.0)
            self._alone[key] = time
        return self._alone[key]

    def parallelism(self, parallelism: Parallelism) -> float:
        """A bound for every schedule: the work of all layers shared evenly over pipeline ranks, or, if all
        drain after each step, one microbatch on its way through all layers and back.
        """
        layout, layers = parallelism.layout, self.layers(parallelism, "none", "both")
        work = layers.work(self._all) + fsum(end.work for end in layers.ends)
        trip = 0.0
        if self._drains:
            trip = layers.round_trip(self._all) + fsum(map(_round_trip, layers.ends))
        return self._corrected(
            max(self.task.microbatches(parallelism) / layout.pp * work, trip), layout.world
        )

    def floor(self, parallelism: Parallelism, smallest: int) -> float:
        """A bound for every schedule and for microbatches of `smallest` samples or more, up to those of the
        parallelism, which each of them divides: the work of all blocks in the largest.

        A sample takes longest in the smallest microbatch, whose tiles are emptiest, and in which fewest share
        launches, latencies and reads of weights. Only products work the other way: with larger operands they
        slow down by a power of their size (`planner.time.operators`). The loss may, too, in chunks. Measured
        rates may do anything, so that with them the only bound is that of the device's peak.
        """
        layout, device = parallelism.layout, self.task.cluster.device
        if device.kernels or self.task.cluster.tables:
            return self.ideal(layout)
        micro, samples = parallelism.micro_batch, self.task.global_batch / layout.dp
        split = self._split(parallelism)
        if split not in self._blocks:
            times = self._times(parallelism, "none", self._kinds)
            work = fsum(n * _seconds(time, "both").work for n, time in zip(self._all, times, strict=True))
            self._blocks[split] = work
        work = self._blocks[split]
        slower = (micro / smallest) ** products(device).droop
        return self._corrected(samples / micro / layout.pp * work / slower, layout.world)

    def ideal(self, layout: Layout) -> float:
        """A bound for every layout with as many devices: model FLOPs at the device's peak."""
        if layout.world not in self._ideal:
            task, device = self.task, self.task.cluster.device
            flops = model_flops_per_step(
                task.shape, task.sequence, task.global_batch, causal=True, target=task.job.target_sequence
            )
            if task.job.trained.freeze:
                flops /= 3  # forwards
            seconds = flops / (layout.world * device.peak(precision_of(task.job)))
            self._ideal[layout.world] = self._corrected(seconds, layout.world)
        return self._ideal[layout.world]

    def schedule(self, parallelism: Parallelism, choice: ScheduleChoice, saving: Saving) -> float:
        """A bound with a schedule and recomputation."""
        key = parallelism, choice, saving.recompute
        if key not in self._orders:
            self._orders[key] = self.schedules([parallelism], choice, [saving], [0])[0]
        return self._orders[key]

    def schedules(
        self,
        parallelisms: Sequence[Parallelism],
        choice: ScheduleChoice,
        savings: Sequence[Saving],
        chosen: Sequence[int],
    ) -> list[float]:
        """Bounds with a schedule and recomputation, for parallelisms with equally many pipeline ranks.

        Args:
            chosen: for each parallelism, the index of its saving among `savings`.
        """
        self.work.add("bounds", len(parallelisms))
        pp, shape = parallelisms[0].layout.pp, self.task.shape
        program, backwards = existing_program(choice, pp), _backwards(choice, pp)
        stages, ends = self.task.stages(program.depth), len(self._ends)
        if (choice, pp) not in self._ranks:
            self._ranks[choice, pp] = rank_layers(choice, pp, stages, shape)
        ranks = self._ranks[choice, pp]
        again_on = dict[int, list[tuple[Counts, Counts]]]()  # of each rank, by saving
        for n in set(chosen):
            again = list[tuple[int, ...]]()
            if savings[n].recompute.mode not in ("none", "auto"):
                again = recomputed_blocks(stages, shape, savings[n].recompute.blocks)
            on_and_before = [(rank.stages, range(min(rank.stages))) for rank in ranks]
            again_on[n] = [(_sum(again, on), _sum(again, before)) for on, before in on_and_before]
        # each copy of the weights gets its part of the microbatches
        drains, copies = not updates_within(choice.name), program.copies
        action, of_all = (
            self.task.assumptions.software.action,
            _counts([*(1 for _ in self._ends), *self._all]),
        )
        bounds = list[float]()
        for parallelism, n in zip(parallelisms, chosen, strict=True):
            forward, back, work, trip = self.layers(parallelism, "none", backwards).columns
            mode, repeats = savings[n].recompute.mode, list[float]()  # seconds of each kind
            if mode not in ("none", "auto"):
                recomputed = self.layers(parallelism, mode, backwards).columns[2]
                repeats = [r - w for r, w in zip(recomputed[ends:], work[ends:], strict=True)]
            each, odd = divmod(self.task.microbatches(parallelism), copies)
            longest = _dot(trip, of_all) if drains else 0.0
            for rank, (on_rank, before) in zip(ranks, again_on[n], strict=True):
                starts, repeated = 2 * len(rank.blocks) * action, _dot(repeats, on_rank)
                busy = each * (_dot(work, rank.counts) + starts + repeated)
                if copies > 1:
                    busy += odd * min(_dot(work[ends:], _counts(blocks)) for blocks in rank.blocks)
                longest = max(longest, busy)
                if drains:
                    wait, tail = _dot(forward, rank.before), _dot(back, rank.before) + _dot(repeats, before)
                    on_the_way = each * (_dot(trip, rank.counts) + starts + repeated)
                    longest = max(longest, wait + busy, wait + on_the_way + tail)
            bounds.append(self._corrected(longest, parallelism.layout.world))
        return bounds

    def candidate(
        self, candidate: Candidate, job: Job, each: bool | None = None, program: Program | None = None
    ) -> float:
        """A bound with all choices made, which includes the data-parallel work during and after the
        computation, on the first, the middle and the last rank.

        Args:
            each: True if gradients are reduced with each microbatch, or None if that is not known.
            program: the job's program, if it exists already; it tells how often weights are gathered.
        """
        parallelism, choice = candidate.parallelism, candidate.schedule
        layout = parallelism.layout
        self.work.add("time bound")
        bound = self.schedule(parallelism, choice, candidate.saving)
        if updates_within(choice.name):
            return bound
        ranks = self._rank_stages(candidate, job)
        if each is None:
            each = job.dp.mode in ("zero2", "zero3") and all(len(rank.stages) == 1 for rank in ranks)
        overlap = self.task.assumptions.overlap
        longest = update = late = away = 0.0
        key = parallelism, choice, candidate.saving.recompute.mode
        if key not in self._stages:
            self._stages[key] = [[self._stage(candidate, stage) for stage in rank.stages] for rank in ranks]
        count, odd = divmod(self.task.microbatches(parallelism), existing_program(choice, layout.pp).copies)
        layers = self.layers(parallelism, "none", _backwards(choice, layout.pp))
        for rank, stages in zip(ranks, self._stages[key], strict=True):
            reduces = [time.reduce for time in rank.data]
            extra = exposed = 0.0
            for (forward, _, busy), time in zip(stages, rank.data, strict=True):
                gather = time.gather if job.dp.gathers(layout.pp) == "layer" else 0.0
                extra += max(0.0, gather - forward) + max(0.0, gather + each * time.reduce - busy)
            if not each and overlap:
                over = [max(0.0, r - busy) for r, (_, _, busy) in zip(reduces, stages, strict=True)]
                exposed = min(over)
            elif not each:
                exposed = fsum(reduces)
            work = fsum(work for _, work, _ in stages)
            gathering = 0.0
            if program is not None and job.dp.gathers(layout.pp) == "stage":
                times = dict(zip(program.stages_of(rank.rank), rank.data, strict=True))
                gathers = (a.stage for a in program.orders[rank.rank] if a.kind is ActionKind.UNSHARD)
                gathering = fsum(times[stage].gather for stage in gathers)
            work = count * (work + extra) + odd * min(work for _, work, _ in stages)
            before = min(stage.start for stage in rank.stages)
            wait = fsum(
                end.forward for layer, end in zip(self._ends, layers.ends, strict=True) if layer < before
            )
            wait += layers.forward(kind_counts(self.task.shape, range(before)))
            if job.dp.gathers(layout.pp) == "stage":  # no weights are gathered when a step begins
                wait = max(wait, min(time.gather for time in rank.data))
            longest = max(longest, wait + work + exposed, gathering)
            update = max(update, fsum(time.update for time in rank.data))
            away = max(away, fsum(time.away for time in rank.data))
            if job.dp.mode != "zero3":
                gathers = fsum(time.gather for time in rank.data)
                ahead = fsum(forward for forward, _, _ in stages) if overlap else 0.0
                late = max(late, gathers - ahead)
        last = self._corrected(update + late, layout.world)
        first = max(bound, self._corrected(longest, layout.world))
        return max(first + last, self._corrected(away + update, layout.world))

    def _stage(self, candidate: Candidate, stage: range) -> tuple[float, float, float]:
        """Seconds of a stage for one microbatch: the forward, the least of all its work, and the longest
        backward.
        """
        parallelism, saving = candidate.parallelism, candidate.saving
        shape = self.task.shape
        fastest = self.layers(parallelism, "none", _backwards(candidate.schedule, parallelism.layout.pp))
        slow = self.layers(parallelism, "full" if saving.recompute.mode != "none" else "none", "split")
        action = self.task.assumptions.software.action
        forward = work = action
        busy = 2 * action
        counts = (*(layer in stage for layer in self._ends), *kind_counts(shape, stage))
        all_least, all_slow = (*fastest.ends, *fastest.blocks), (*slow.ends, *slow.blocks)
        for count, quick, longest in zip(counts, all_least, all_slow, strict=True):
            forward += count * quick.forward
            work += count * quick.work
            busy += count * (longest.work - longest.forward)
        return forward, work, busy

    def _rank_stages(self, candidate: Candidate, job: Job) -> tuple[_RankStages, ...]:
        """The stages of the first, the middle and the last rank, with their data-parallel times."""
        layout = candidate.parallelism.layout
        key = layout, candidate.schedule, job.dp
        if key not in self._data:
            program, cluster = existing_program(candidate.schedule, layout.pp), self.cluster(layout.world)
            cut = self.task.stages(program.depth)
            ranks = list[_RankStages]()
            for rank in sorted({0, layout.pp // 2, layout.pp - 1}):
                stages = tuple(cut[stage % program.depth] for stage in program.stages_of(rank))
                times = [data_time(job, self.task.assumptions, cluster, stage) for stage in stages]
                ranks.append(_RankStages(rank, stages, tuple(times)))
            self._data[key] = tuple(ranks)
        return self._data[key]

    def _corrected(self, seconds: float, world: int) -> float:
        return seconds * self.cluster(world).correction


def _seconds(time: LayerTime, backwards: str) -> LayerSeconds:
    forward, weight = time.total("F"), time.total("W")
    back = time.total("R") + time.total("I")
    # an unsplit backward hides some communication behind products, but gradients wait for all of it
    unsplit = max(0.0, back + weight - fsum(time.saved.values()))
    if backwards == "none":
        return LayerSeconds(forward, unsplit, forward + unsplit)
    if backwards == "split":
        return LayerSeconds(forward, back, forward + back + weight)
    return LayerSeconds(forward, min(back, unsplit), forward + min(back + weight, unsplit))


def _counts(counts: Sequence[int]) -> Counts:
    return tuple((index, count) for index, count in enumerate(counts) if count)


def _sum(blocks: Sequence[Sequence[int]], stages: Sequence[int]) -> Counts:
    """Blocks of each kind in some of the stages; none if `blocks` is empty."""
    return _counts(
        [sum(of_kind) for of_kind in zip(*(blocks[stage] for stage in stages if blocks), strict=True)]
    )


def _dot(seconds: Sequence[float], counts: Counts) -> float:
    """Seconds of these counts of layers; by a loop, since `sum` rounds in another way from Python 3.12 on."""
    total = 0.0
    for index, count in counts:
        total += seconds[index] * count
    return total


def _round_trip(layer: LayerSeconds) -> float:
    return layer.forward + layer.back
