"""Every field of a training job, with its meaning, unit, default and limits beside it.

The reference in `docs/config.md` is made from this file and those of its larger sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from pydantic import Field, PrivateAttr, field_validator

from stretto.errors import Problem, StrettoError
from stretto.layout.layout import ORDER, Layout
from stretto.program import PLAIN
from stretto.run.config.checkpoint import CheckpointConfig, WeightsConfig
from stretto.run.config.data import DataConfig
from stretto.run.config.denoising import Corruption, Denoising, denoising
from stretto.run.config.elastic import ElasticConfig
from stretto.run.config.guard import GuardConfig
from stretto.run.config.model import ModelConfig
from stretto.run.config.results import MetricsConfig, ReportConfig, RunConfig, SampleConfig
from stretto.run.config.section import JobSection, Section
from stretto.run.config.states import (
    DataParallelConfig,
    FinetuneConfig,
    LoraConfig,
    PrecisionConfig,
    RecomputeConfig,
)
from stretto.spec.attention import AttentionKernel, ContextKind
from stretto.spec.data_parallel import Dtype
from stretto.spec.devices import AUTO, BACKENDS, KINDS, check_backend, check_device
from stretto.spec.job import VOCAB_MULTIPLE, Compile, Graphs
from stretto.spec.optimiser import (
    DecayShape,
    Optimiser,
    OptimiserName,
    RateSchedule,
    RateShape,
    StateType,
)
from stretto.spec.presets import find_shape
from stretto.spec.shape import ModelShape


class LayoutConfig(Section):
    """How many ranks each axis of parallelism has; their product is the number of processes."""

    tp: int = Field(default=1, gt=0, description="Tensor-parallel ranks: each layer is split over them.")
    cp: int = Field(
        default=1, gt=0, description="Context-parallel ranks: the whole sequence is split over them."
    )
    ep: int = Field(
        default=1,
        gt=0,
        description="Expert-parallel ranks, out of those of tp, cp and dp.",
    )
    dp: int = Field(
        default=1, gt=0, description="Data-parallel ranks: replicas that process different samples."
    )
    pp: int = Field(default=1, gt=0, description="Pipeline-parallel ranks: the layers are cut into stages.")
    order: str = Field(
        default=ORDER,
        description="The axes in the order of ranks, fastest first; those of size 1 may be left out.",
    )

    expert_tp: int | None = Field(
        default=None, gt=0, description="Tensor-parallel ranks within each expert; null: `tp`."
    )
    stages: list[int] | None = Field(
        default=None,
        examples=["[7, 7, 7, 5]"],
        description="Layers per stage, in the model's order; the embedding and the head count as layers, so "
        "that they add up to `model.layers` + 2 (with an encoder, its blocks and the decoder's embedding "
        "count too). null: cut evenly by FLOPs.",
    )
    encoder_pp: int | None = Field(
        default=None,
        gt=0,
        description="Of a model with an encoder, the first so many pipeline ranks hold it and the others the "
        "decoder, each rank one stage; null: stages are cut by FLOPs, none with layers of both.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Norms, dropout and the residual stream split along the sequence over the tp ranks.",
    )
    context: ContextKind = Field(
        default="ring",
        description="How cp ranks attend to each other's tokens: by passing keys and values around "
        "(`ring`), or by exchanging heads for positions (`ulysses`).",
    )

    def to_layout(self) -> Layout:
        """The layout of all ranks.

        Raises:
            StrettoError: an order that does not name the axes, or an expert layout that does not fit.
        """
        return Layout(
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            dp=self.dp,
            pp=self.pp,
            order=self.order,
            expert_tp=self.expert_tp if self.ep > 1 else None,
        )


class ScheduleConfig(Section):
    """The order in which a pipeline rank processes its microbatches."""

    name: str = Field(default=PLAIN, description="Name of a schedule; `stretto schedule --list` shows them.")
    file: str | None = Field(
        default=None,
        min_length=1,
        description="In place of a named schedule: a program in torch's CSV or in JSON, as `stretto schedule "
        "--write` writes it; it is checked before anything runs.",
    )
    chunks: int | None = Field(
        default=None, gt=0, description="Stages per pipeline rank; null: the schedule's default, 1 or 2."
    )
    group: int | None = Field(
        default=None,
        gt=0,
        description="Microbatches per group: those that pass a chunk consecutively (`interleaved`), or "
        "those of one update (`pipedream-2bw`); null: the schedule's default.",
    )
    waves: int | None = Field(
        default=None, gt=0, description="Waves of `hanayo`, with 2 stages per rank each; null: 1."
    )
    vertical_sync: bool | None = Field(
        default=None,
        description="Whether a microbatch of `pipedream` uses the same weight version on all ranks; null: "
        "false.",
    )
    memory: float | list[float] | None = Field(
        default=None,
        description="Limit for `auto` of the activations that a rank holds, in microbatches through all "
        "its stages: one number, or one for each pipeline rank; null: no limit.",
    )
    placement: Literal["linear", "loop", "vee", "zigzag"] | None = Field(
        default=None, description="The placement of stages on ranks for `auto`; null: the best."
    )
    split: bool | None = Field(
        default=None,
        description="Whether `auto` may split backwards into input and weight gradients; null: true.",
    )
    objective: Literal["barrier", "span"] | None = Field(
        default=None,
        description="What `auto` minimises: the step (barrier), or each rank's own time (span); null: "
        "barrier.",
    )
    effort: float | None = Field(
        default=None, ge=0, description="How long `auto` searches; 1 takes seconds at 8 ranks; null: 1."
    )

    @classmethod
    def option_names(cls) -> list[str]:
        """The fields that are keyword arguments of schedules."""
        return [name for name in cls.model_fields if name not in ("name", "file")]

    @property
    def options(self) -> dict[str, Any]:
        """The options that are given, as the schedule's keyword arguments."""
        values = {name: getattr(self, name) for name in self.option_names()}
        return {name: value for name, value in values.items() if value is not None}


class BatchConfig(Section):
    """The number of samples per step and per microbatch."""

    global_size: int = Field(default=32, gt=0, description="Samples per training step, over all ranks.")
    micro_size: int = Field(
        default=4,
        gt=0,
        description="Samples per microbatch; a step has `global_size / (micro_size dp)` microbatches per "
        "replica.",
    )


class RateConfig(Section):
    """The learning rate over the steps, as a ratio of `optim.lr`."""

    schedule: RateShape = Field(
        default="cosine",
        description="After the warm-up: `cosine` and `linear` decay until `decay_steps`; `inverse-sqrt` "
        "falls as `1 / sqrt(step)`; `wsd` is warm-up, stable, decay: constant until the last "
        "`decay_fraction` of the steps.",
    )
    warmup: int | float = Field(
        default=0,
        ge=0,
        description="Steps of linear warm-up; as a fraction below 1, such as 0.01: that part of "
        "`decay_steps`. A warm-up that is longer than the steps before the decay is cut to them.",
    )
    warmup_init: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Learning rate at the first update over the peak, from which the warm-up rises; null: "
        "`1 / warmup`, so that the first update already learns. Megatron-LM begins at 0.",
    )
    min_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Learning rate over its peak from the end of the decay on."
    )
    decay_steps: int | None = Field(
        default=None,
        gt=0,
        description="Steps, those of the warm-up among them, until the decay ends; null: `train.steps`.",
    )
    decay_fraction: float = Field(
        default=0.1, ge=0, le=1, description="Fraction of `decay_steps` in which wsd decays."
    )
    decay: DecayShape = Field(
        default="linear", description="Shape of the decay of wsd; `exponential` is `2 0.5^done - 1`."
    )

    @field_validator("warmup")
    @classmethod
    def _is_steps_or_a_part(cls, value: float) -> float:
        if isinstance(value, float) and value >= 1:
            steps = round(value)
            raise StrettoError(
                f"is {value}: with a fraction it is a part of the steps, below 1",
                hint=f"{steps} for {steps} steps",
            )
        return value

    def settings(self) -> RateSchedule:
        """The section as the optimiser takes it."""
        return RateSchedule(**self.model_dump())


class PipelineRateConfig(RateConfig):
    """The learning rate over the steps, as a ratio of `optim.lr`, and over the stages of a pipeline."""

    rescheduling_steps: int | None = Field(
        default=None,
        gt=0,
        description="Learning rate rescheduling for asynchronous pipelines (PipeMare's T1): a stage whose "
        "gradients are d updates late learns at the rate divided by `d^(1 - step / rescheduling_steps)`, "
        "and in full from that step on; null: all stages learn in full from the start.",
    )


class OptimConfig(Section):
    """The optimiser."""

    name: OptimiserName = Field(
        default="adamw",
        description="The update rule. `muon` is used for the blocks' matrices; all other parameters use "
        "AdamW.",
    )
    lr: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95),
        strict=False,
        description="Decay of the means of gradient and squared gradient in adamw and lamb.",
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator in adamw and lamb.")
    weight_decay: float = Field(
        default=0.1, ge=0, description="Decoupled weight decay; norms and biases have none."
    )
    no_decay: list[str] = Field(
        default_factory=list[str], description="Patterns of names of further parameters without weight decay."
    )
    momentum: float = Field(
        default=0.0, ge=0, lt=1, description="Momentum of sgd and muon; 0 for the others, and for muon 0.95."
    )
    states: StateType = Field(
        default="float32", description="Type in which adamw's means are stored; bfloat16 rounds to nearest."
    )
    clip: float | None = Field(
        default=1.0, gt=0, description="Largest gradient norm over all parameters; null: no clipping."
    )
    rate: PipelineRateConfig = Field(default_factory=PipelineRateConfig)

    def settings(self) -> Optimiser:
        """The section as planner and engine take it."""
        values = self.model_dump(exclude={"rate", "no_decay"})
        return Optimiser(**values, no_decay=tuple(self.no_decay), rate=self.rate.settings())


class LoopConfig(Section):
    """The loop and the machine, for a model of any kind."""

    steps: int = Field(default=300, gt=0, description="Number of updates in the whole run.")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of initial values, data order and dropout."
    )
    device: str = Field(
        default="auto",
        examples=[", ".join((AUTO, *KINDS))],
        description="The kind of device of all ranks, by torch's name; `auto`: the accelerator that torch "
        "sees, else the CPU. See docs/accelerators.md.",
    )
    backend: str = Field(
        default="auto",
        examples=[", ".join((AUTO, *BACKENDS))],
        description="The communication library of all ranks, by the name that torch.distributed has for it; "
        "`auto`: the one for the device.",
    )
    threads: int = Field(default=1, gt=0, description="CPU threads of each rank.")
    timeout_s: float = Field(
        default=600.0, gt=0, description="Longest wait for another rank before the job fails, seconds."
    )
    start_s: float = Field(
        default=300.0,
        gt=0,
        description="Longest wait at the start for ranks that have not come, seconds; the error names them. "
        "After 5 s a line says who is waited for.",
    )
    hang_s: float | None = Field(
        default=None,
        ge=0,
        description="Seconds without progress in a step after which a rank is taken to hang and the job "
        "fails, naming it; null: 3 times the 99th percentile of the steps, and at least 10; 0: never. The "
        "first two steps, compilation, evaluations and saves may take `timeout_s`. See docs/hangs.md.",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        description="How often local ranks are started again from the newest whole checkpoint after one of "
        "them has failed; torchrun has its own --max-restarts. See docs/reliability.md.",
    )
    grace_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds from a signal that asks to stop until the job is ended from outside: no save is "
        "begun for which the time does not suffice, going by those of this run; null: no limit.",
    )

    @field_validator("device")
    @classmethod
    def _is_a_kind(cls, value: str) -> str:
        return check_device(value)

    @field_validator("backend")
    @classmethod
    def _is_one_library(cls, value: str) -> str:
        return check_backend(value)


class RunTimeConfig(LoopConfig):
    """The training loop and the machine."""

    dtype: Dtype = Field(
        default="float32",
        description="Type of weights and computation. With 16 bits the optimiser also keeps float32 "
        "weights; with float16 the loss is scaled.",
    )
    attention: AttentionKernel = Field(
        default="auto",
        description="`auto`: torch's fused kernels, and for what they do not compute FlexAttention where it "
        "trains, else the formula in tiles; `sdpa`: without FlexAttention; `flex`: FlexAttention alone; "
        "`explicit`: forms and keeps the matrix of probabilities, as attention dropout always does. See "
        "docs/attention.md.",
    )
    compile: Compile = Field(
        default="off",
        description="`blocks`: torch.compile fuses what lies between the matrix products of blocks, once for "
        "all that are alike; needs a C++ compiler on CPUs, Triton on GPUs. See docs/compile.md.",
    )
    graphs: Graphs = Field(
        default="off",
        description="`microbatch`: forward and backward of a microbatch are captured once as a graph of the "
        "device and replayed, so that the host launches it as a whole. See docs/graphs.md.",
    )
    vocab_multiple: int = Field(
        default=VOCAB_MULTIPLE,
        gt=0,
        description="Each rank's share of the vocabulary is padded to a multiple of this.",
    )
    loss_chunk: int | None = Field(
        default=None,
        ge=0,
        description="Tokens of which logits, loss and their gradients are computed at a time, so that the "
        "logits of a microbatch never exist at once; 0: of all; null: in chunks where these logits would "
        "take much memory.",
    )
    bucket_mib: float = Field(
        default=25.0, gt=0, description="Size of a bucket of gradients that are reduced together, MiB."
    )


class EvalConfig(Section):
    """Loss on the held-out split."""

    every: int | None = Field(
        default=None, gt=0, description="Steps from one evaluation to the next; null: none."
    )
    batches: int = Field(default=8, gt=0, description="Global batches of an evaluation.")


class HasRate(Protocol):
    """Optimiser settings of any kind of model."""

    @property
    def rate(self) -> RateConfig: ...


class JobConfig(Protocol):
    """What the config of every training job has, whatever its kind of model."""

    @property
    def optim(self) -> HasRate: ...

    @property
    def train(self) -> LoopConfig: ...

    @property
    def eval(self) -> EvalConfig: ...

    @property
    def checkpoint(self) -> CheckpointConfig: ...

    @property
    def guard(self) -> GuardConfig: ...

    @property
    def metrics(self) -> ReportConfig: ...

    @property
    def run(self) -> RunConfig: ...

    @property
    def required(self) -> tuple[str, ...]: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self: ...

    def model_dump(self, *, mode: str = "python", exclude_defaults: bool = False) -> dict[str, Any]: ...


class TrainConfig(JobSection):
    """A training job. Relative paths start at the working directory."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    layout: LayoutConfig = Field(default_factory=LayoutConfig)
    elastic: ElasticConfig = Field(default_factory=ElasticConfig)
    dp: DataParallelConfig = Field(default_factory=DataParallelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    finetune: FinetuneConfig = Field(default_factory=FinetuneConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: RunTimeConfig = Field(default_factory=RunTimeConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: WeightsConfig = Field(default_factory=WeightsConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    sample: SampleConfig = Field(default_factory=SampleConfig)
    run: RunConfig = Field(default_factory=RunConfig)

    _replaced: dict[str, Section] = PrivateAttr(default_factory=dict[str, Section])

    @property
    def configured(self) -> Self:
        """The job with the layout of its config, where it has that of another number of ranks."""
        if not self._replaced:
            return self
        copy = self.model_copy(update=self._replaced)
        copy._replaced = {}
        return copy

    def replacing(self, sections: Mapping[str, Section]) -> Self:
        """The job with these sections for another number of ranks, and all others as in its config."""
        base = self.configured
        copy = base.model_copy(update=sections)
        copy._replaced = {name: getattr(base, name) for name in sections}
        return copy

    @property
    def microbatches(self) -> int:
        """Microbatches of a step in each data parallel replica; whole once the config is checked."""
        return self.batch.global_size // (self.batch.micro_size * self.layout.dp)

    @property
    def target_sequence(self) -> int:
        """Tokens of the decoder's sample: of the data, else as many as the objective makes; of a model
        without an encoder those of a sample.
        """
        if self.data.target_sequence is not None:
            return self.data.target_sequence
        try:
            lengths = self.denoising
        except Problem:  # which checks report
            lengths = None
        return self.data.sequence if lengths is None else lengths.targets

    def shape(self, vocab: int | None = None) -> ModelShape:
        """The model's sizes; `vocab` is the tokenizer's with the marks that it lacks, where it is known
        already.

        Raises:
            StrettoError: sizes that do not fit each other.
        """
        positions = max(self.data.sequence, self.target_sequence)
        shape = self.model.shape(vocab or self._likely_vocab, positions)
        lora = self.lora.shape()
        return shape if lora is None else replace(shape, lora=lora)

    @property
    def _has_encoder(self) -> bool:
        return self.model.shape(self.data.vocab, self.data.sequence).encoder_layers > 0

    @property
    def corruption(self) -> Corruption | None:
        """What becomes of the spans that are cut out of an encoder's samples; None: nothing is cut out."""
        objective = self.data.objective or ("span-corruption" if self._has_encoder else "causal")
        return None if objective == "causal" else objective

    @property
    def denoising(self) -> Denoising | None:
        """The lengths of an encoder-decoder's samples; None: nothing is cut out of them.

        Raises:
            Problem: they cannot be made.
        """
        if (corruption := self.corruption) is None:
            return None
        data = self.data
        try:
            return denoising(corruption, data.sequence, data.density(corruption), data.mean_span_length)
        except Problem as problem:
            raise problem.within("data") from None

    @property
    def _likely_vocab(self) -> int:
        """The tokenizer's entries as far as the config alone tells; one that is given is not read here."""
        if self.data.tokenizer and self.model.preset:
            return find_shape(Path(self.model.preset).expanduser()).vocab
        return self.data.vocab + (0 if self.corruption is None else self.data.marks(self.corruption))
