"""One job: the description that rules, planner, engine, trainer and proofs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Annotated, Any, Literal

from stretto.errors import Problem
from stretto.job.attention import AttentionKernel, ContextKind
from stretto.job.data_parallel import BUCKET_BYTES, DataParallelSettings, Precision
from stretto.job.field import Field
from stretto.job.finetune import TrainedParameters
from stretto.job.framework import STRETTO, Framework
from stretto.job.initial import Initial
from stretto.job.optimiser import Optimiser
from stretto.job.program import (
    ProgramKey,
    ScheduleSearchKey,
    build_program,
    complete,
    short_step,
    shortened,
    stages_of,
)
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.program import PLAIN
from stretto.program import options as options_of
from stretto.program.checks.versions import weight_delays
from stretto.program.lower import LOOKAHEAD, RankLowering
from stretto.program.program import Program
from stretto.program.schedules.traits import is_searched

VOCAB_MULTIPLE = 64  # of each rank's share of the vocabulary in training, so that products have even sizes

STEPS_BETWEEN_DRAINS = (
    100.0  # steps between two drains of an asynchronous schedule, where no config says them
)
MOST_MICROBATCHES = 1 << 16  # of a replica and step: a program has a Python object for each action

RecomputeMode = Literal["none", "selective", "full", "auto"]
Compile = Literal["off", "blocks"]
Graphs = Literal["off", "microbatch"]


@dataclass(frozen=True)
class Recompute:
    """Activations that are dropped after the forward and recomputed in the backward, to save memory."""

    mode: Annotated[
        RecomputeMode,
        Field(
            "`selective`: only softmax(q k^T) v; `full`: whole blocks; `auto`: for each block the cheapest "
            "mode that fits `memory_gib`."
        ),
    ] = "none"
    blocks: Annotated[
        int | None,
        Field(
            "With `full`: the number of blocks of each stage to recompute, from the first; null: all.", ge=0
        ),
    ] = None
    shard_inputs: Annotated[
        bool,
        Field(
            "With `full`: each tp rank keeps only its part of a block's input, which is gathered again in "
            "the backward; no effect with sequence_parallel, where the input is split already."
        ),
    ] = False
    memory_gib: Annotated[float | None, Field("With `auto`: the memory that a rank may use, GiB.", gt=0)] = (
        None
    )


# fields of section `layout` of a config that a job has too
ExpertTp = Annotated[int | None, Field("Tensor-parallel ranks within each expert; null: `tp`.", gt=0)]
EncoderPp = Annotated[
    int | None,
    Field(
        "Of a model with an encoder, the first so many pipeline ranks hold it and the others the decoder, "
        "each rank one stage; null: stages are cut by FLOPs, none with layers of both.",
        gt=0,
    ),
]
SequenceParallel = Annotated[
    bool, Field("Norms, dropout and the residual stream split along the sequence over the tp ranks.")
]
ContextParallel = Annotated[
    ContextKind,
    Field(
        "How cp ranks attend to each other's tokens: by passing keys and values around (`ring`), or by "
        "exchanging heads for positions (`ulysses`)."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Fields of section `train` of a config that decide what ranks compute and hold."""

    attention: Annotated[
        AttentionKernel,
        Field(
            "`auto`: torch's fused kernels, and for what they do not compute FlexAttention where it trains, "
            "else the formula in tiles; `sdpa`: without FlexAttention; `flex`: FlexAttention alone; "
            "`explicit`: forms and keeps the matrix of probabilities, as attention dropout always does. See "
            "docs/accelerators.md."
        ),
    ] = "auto"
    compile: Annotated[
        Compile,
        Field(
            "`blocks`: torch.compile fuses what lies between the matrix products of blocks, once for all "
            "that are alike; needs a C++ compiler on CPUs, Triton on GPUs. See docs/accelerators.md."
        ),
    ] = "off"
    graphs: Annotated[
        Graphs,
        Field(
            "`microbatch`: forward and backward of a microbatch are captured once as a graph of the device "
            "and replayed, so that the host launches it as a whole. See docs/accelerators.md."
        ),
    ] = "off"
    vocab_multiple: Annotated[
        int, Field("Each rank's share of the vocabulary is padded to a multiple of this.", gt=0)
    ] = 1
    loss_chunk: Annotated[
        int | None,
        Field(
            "Tokens of which logits, loss and their gradients are computed at a time, so that the logits of "
            "a microbatch never exist at once; 0: of all; null: in chunks where these logits would take much "
            "memory.",
            ge=0,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class Job(Execution):
    """One model on one layout, and all that decides what its ranks compute and hold: what the rules check,
    the planner prices, and training, `verify` and the dry run carry out.

    With the defaults it is one process that trains on one sample a step.

    Attributes:
        global_batch: samples of a step, over all replicas.
        micro_batch: samples of a microbatch.
        sequence: tokens of a sample, of the encoder's where there is one; 0 stands for all positions of the
            model.
        target_sequence: tokens of a decoder's sample beside an encoder; 0: as many.
        encoder_pp: the first pipeline ranks, which encode, each with one stage; None: stages are cut by their
            cost.
        options: keyword arguments of the schedule.
        stage_layers: how many layers each stage has, embedding and head among them; None: cut evenly by
            their forward FLOPs.
        custom_program: the compute actions of a step where they are not a schedule's, as read from a file.
        world: processes, where others start them.
        devices: accelerators, where their number limits the ranks.
        expert_tp: as configured; a layout with one expert-parallel rank does not keep it.
        context: how context-parallel ranks attend.
        attention: the kernel; `explicit` forms the matrix of probabilities, which attention dropout always
            does; `auto` is the fastest that computes what the shape says.
        loss_chunk: tokens of which the logits, the loss and their gradients are computed at a time; 0: all of
            a microbatch; None: as many as pay off (`job.loss_chunk`).
        fused_loss: one kernel computes the loss from the logits and another their gradient in place;
            Stretto's own loss is not fused.
        framework: whose ways of keeping and recomputing tensors a prediction follows.
        vocab_multiple: each rank's share of the vocabulary is padded to a multiple of this.
        bucket: bytes of weights at which a unit of reduction is full.
        unified_memory: host and device share one memory, as on a CPU.
        trained: which parameters the optimiser updates; all others are frozen.
        initial: how new weights begin.
        steps_between_drains: of an asynchronous schedule, on average over the run: it drains for an
            evaluation, for a checkpoint and at the end.
        compile: `blocks`: what lies between the matrix products of blocks is compiled.
        graphs: `microbatch`: the device replays forward and backward of a microbatch as one graph.
        async_save: checkpoints are copied to host memory, and written from there while training continues.
    """

    shape: ModelShape
    layout: Layout = field(default_factory=Layout)
    global_batch: int = 1
    micro_batch: int = 1
    sequence: int = 0
    target_sequence: int = 0
    encoder_pp: EncoderPp = None
    schedule: str = PLAIN
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    stage_layers: tuple[int, ...] | None = None
    custom_program: Program | None = None
    world: int | None = None
    devices: int | None = None
    expert_tp: ExpertTp = None
    sequence_parallel: SequenceParallel = False
    context: ContextParallel = "ring"
    recompute: Recompute = Recompute()
    dp: DataParallelSettings = field(default_factory=DataParallelSettings)
    precision: Precision = field(default_factory=Precision)
    optimiser: Optimiser = field(default_factory=lambda: Optimiser(clip=None))
    fused_loss: bool = False
    framework: Framework = STRETTO
    bucket: int = BUCKET_BYTES
    unified_memory: bool = False
    trained: TrainedParameters = field(default_factory=TrainedParameters)
    initial: Initial = field(default_factory=Initial)
    steps_between_drains: float = STEPS_BETWEEN_DRAINS
    async_save: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequence", self.sequence or self.shape.pretraining_sequence)
        if not self.target_sequence or not self.shape.encoder_layers:
            object.__setattr__(self, "target_sequence", self.sequence)
        if self.shape.lora is not None:
            object.__setattr__(self, "trained", replace(self.trained, adapters=True))

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step in each replica; None where the batch does not divide."""
        count, remainder = divmod(self.global_batch, self.layout.dp * self.micro_batch)
        return None if remainder else count

    @property
    def copies(self) -> int:
        """Ranks with the same parameters: those of cp and dp."""
        return self.layout.cp * self.layout.dp

    def program(self) -> Program:
        """The compute actions of a step, and where sharded parameters of stages are gathered.

        Raises:
            StrettoError: there is no such schedule, or not with these ranks, microbatches and options; or the
                batch does not divide into microbatches.
        """
        if self.custom_program is not None:
            return complete(self.custom_program, gathered=self._gathers_stages)
        return build_program(self._program_key)

    @property
    def window(self) -> Callable[[int], Program] | None:
        """The schedule's program of several steps without a drain between them; None where each step drains:
        under synchronous schedules, with a program of one's own, and where the ranks add up the loads of
        experts after each step.
        """
        if self.custom_program is not None or self.shape.moe is not None:
            return None
        if "steps" not in options_of(self.schedule):
            return None
        key = self._program_key
        return lambda steps: build_program(replace(key, options=(*key.options, ("steps", steps))))

    def peak_program(self) -> Program:
        """The program in which ranks hold the most: that of a step, or, where steps follow one another
        without a drain, of enough steps that each rank has all the microbatches and versions of weights that
        it ever holds.

        Raises:
            StrettoError: as `program`.
        """
        program, window = self.program(), self.window
        if window is None:
            return program
        enough = 2 * (program.ranks - 1 + program.parameters.get("group", 1))
        steps = ceil(enough / program.microbatches)
        return program if steps == 1 else window(steps)

    def delays(self) -> tuple[int, ...]:
        """For each stage, how many updates late its gradients are once the pipeline is full; 0 under
        synchronous schedules.

        Raises:
            StrettoError: as `program`.
        """
        return tuple(map(max, weight_delays(self.peak_program())))

    def short_step(self) -> RankLowering:
        """The program without the microbatches that make no rank hold more (`program.transforms.shorten`), to
        be lowered rank by rank.

        Raises:
            StrettoError: as `program`.
        """
        if self.custom_program is not None:
            return shortened(self.custom_program, gathered=self._gathers_stages)
        if self.window is not None:
            return RankLowering(self.peak_program(), lookahead=LOOKAHEAD)
        return short_step(self._program_key)

    @property
    def _gathers_stages(self) -> bool:
        return self.dp.gathers(self.layout.pp) == "stage"

    @property
    def _program_key(self) -> ProgramKey:
        if (problem := batch_problem(self)) is not None:
            raise problem
        costs = ScheduleSearchKey(
            shape=self.shape,
            sequence=self.sequence,
            recompute=self.recompute.mode,
            stage_layers=self.stage_layers,
            target=self.target_sequence,
            encoder_stages=self.encoder_pp,
        )
        options = ((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(self.options.items()))
        return ProgramKey(
            name=self.schedule,
            ranks=self.layout.pp,
            microbatches=self.microbatches or 0,
            options=tuple(options),
            costs=costs if is_searched(self.schedule) else None,  # no other schedule looks at the model
            gathered=self._gathers_stages,
        )

    @property
    def schedule_name(self) -> str:
        """The schedule's name, or that of the custom program."""
        return self.schedule if self.custom_program is None else self.custom_program.name

    def stages(self, depth: int) -> tuple[range, ...]:
        """The layers of each of the model's `depth` stages, in the order of `job.flops.layer_names`."""
        return stages_of(
            self.shape,
            self.sequence,
            depth,
            self.stage_layers,
            target=self.target_sequence,
            encoder_stages=self.encoder_pp,
        )


Rule = Callable[[Job], Iterator[Problem]]


def batch_problem(job: Job) -> Problem | None:
    """A batch that does not divide into microbatches, or into more than a program is built for, if so."""
    unit = job.layout.dp * job.micro_batch
    if (job.microbatches or 0) > MOST_MICROBATCHES:
        return Problem(
            "batch.global_size",
            job.global_batch,
            f"each replica has {job.microbatches:,} microbatches a step, of at most {MOST_MICROBATCHES:,}",
            f"batch.global_size={MOST_MICROBATCHES * unit} or less, or a larger batch.micro_size",
        )
    if job.microbatches:
        return None
    below = job.global_batch // unit * unit
    legal = [n for n in (below, below + unit) if n]
    return Problem(
        "batch.global_size",
        job.global_batch,
        f"it must be a multiple of batch.micro_size={job.micro_batch} x layout.dp={job.layout.dp}",
        either("batch.global_size", nearest_values(job.global_batch, legal)),
    )


def nearest_values(value: int, legal: Iterable[int]) -> list[int]:
    """The nearest legal value below and above `value`, the nearer first; at most two."""
    below = [n for n in legal if n < value][-1:]
    above = [n for n in legal if n > value][:1]
    return sorted(below + above, key=lambda n: abs(n - value))


def either(field: str, values: list[int]) -> str | None:
    """The fix that names the nearest legal values."""
    return f"nearest: {field}={' or '.join(map(str, values))}" if values else None
