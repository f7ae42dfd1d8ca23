"""The task of a layout search, and the choices that make up a candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stretto.errors import Problem
from stretto.job.attention import ContextKind
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import VOCAB_MULTIPLE, Job, Recompute
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.assumptions import Assumptions
from stretto.planner.machines.cluster import Cluster
from stretto.program import PLAIN, entry
from stretto.program.schedules.traits import updates_within

Objective = Literal["time", "tokens_per_dollar"]
RANKED = 10  # layouts that every search looks for


@dataclass(frozen=True, kw_only=True)
class SearchTask:
    """A model to be trained on a cluster.

    Attributes:
        job: everything that is not searched: shape, batch, sequence, precision, optimiser, kernels.
        cluster: the cluster, with the number of devices to use.
        fixed: choices that the user or a framework has made, by their names in `planner.search.fixed`.
        fixed_by: the framework's name for each of these that it has made.
        narrowed: values to which one pass of a search is restricted, by the same names; all values are
            considered for choices that are not listed.
        refusals: returns what the framework that the plan is for lacks for a job, or None.
        smaller: also consider fewer devices: every divisor of their number.
        asynchronous: also consider schedules that update within the step, which changes the result.
        searched: also consider the schedule `auto`.
        top: number of layouts to return. The search itself looks for at least `RANKED`, so that the order of
            the first ones does not depend on it.
        memory_headroom: bytes that the fastest safe layout must leave free beyond the interval of its memory.
        allow_offload: consider states off the device, and parameters and gradients sharded within a
            pipeline, in any case, and not only if nothing fits otherwise.
        tolerance: the best layout is found up to this fraction of its time; 0: exactly.
        seconds: limit of the work (`planner.search.work`), in seconds of an idle core: 0.5, 1, 2, 4, ...;
            others are rounded down; or None to search until all is proved.
    """

    job: Job
    cluster: Cluster
    assumptions: Assumptions = field(default_factory=Assumptions)
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fixed_by: Mapping[str, str] = field(default_factory=dict[str, str])
    narrowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    refusals: Callable[[Job], Sequence[Problem]] | None = None
    objective: Objective = "time"
    smaller: bool = False
    asynchronous: bool = False
    searched: bool = False
    top: int = RANKED
    memory_headroom: float = 0.0
    allow_offload: bool = False
    tolerance: float = 0.01
    seconds: float | None = 8.0

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.job.shape

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.job.global_batch

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return self.job.sequence

    def stages(self, depth: int) -> tuple[range, ...]:
        """The layers of each of `depth` stages."""
        return self.job.stages(depth)

    def microbatches(self, parallelism: Parallelism) -> int:
        """The microbatches of a step in each replica."""
        return self.global_batch // (parallelism.layout.dp * parallelism.micro_batch)

    @property
    def devices(self) -> int:
        """All devices of the cluster."""
        return self.cluster.devices or self.cluster.node

    @property
    def compares_schedules(self) -> bool:
        """True if the user has fixed the pipeline's ranks or some schedules, and so asks how they compare."""
        return "pp" in self.fixed or "schedule" in self.fixed

    @property
    def price(self) -> float | None:
        """Dollars per hour of one device, or None if neither the cluster nor the device has a price."""
        return self.cluster.device.price if self.cluster.price is None else self.cluster.price


def job_to_plan(*, shape: ModelShape, global_batch: int, sequence: int, target_sequence: int = 0) -> Job:
    """A job in bfloat16 with a padded vocabulary, whose layout and schedule a search will choose.

    Args:
        target_sequence: tokens of the decoder's sample in an encoder-decoder model; 0: as many.
    """
    return Job(
        shape=shape,
        layout=Layout(),
        global_batch=global_batch,
        micro_batch=1,
        sequence=sequence,
        target_sequence=target_sequence,
        precision=Precision(dtype="bfloat16"),
        loss_chunk=None,
        vocab_multiple=VOCAB_MULTIPLE,
    )


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The split of layers over ranks and the size of a microbatch, independent of the schedule."""

    layout: Layout
    expert_tp: int | None
    micro_batch: int
    sequence_parallel: bool
    context: ContextKind


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule and its options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join((self.name, *(f"{name}={value}" for name, value in self.options)))


@dataclass(frozen=True)
class Saving:
    """Options that save memory and cost time: recomputation, states or parameters off the device."""

    recompute: Recompute = field(default_factory=Recompute)
    offload: str = "none"
    parameters: str = "none"


@dataclass(frozen=True)
class Candidate:
    """A layout with all choices made."""

    parallelism: Parallelism
    schedule: ScheduleChoice
    dp: DataParallelSettings
    saving: Saving

    def family(self, task: SearchTask) -> tuple[object, ...]:
        """The key under which variants compete for one place in the ranking: the layout and how states are
        sharded; the microbatch and the schedule too, if the task compares schedules. On one pipeline rank
        schedules that update once a step are the same.
        """
        layout = self.parallelism.layout
        if task.compares_schedules:
            alike = layout.pp == 1 and not updates_within(self.schedule.name)
            return layout, self.parallelism.micro_batch, None if alike else self.schedule
        return layout, self.dp.mode

    def job(self, task: SearchTask) -> Job:
        """The job that rules check and estimates price."""
        parallelism, saving = self.parallelism, self.saving
        dp = self.dp
        if (saving.offload, saving.parameters) != (dp.offload, dp.offload_parameters):
            dp = replace(dp, offload=saving.offload, offload_parameters=saving.parameters)
        return replace(
            task.job,
            layout=parallelism.layout,
            micro_batch=parallelism.micro_batch,
            schedule=self.schedule.name,
            options=dict(self.schedule.options),
            expert_tp=parallelism.expert_tp,
            sequence_parallel=parallelism.sequence_parallel,
            context=parallelism.context,
            recompute=saving.recompute,
            dp=dp,
        )

    @property
    def complexity(self) -> tuple[int, ...]:
        """A sort key, smaller for simpler candidates: number of axes, rarity of the schedule, stages of a
        rank, recomputed blocks, and sharding of states.
        """
        layout = self.parallelism.layout
        dp, saving = self.dp, self.saving
        axes = sum(size > 1 for size in (layout.tp, layout.cp, layout.ep, layout.pp))
        rarity = 0 if entry(self.schedule.name).common else 3
        schedule = rarity + len(self.schedule.options)
        mode = {"ddp": 0, "zero1": 0, "zero2": 2, "zero3": 3}.get(dp.mode, 4)
        shards = sum(size is not None for size in dp.shards.values())
        blocks = saving.recompute.blocks
        repeats = {"none": 0, "selective": 1}.get(
            saving.recompute.mode, 1000 if blocks is None else 1 + blocks
        )
        stages = dict(self.schedule.options).get("chunks") or 1
        return axes, schedule, stages, repeats, mode + shards + 2 * (saving.offload != "none")

    def __str__(self) -> str:
        parallelism = self.parallelism
        dp, saving = self.dp, self.saving
        parts = [parallelism.layout.describe(), f"micro {parallelism.micro_batch}"]
        if parallelism.layout.pp > 1 or self.schedule.name != PLAIN:
            parts.append(str(self.schedule))
        if parallelism.sequence_parallel:
            parts.append("sequence parallel")
        if parallelism.layout.cp > 1 and parallelism.context != "ring":
            parts.append(parallelism.context)
        shards = [f"{name.removeprefix('shard_')} over {size}" for name, size in dp.shards.items() if size]
        if dp.mode != "ddp" or parallelism.layout.cp * parallelism.layout.dp > 1:
            parts.append(" ".join((dp.mode, ", ".join(shards))).strip())
        if saving.recompute.mode != "none":
            blocks = "" if saving.recompute.blocks is None else f" of {saving.recompute.blocks} a stage"
            parts.append(f"recompute {saving.recompute.mode}{blocks}")
        if saving.offload != "none":
            parts.append(f"states on {saving.offload}")
        if saving.parameters != "none":
            parts.append(f"parameters on {saving.parameters}")
        return ", ".join(parts)


def unplanned(job: Job) -> Job:
    """The job with the layout, schedule, microbatch, recomputation and sharding of one process, all of which
    a search then chooses.
    """
    return replace(
        job,
        layout=Layout(),
        micro_batch=1,
        schedule=PLAIN,
        options={},
        stage_layers=None,
        encoder_pp=None,
        custom_program=None,
        expert_tp=None,
        sequence_parallel=False,
        context="ring",
        recompute=Recompute(),
        dp=DataParallelSettings(),
    )
