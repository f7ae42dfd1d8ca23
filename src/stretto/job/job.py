"""One job: the description that rules, planner, engine, trainer and proofs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Annotated, Any, Literal

from stretto.errors import Problem
from stretto.job.attention import AttentionKernel, ContextKind
from stretto.job.data_parallel import BUCKET_BYTES, DataParallelSettings, Precision
from stretto.job.field import IN_A_FILE, Field
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
    stages_of,
)
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.program import PLAIN, entry
from stretto.program import options as options_of
from stretto.program.checks.versions import weight_delays
from stretto.program.program import Program
from stretto.program.schedules.traits import is_searched
from stretto.program.transforms.shorten import shorten

VOCAB_MULTIPLE = 64  # multiple of each rank's padded share of the vocabulary in training, for fast products

STEPS_BETWEEN_DRAINS = 100.0  # default for asynchronous schedules
MOST_MICROBATCHES = 1 << 16  # per replica and step: a program has a Python object for each action

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
            "With `full`: each tp rank stores only its part of a block's input, which is gathered again in "
            "the backward; no effect with sequence_parallel, which splits the input already."
        ),
    ] = False
    memory_gib: Annotated[float | None, Field("With `auto`: the memory that a rank may use, GiB.", gt=0)] = (
        None
    )


# fields of a config's section `layout` that a job has too
ExpertTp = Annotated[int | None, Field("Tensor-parallel ranks within each expert; null: `tp`.", gt=0)]
EncoderPp = Annotated[
    int | None,
    Field(
        "Number of pipeline ranks that hold the encoder, if the model has one; the others hold the decoder, "
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
        "How cp ranks attend to each other's tokens: by passing keys and values around a ring (`ring`), or "
        "by exchanging heads for positions (`ulysses`)."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Fields of section `train` of a config that decide what ranks compute and hold."""

    attention: Annotated[
        AttentionKernel,
        Field(
            "`auto`: torch's fused kernels, or, for scores that they do not support, FlexAttention if the "
            "device can train with it, else the formula in tiles; `sdpa`: without FlexAttention; `flex`: "
            "FlexAttention alone; `explicit`: computes and stores the matrix of probabilities, as attention "
            "dropout always does. See docs/evidence/accelerators.md."
        ),
    ] = "auto"
    compile: Annotated[
        Compile,
        Field(
            "`blocks`: torch.compile fuses the operations between the matrix products of blocks, once for "
            "all blocks that are alike; needs a C++ compiler on CPUs, Triton on GPUs. See "
            "docs/evidence/accelerators.md."
        ),
    ] = "off"
    graphs: Annotated[
        Graphs,
        Field(
            "`microbatch`: forward and backward of a microbatch are captured once as a graph of the "
            "device and replayed, which costs the host one launch. See docs/evidence/accelerators.md."
        ),
    ] = "off"
    vocab_multiple: Annotated[
        int, Field("Each rank's share of the vocabulary is padded to a multiple of this.", gt=0)
    ] = 1
    loss_chunk: Annotated[
        int | None,
        Field(
            "Tokens whose logits, loss and gradients are computed at a time, so that the logits of a whole "
            "microbatch never exist; 0: all; null: chunks if these logits would take much memory.",
            ge=0,
        ),
    ] = 0
    loss: Annotated[
        str | None,
        Field(
            "A loss of your own in place of the cross-entropy: `FILE.py:NAME` of a function of logits [b, s, "
            "vocab] and targets [b, s], summed over tokens; see docs/do/own-model.md.",
            pattern=IN_A_FILE,
            examples=("mine.py:loss",),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Job(Execution):
    """One model on one layout, with everything that determines what its ranks compute and store: the rules
    check it, the planner prices it, and training, `verify` and the dry run execute it.

    With the defaults it is one process that trains on one sample per step.

    Attributes:
        global_batch: samples of a step, over all replicas.
        micro_batch: samples of a microbatch.
        sequence: tokens of a sample, of the encoder's if the model has one; 0: the context length of
            pretraining.
        target_sequence: tokens of the decoder's sample if the model has an encoder; 0: `sequence`.
        encoder_pp: number of pipeline ranks that hold the encoder, each with one stage, or None if stages are
            cut by cost.
        options: keyword arguments of the schedule.
        stage_layers: number of layers of each stage, including embedding and head, or None to balance
            forward FLOPs.
        custom_program: the compute actions of a step, read from a file, instead of a schedule's.
        world: number of processes, if an external launcher starts them.
        devices: number of accelerators, if it limits the ranks.
        expert_tp: as configured; a layout with one expert-parallel rank does not store it.
        context: how context-parallel ranks attend to each other's tokens.
        attention: the kernel; `explicit` computes the matrix of probabilities, as attention dropout always
            does; `auto` is the fastest kernel that supports the shape.
        loss_chunk: tokens whose logits, loss and gradients are computed at a time; 0: all of a microbatch;
            None: chosen by memory (`job.loss_chunk`).
        fused_loss: one kernel computes the loss from the logits and another their gradient in place;
            Stretto's own loss is not fused.
        framework: the framework whose storing and recomputing of tensors a prediction models.
        vocab_multiple: each rank's share of the vocabulary is padded to a multiple of this.
        bucket: bytes of weights per unit of reduction.
        unified_memory: host and device share one memory, as on a CPU.
        trained: the parameters that the optimiser updates; all others are frozen.
        initial: initial values of new weights.
        steps_between_drains: mean number of steps between drains of an asynchronous schedule, which drains
            for evaluations, for checkpoints and at the end.
        compile: `blocks`: operations between the matrix products of blocks are compiled.
        graphs: `microbatch`: the device replays forward and backward of a microbatch as one graph.
        async_save: checkpoints are copied to host memory and written from there while training continues.
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
        """Microbatches of a step in each replica, or None if the batch does not divide into them."""
        count, remainder = divmod(self.global_batch, self.layout.dp * self.micro_batch)
        return None if remainder else count

    @property
    def copies(self) -> int:
        """Number of ranks with the same parameters: cp x dp."""
        return self.layout.cp * self.layout.dp

    def program(self) -> Program:
        """Return the compute actions of a step, with gathers of sharded parameters of stages.

        Raises:
            StrettoError: the schedule does not exist, or not with these ranks, microbatches and options; or
                the batch does not divide into microbatches.
        """
        if self.custom_program is not None:
            return complete(self.custom_program, gathered=self._gathers_stages)
        return build_program(self._program_key)

    @property
    def window(self) -> Callable[[int], Program] | None:
        """Builds the schedule's program of several steps without a drain between them. None if each step
        drains: under synchronous schedules, with a custom program, and with experts, whose loads are summed
        over ranks after each step.
        """
        if self.custom_program is not None or self.shape.moe is not None:
            return None
        if "steps" not in options_of(self.schedule):
            return None
        key = self._program_key
        return lambda steps: build_program(replace(key, options=(*key.options, ("steps", steps))))

    def peak_program(self) -> Program:
        """Return the program that reaches peak memory: that of one step, or, if steps follow each other
        without a drain, of enough steps for each rank to reach its largest number of microbatches and
        versions of weights.

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
        """Return for each stage by how many updates its gradients are late once the pipeline is full; 0 under
        synchronous schedules.

        Raises:
            StrettoError: as `program`.
        """
        return tuple(map(max, weight_delays(self.peak_program())))

    def short_step(self) -> Program:
        """Return the program without the microbatches that do not raise any rank's peak memory
        (`program.transforms.shorten`).

        Raises:
            StrettoError: as `program`.
        """
        if self.custom_program is not None:
            return complete(shorten(self.custom_program), gathered=self._gathers_stages)
        if self.window is not None:
            return self.peak_program()
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
            digest=user.digest if (user := entry(self.schedule).user) else "",
            ranks=self.layout.pp,
            microbatches=self.microbatches or 0,
            options=tuple(options),
            costs=costs if is_searched(self.schedule) else None,  # other schedules ignore the model
            gathered=self._gathers_stages,
        )

    @property
    def schedule_name(self) -> str:
        """The schedule's name, or that of the custom program."""
        return self.schedule if self.custom_program is None else self.custom_program.name

    def stages(self, depth: int) -> tuple[range, ...]:
        """Return the layers of each of the model's `depth` stages, in the order of
        `job.flops.layer_names`.
        """
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
    """Return the problem of a batch that does not divide into microbatches, or into more than a program may
    have, or None.
    """
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
    """Return the nearest legal values below and above `value`, the nearer first; at most two."""
    below = [n for n in legal if n < value][-1:]
    above = [n for n in legal if n > value][:1]
    return sorted(below + above, key=lambda n: abs(n - value))


def either(field: str, values: list[int]) -> str | None:
    """Return a fix that names the nearest legal values, or None if none exists."""
    return f"nearest: {field}={' or '.join(map(str, values))}" if values else None
