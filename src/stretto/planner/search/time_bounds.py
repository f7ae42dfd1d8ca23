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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
from stretto.planner.time.data_parallel import DataTime, data_time
from stretto.planner.time.layer import LayerTime, layer_time
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.program.schedules.registry import PLAIN
from stretto.program.schedules.traits import is_searched, updates_within

Seconds = npt.NDArray[np.float64]


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
        ends: for each layer that is no block, how many of its stages have it.
        stages: indices of its stages in the model.
        blocks: number of blocks of each kind, for each stage.
        before: blocks of each kind that forwards pass before the rank's first forward, and gradients
            after its last backward.
        inside: for each layer that is no block, 1 if forwards pass it before, else 0.
    """

    ends: tuple[int, ...]
    stages: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]
    inside: tuple[int, ...]


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
        start = min(rank_stages)
        layers_of_rank = RankLayers(
            ends=tuple(sum(layer in stages[s] for s in rank_stages) for layer in ends),
            stages=tuple(rank_stages),
            blocks=tuple(counts[s] for s in rank_stages),
            before=kind_counts(shape, range(stages[start].start)),
            inside=tuple(int(layer < stages[start].start) for layer in ends),
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


_TYPICAL_TOKENS = 8192  # tokens of a microbatch that most layouts take


@dataclass(frozen=True)
class Layers:
    """Seconds of each kind of block, and of the layers that are no blocks: embedding, head, and what lies
    between two stacks.
    """

    blocks: tuple[LayerSeconds, ...]
    ends: tuple[LayerSeconds, ...]

    @cached_property
    def table(self) -> Seconds:
        """An array of the parts of `LayerSeconds` and of layers, the blocks last."""
        return np.array([*self.ends, *self.blocks]).T

    def work(self, counts: Sequence[int]) -> float:
        """The least work of these counts of blocks of each kind."""
        return sum(n * block.work for n, block in zip(counts, self.blocks, strict=True))

    def forward(self, counts: Sequence[int]) -> float:
        """Their forwards."""
        return sum(n * block.forward for n, block in zip(counts, self.blocks, strict=True))

    def round_trip(self, counts: Sequence[int]) -> float:
        """Their forwards and what gradients on their way back wait for."""
        return sum(n * _round_trip(block) for n, block in zip(counts, self.blocks, strict=True))


class TimeBounds:
    """Bounds for the candidates of one task, in seconds of a step."""

    def __init__(self, task: SearchTask, work: SearchWork | None = None) -> None:
        self.task, self.work = task, work or SearchWork()
        self._kinds = first_blocks(task.shape)
        self._ends = tuple(non_blocks_among(task.shape, range(task.shape.chain)))
        self._all = tuple(count for _, count in block_kinds(task.shape))
        self._sized = dict[int, Cluster]()
        self._layers = dict[object, Layers]()
        self._parts = dict[object, list[LayerTime]]()
        self._data = dict[object, tuple[_RankStages, ...]]()
        self._orders = dict[object, float]()
        self._stages = dict[object, list[list[tuple[float, float, float]]]]()
        names = task.fixed.get("schedule", ())
        self._drains = not task.asynchronous and not any(map(updates_within, names))  # every schedule

    def cluster(self, world: int) -> Cluster:
        """The task's cluster with `world` devices: one object for each number, since caches compare clusters
        by identity.
        """
        if world == self.task.devices:
            return self.task.cluster
        if world not in self._sized:
            self._sized[world] = self.task.cluster.sized(world)
        return self._sized[world]

    def layers(self, parallelism: Parallelism, mode: Mode, backwards: str) -> Layers:
        """Seconds of embedding, blocks and head."""
        layout = parallelism.layout
        # groups over tp, cp and experts span the same nodes for any number of replicas and stages
        sizes = layout.tp, layout.cp, layout.ep, parallelism.expert_tp, parallelism.micro_batch
        node = self.cluster(layout.world).node
        split = (sizes, parallelism.sequence_parallel, parallelism.context, node)
        key = split, mode, backwards
        if key not in self._layers:
            parts: tuple[tuple[Mode, tuple[int, ...]], ...] = ("none", self._ends), (mode, self._kinds)
            for layer_mode, layers in parts:
                if (split, layer_mode, layers) not in self._parts:
                    self.work.add("layers")
                    times = self._times(parallelism, layer_mode, layers)
                    self._parts[split, layer_mode, layers] = times
            self._layers[key] = Layers(
                blocks=tuple(_seconds(time, backwards) for time in self._parts[split, mode, self._kinds]),
                ends=tuple(_seconds(time, backwards) for time in self._parts[split, "none", self._ends]),
            )
        return self._layers[key]

    def _times(self, parallelism: Parallelism, mode: Mode, layers: Sequence[int]) -> list[LayerTime]:
        plain = Candidate(parallelism, ScheduleChoice(PLAIN), DataParallelSettings(), Saving()).job(self.task)
        compute, cluster = ComputeConfig.of(plain), self.cluster(parallelism.layout.world)
        times = list[LayerTime]()
        for layer in layers:
            chain_layer = layer_of(self.task.shape, layer)
            times.append(
                layer_time(
                    shape=chain_layer.shape,
                    kind=chain_layer.kind,
                    compute=replace(compute.for_layer(chain_layer), recompute=mode),
                    layout=parallelism.layout,
                    cluster=cluster,
                    precision=precision_of(plain),
                    software=self.task.assumptions.software,
                )
            )
        return times

    def parallelism(self, parallelism: Parallelism) -> float:
        """A bound for every schedule: the work of all layers shared evenly over pipeline ranks, or, if all
        drain after each step, one microbatch on its way through all layers and back.
        """
        layout, layers = parallelism.layout, self.layers(parallelism, "none", "both")
        work = layers.work(self._all) + sum(end.work for end in layers.ends)
        trip = 0.0
        if self._drains:
            trip = layers.round_trip(self._all) + sum(map(_round_trip, layers.ends))
        return self._corrected(max(self._microbatches(parallelism) / layout.pp * work, trip), layout.world)

    def typical(self, layout: Layout, expert_tp: int | None) -> float:
        """The bound of a layout with a typical microbatch: an estimate by which layouts are sorted, not
        a bound for every microbatch.
        """
        each = self.task.global_batch // layout.dp or 1
        tokens = self.task.sequence // layout.cp
        micro = max(n for n in (1, 2, 4, 8) if n == 1 or (each % n == 0 and n * tokens <= _TYPICAL_TOKENS))
        typical = Parallelism(
            layout=layout,
            expert_tp=expert_tp,
            micro_batch=micro,
            sequence_parallel=layout.tp > 1,
            context="ring",
        )
        return self.parallelism(typical)

    def ideal(self, layout: Layout) -> float:
        """A bound for every layout with as many devices: model FLOPs at the device's peak."""
        task, device = self.task, self.task.cluster.device
        flops = model_flops_per_step(
            task.shape, task.sequence, task.global_batch, causal=True, target=task.job.target_sequence
        )
        return self._corrected(flops / (layout.world * device.peak(precision_of(task.job))), layout.world)

    def schedule(self, parallelism: Parallelism, choice: ScheduleChoice, saving: Saving) -> float:
        """A bound with a schedule and recomputation."""
        key = parallelism, choice, saving.recompute
        if key not in self._orders:
            self._orders[key] = float(self.schedules([parallelism], choice, [saving], np.zeros(1, int))[0])
        return self._orders[key]

    def schedules(
        self,
        parallelisms: Sequence[Parallelism],
        choice: ScheduleChoice,
        savings: Sequence[Saving],
        chosen: npt.NDArray[np.int_],
    ) -> Seconds:
        """Bounds with a schedule and recomputation, for parallelisms with equally many pipeline ranks.

        Args:
            chosen: for each parallelism, the index of its saving among `savings`.
        """
        self.work.add("bounds", len(parallelisms))
        pp, shape = parallelisms[0].layout.pp, self.task.shape
        program = existing_program(choice, pp)
        stages, backwards = self.task.stages(program.depth), _backwards(choice, pp)
        forward, back, work = self._table(parallelisms, "none", backwards)
        trip, ends = forward + back, len(self._ends)
        used, index = np.unique(chosen, return_inverse=True)
        repeats = np.array([recomputed_blocks(stages, shape, savings[n].recompute.blocks) for n in used])
        again = np.zeros((len(parallelisms), len(self._kinds)))  # of each kind of block
        modes = [savings[n].recompute.mode for n in chosen]
        for mode in dict.fromkeys(modes):
            if mode in ("none", "auto"):
                continue
            rows = [row for row, of_row in enumerate(modes) if of_row == mode]
            recomputed = self._table([parallelisms[row] for row in rows], mode, backwards)
            again[rows] = (recomputed[2] - work[rows])[:, ends:]
        action = self.task.assumptions.software.action
        # each copy of the weights gets its part of the microbatches
        each, odd = np.divmod([self._microbatches(p) for p in parallelisms], program.copies)
        drains = not updates_within(choice.name)
        worst = drains * _dot(trip, (*(1 for _ in self._ends), *self._all))
        for rank in rank_layers(choice, pp, stages, shape):
            blocks = tuple(map(sum, zip(*rank.blocks, strict=True)))
            repeated = (repeats[:, rank.stages].sum(1)[index] * again).sum(1)
            starts = 2 * len(rank.blocks) * action
            busy = each * (_dot(work, (*rank.ends, *blocks)) + starts + repeated)
            if program.copies > 1:
                busy += odd * np.min([_dot(work[:, ends:], counts) for counts in rank.blocks], axis=0)
            before = (*rank.inside, *rank.before)
            wait = _dot(forward, before)
            tail = _dot(back, before) + (repeats[:, : min(rank.stages)].sum(1)[index] * again).sum(1)
            on_the_way = each * (_dot(trip, (*rank.ends, *blocks)) + starts + repeated)
            for seconds in (busy, drains * (wait + busy), drains * (wait + on_the_way + tail)):
                worst = np.maximum(worst, seconds)
        return worst * [self.cluster(p.layout.world).correction for p in parallelisms]

    def _table(self, parallelisms: Sequence[Parallelism], mode: Mode, backwards: str) -> Seconds:
        """The parts of `LayerSeconds` of all layers that are no blocks and of each kind of block: an array of
        parts, parallelisms and layers.
        """
        return np.stack([self.layers(p, mode, backwards).table for p in parallelisms], axis=1)

    def candidate(
        self, candidate: Candidate, job: Job, each: bool | None = None, program: Program | None = None
    ) -> float:
        """A bound with all choices made, which includes the data-parallel work during and after the
        computation, on the first, the middle and the last rank.

        Args:
            each: True if gradients are reduced with each microbatch, or None if that is not known.
            program: the job's program, if it exists already; it tells how often weights are gathered.
        """
        parallelism = candidate.parallelism
        layout = candidate.parallelism.layout
        choice = candidate.schedule
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
        count, odd = divmod(self._microbatches(parallelism), existing_program(choice, layout.pp).copies)
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
                exposed = sum(reduces)
            work = sum(work for _, work, _ in stages)
            gathering = 0.0
            if program is not None and job.dp.gathers(layout.pp) == "stage":
                times = dict(zip(program.stages_of(rank.rank), rank.data, strict=True))
                gathers = (a.stage for a in program.orders[rank.rank] if a.kind is ActionKind.UNSHARD)
                gathering = sum(times[stage].gather for stage in gathers)
            work = count * (work + extra) + odd * min(work for _, work, _ in stages)
            before = min(stage.start for stage in rank.stages)
            wait = sum(
                end.forward for layer, end in zip(self._ends, layers.ends, strict=True) if layer < before
            )
            wait += layers.forward(kind_counts(self.task.shape, range(before)))
            if job.dp.gathers(layout.pp) == "stage":  # no weights are gathered when a step begins
                wait = max(wait, min(time.gather for time in rank.data))
            longest = max(longest, wait + work + exposed, gathering)
            update = max(update, sum(time.update for time in rank.data))
            away = max(away, sum(time.away for time in rank.data))
            if job.dp.mode != "zero3":
                gathers = sum(time.gather for time in rank.data)
                ahead = sum(forward for forward, _, _ in stages) if overlap else 0.0
                late = max(late, gathers - ahead)
        last = self._corrected(update + late, layout.world)
        first = max(bound, self._corrected(longest, layout.world))
        return max(first + last, self._corrected(away + update, layout.world))

    def _stage(self, candidate: Candidate, stage: range) -> tuple[float, float, float]:
        """Seconds of a stage for one microbatch: the forward, the least of all its work, and the longest
        backward.
        """
        parallelism = candidate.parallelism
        saving = candidate.saving
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

    def _microbatches(self, parallelism: Parallelism) -> int:
        return self.task.global_batch // (parallelism.layout.dp * parallelism.micro_batch)

    def _corrected(self, seconds: float, world: int) -> float:
        return seconds * self.cluster(world).correction


def _seconds(time: LayerTime, backwards: str) -> LayerSeconds:
    forward, weight = time.total("F"), time.total("W")
    back = time.total("R") + time.total("I")
    # an unsplit backward hides some communication behind products, but gradients wait for all of it
    unsplit = max(0.0, back + weight - sum(time.saved.values()))
    if backwards == "none":
        return LayerSeconds(forward, unsplit, forward + unsplit)
    if backwards == "split":
        return LayerSeconds(forward, back, forward + back + weight)
    return LayerSeconds(forward, min(back, unsplit), forward + min(back + weight, unsplit))


def _dot(seconds: Seconds, counts: Sequence[int]) -> Seconds:
    """Seconds of these counts of layers, for each parallelism."""
    return (seconds * counts).sum(1)


def _round_trip(layer: LayerSeconds) -> float:
    return layer.forward + layer.back
