"""Every field of a training job, with its meaning, unit, default and limits beside it.

The reference in `docs/reference/config.md` is made from this file and those of its larger sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from stretto.errors import Problem
from stretto.job.data_parallel import ComputeType, DataParallelSettings, PrecisionSettings
from stretto.job.devices import AUTO, BACKENDS, KINDS, check_backend, check_device
from stretto.job.field import Field, declared
from stretto.job.finetune import TrainedParameters
from stretto.job.job import (
    VOCAB_MULTIPLE,
    ContextParallel,
    EncoderPp,
    Execution,
    ExpertTp,
    Recompute,
    SequenceParallel,
)
from stretto.job.optimiser import Optimiser, RateCurve
from stretto.job.presets import find_shape
from stretto.job.shape import ModelShape
from stretto.layout.layout import ORDER, Layout
from stretto.program import PLAIN
from stretto.program.schedules.user_schedule import is_file
from stretto.run.config.data import DataConfig
from stretto.run.config.denoising import Corruption, Denoising
from stretto.run.config.model import LoraConfig, ModelConfig
from stretto.user_file import is_function_name


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """How many ranks each axis of parallelism has; their product is the number of processes."""

    tp: Annotated[int, Field("Tensor-parallel ranks: each layer is split over them.", gt=0)] = 1
    cp: Annotated[int, Field("Context-parallel ranks: the whole sequence is split over them.", gt=0)] = 1
    ep: Annotated[int, Field("Expert-parallel ranks, out of those of tp, cp and dp.", gt=0)] = 1
    dp: Annotated[int, Field("Data-parallel ranks: replicas that process different samples.", gt=0)] = 1
    pp: Annotated[int, Field("Pipeline-parallel ranks: the layers are cut into stages.", gt=0)] = 1
    order: Annotated[
        str, Field("The axes in the order of ranks, fastest first; those of size 1 may be left out.")
    ] = ORDER

    expert_tp: ExpertTp = None
    stages: Annotated[
        list[int] | None,
        Field(
            "Layers per stage, in the model's order; the embedding and the head count as layers, so that "
            "they add up to `model.layers` + 2 (with an encoder, its blocks and the decoder's embedding "
            "count too). null: cut evenly by FLOPs.",
            examples=("[7, 7, 7, 5]",),
        ),
    ] = None
    encoder_pp: EncoderPp = None
    sequence_parallel: SequenceParallel = False
    context: ContextParallel = "ring"

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


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The order in which a pipeline rank processes its microbatches."""

    name: Annotated[
        str,
        Field(
            "Name of a schedule; `stretto schedule --list` shows them; or one of your own in a file, which "
            "is relative to the working directory: FILE.py:FUNCTION, whose file is run, with options as in "
            "mine.py:lifo:depth=2, or the program in FILE.csv or FILE.json. See docs/do/schedules.md."
        ),
    ] = PLAIN
    file: Annotated[
        str | None,
        Field(
            "In place of a named schedule: a program in torch's CSV or in JSON, as `stretto schedule "
            "--write` writes it; it is checked before anything runs.",
            filled=True,
        ),
    ] = None
    chunks: Annotated[
        int | None, Field("Stages per pipeline rank; null: the schedule's default, 1 or 2.", gt=0)
    ] = None
    group: Annotated[
        int | None,
        Field(
            "Microbatches per group: those that pass a chunk consecutively (`interleaved`), or those of one "
            "update (`pipedream-2bw`); null: the schedule's default.",
            gt=0,
        ),
    ] = None
    waves: Annotated[int | None, Field("Waves of `hanayo`, with 2 stages per rank each; null: 1.", gt=0)] = (
        None
    )
    vertical_sync: Annotated[
        bool | None,
        Field("Whether a microbatch of `pipedream` uses the same weight version on all ranks; null: false."),
    ] = None
    memory: Annotated[
        float | list[float] | None,
        Field(
            "Limit for `auto` of the activations that a rank holds, in microbatches through all its stages: "
            "one number, or one for each pipeline rank; null: no limit."
        ),
    ] = None
    placement: Annotated[
        Literal["linear", "loop", "vee", "zigzag"] | None,
        Field("The placement of stages on ranks for `auto`; null: the best."),
    ] = None
    split: Annotated[
        bool | None, Field("Whether `auto` may split backwards into input and weight gradients; null: true.")
    ] = None
    objective: Annotated[
        Literal["barrier", "span"] | None,
        Field("What `auto` minimises: the step (barrier), or each rank's own time (span); null: barrier."),
    ] = None
    effort: Annotated[
        float | None, Field("How long `auto` searches; 1 takes seconds at 8 ranks; null: 1.", ge=0)
    ] = None

    @classmethod
    def option_names(cls) -> list[str]:
        """The fields that are keyword arguments of schedules."""
        return [name for name in declared(cls) if name not in ("name", "file")]

    @property
    def options(self) -> dict[str, Any]:
        """The options that are given, as the schedule's keyword arguments."""
        values = {name: getattr(self, name) for name in self.option_names()}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The number of samples per step and per microbatch."""

    global_size: Annotated[int, Field("Samples per training step, over all ranks.", gt=0)] = 32
    micro_size: Annotated[
        int,
        Field(
            "Samples per microbatch; a step has `global_size / (micro_size dp)` microbatches per replica.",
            gt=0,
        ),
    ] = 4


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """The loop and the machine, for a model of any kind."""

    steps: Annotated[int, Field("Number of updates in the whole run.", gt=0)] = 300
    seed: Annotated[int, Field("Seed of initial values, data order and dropout.", ge=0, lt=2**63)] = 0
    device: Annotated[
        str,
        Field(
            "The kind of device of all ranks, by torch's name; `auto`: the accelerator that torch sees, else "
            "the CPU. See docs/evidence/accelerators.md.",
            examples=(", ".join((AUTO, *KINDS)),),
            check=check_device,
        ),
    ] = "auto"
    backend: Annotated[
        str,
        Field(
            "The communication library of all ranks, by the name that torch.distributed has for it; `auto`: "
            "the one for the device.",
            examples=(", ".join((AUTO, *BACKENDS)),),
            check=check_backend,
        ),
    ] = "auto"
    hooks: Annotated[
        list[str],
        Field(
            "Own code that every rank calls at points of the loop: FILE.py:CLASS, or FILE.py:FUNCTION with "
            "the name of a hook, such as on_step_end. See docs/do/watching.md.",
            examples=("[mine.py:MyHooks]",),
        ),
    ] = field(default_factory=list[str])
    threads: Annotated[int, Field("CPU threads of each rank.", gt=0)] = 1
    timeout_s: Annotated[
        float, Field("Longest wait for another rank before the job fails, seconds.", gt=0)
    ] = 600.0
    start_s: Annotated[
        float,
        Field(
            "Longest wait at the start for ranks that have not come, seconds; the error names them. After 5 "
            "s a line says who is waited for.",
            gt=0,
        ),
    ] = 300.0
    hang_s: Annotated[
        float | None,
        Field(
            "Seconds without progress in a step after which a rank is taken to hang and the job fails, "
            "naming it; null: 3 times the 99th percentile of the steps, and at least 10; 0: never. The first "
            "two steps, compilation, evaluations and saves may take `timeout_s`. See "
            "docs/evidence/reliability.md.",
            ge=0,
        ),
    ] = None
    restarts: Annotated[
        int,
        Field(
            "How often local ranks are started again from the newest whole checkpoint after one of them has "
            "failed; torchrun has its own --max-restarts. See docs/do/long-runs.md.",
            ge=0,
        ),
    ] = 0
    grace_s: Annotated[
        float | None,
        Field(
            "Seconds from a signal that asks to stop until the job is ended from outside: no save is begun "
            "for which the time does not suffice, going by those of this run; null: no limit.",
            gt=0,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunTimeConfig(Execution, ComputeType, LoopConfig):
    """The training loop and the machine."""

    vocab_multiple: int = VOCAB_MULTIPLE
    loss_chunk: int | None = None
    bucket_mib: Annotated[
        float, Field("Size of a bucket of gradients that are reduced together, MiB.", gt=0)
    ] = 25.0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Loss on the held-out split."""

    every: Annotated[int | None, Field("Steps from one evaluation to the next; null: none.", gt=0)] = None
    batches: Annotated[int, Field("Global batches of an evaluation.", gt=0)] = 8


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints on disk, to resume from."""

    every: Annotated[
        int | None, Field("Steps from one checkpoint to the next; null: at the end only.", gt=0)
    ] = None
    async_save: Annotated[
        bool,
        Field(
            "Copy what is saved to host memory, and write it while training continues. What lies in files "
            "already is written at once; the last checkpoint of a run is waited for."
        ),
    ] = False
    if_busy: Annotated[
        Literal["wait", "skip"],
        Field(
            "What a checkpoint does while the one before it is still being written: wait for it, or leave "
            "itself out."
        ),
    ] = "wait"
    keep: Annotated[int | None, Field("Number of newest checkpoints to keep; null: all.", gt=0)] = 2
    keep_every: Annotated[
        int | None, Field("Keep the checkpoints of steps that are multiples of this as well.", gt=0)
    ] = None
    keep_best: Annotated[
        int | None,
        Field(
            "Number of checkpoints to keep as well that have the least held-out loss (`eval.every`) at their "
            "step; of recommenders, the least logloss.",
            gt=0,
        ),
    ] = None
    resume: Annotated[
        str,
        Field(
            "`never`, `auto` (from the run's newest complete checkpoint, if any), or a folder.", filled=True
        ),
    ] = "never"


@dataclass(frozen=True, kw_only=True)
class WeightsConfig(CheckpointConfig):
    """Checkpoints on disk, to resume from."""

    may_differ: Annotated[
        list[str],
        Field(
            "Fields of `model` that may differ from the checkpoint's, as where the context is extended; "
            "without, training refuses weights of a model that computes something else.",
            examples=("[rope_theta, rope]",),
        ),
    ] = field(default_factory=list[str])


Action = Literal["stop", "skip", "rollback"]


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What becomes of a step whose numbers cannot be right, and of copies that differ."""

    on_nonfinite: Annotated[
        Action,
        Field(
            "Where a loss or a gradient is NaN or infinite, no rank applies the update. Then `stop` ends the "
            "run, `skip` continues with the next step, and `rollback` returns to the newest whole checkpoint "
            "and continues after the samples of the step."
        ),
    ] = "stop"
    on_spike: Annotated[
        Literal["off", "stop", "skip", "rollback"],
        Field("The same where the loss or the gradient norm jumps up."),
    ] = "off"
    spike_sigma: Annotated[
        float,
        Field(
            "What a jump is: so many standard deviations above the median of the window, both estimated so "
            "that single outliers do not move them.",
            gt=0,
        ),
    ] = 6.0
    spike_window: Annotated[
        int, Field("Steps of the window; none is judged before it is half full.", gt=3)
    ] = 128
    max_skips: Annotated[
        int, Field("Bad steps in a row that are skipped or rolled back; the next one stops.", gt=0)
    ] = 10
    check_replicas: Annotated[
        int | None,
        Field(
            "Steps from one comparison of all copies of weights and optimiser states on different ranks, by "
            "checksum, to the next, and before every checkpoint; null: none.",
            gt=0,
        ),
    ] = None
    check_memory: Annotated[
        int | None,
        Field(
            "Steps from one check that weights and optimiser states in memory keep their bits from an update "
            "to the next, by checksum, to the next check: with 1 none is left out. It also finds what only "
            "one rank holds, as shards of ZeRO; null: none.",
            gt=0,
        ),
    ] = None
    on_mismatch: Annotated[
        Literal["stop", "rollback"],
        Field(
            "Where copies differ, or memory has changed by itself: `rollback` goes back to the newest whole "
            "checkpoint from before, and trains on the same samples again."
        ),
    ] = "stop"

    @property
    def rolls_back(self) -> bool:
        """True if any rule goes back to a checkpoint."""
        return "rollback" in (self.on_nonfinite, self.on_spike, self.on_mismatch)

    @property
    def keeps_on(self) -> bool:
        """True if a bad step is ever passed over, or memory checked, so that every rank must know of it
        before it updates.
        """
        return self.on_nonfinite != "stop" or self.on_spike != "off" or self.check_memory is not None


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What is reported during the run. `metrics.jsonl` has every step."""

    every: Annotated[int, Field("Steps from one line in the terminal to the next.", gt=0)] = 10
    to: Annotated[
        list[Tracker],
        Field(
            "Trackers that get the numbers as well; each needs the extra of its name, such as "
            "`stretto[wandb]`.",
            examples=("[tensorboard, wandb]",),
        ),
    ] = field(default_factory=list[Tracker])
    project: Annotated[
        str | None,
        Field(
            "Project of W&B and Trackio, experiment of MLflow; null: that of their environment variables, "
            "else `stretto`.",
            filled=True,
        ),
    ] = None
    tensorboard_dir: Annotated[
        str | None,
        Field(
            "Write TensorBoard files to this folder; null: with `to: [tensorboard]`, to `tensorboard/` in "
            "the run's folder.",
            filled=True,
        ),
    ] = None
    spans: Annotated[
        bool,
        Field(
            "Send OpenTelemetry spans of the run, its steps and their phases, from every rank; needs the "
            "extra `stretto[opentelemetry]`. See docs/do/watching.md#spans.",
        ),
    ] = False
    profile: Annotated[
        list[int] | None,
        Field(
            "The first and the last step that torch's profiler records on every rank, into `profile/` in the "
            "run's folder; or one step; null: none. See docs/do/watching.md#profile.",
            examples=("[10, 13]",),
        ),
    ] = None
    profile_memory: Annotated[
        list[int],
        Field(
            "Ranks that record memory in these steps as well: every allocation in the trace on CPUs, a "
            "file with the allocator's history on accelerators.",
            examples=("[0]",),
        ),
    ] = field(default_factory=list[int])

    @property
    def trackers(self) -> list[Tracker]:
        """Those of `to`, and TensorBoard if its folder is set."""
        board: list[Tracker] = ["tensorboard"] if self.tensorboard_dir is not None else []
        return list(dict.fromkeys([*self.to, *board]))

    def board(self, run: Path) -> Path:
        """Return the folder of TensorBoard's files of a run in the folder `run`."""
        return (
            run / "tensorboard" if self.tensorboard_dir is None else Path(self.tensorboard_dir).expanduser()
        )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(ReportConfig):
    """What is reported during the run. `metrics.jsonl` has every step."""

    peak_tflops: Annotated[
        float | None,
        Field(
            "Peak of one device in TFLOP/s, for MFU; null: looked up for known accelerators, none on CPUs.",
            gt=0,
        ),
    ] = None
    trace: Annotated[
        int,
        Field(
            "Step, counted from the start or the resume, in which every rank records a timeline; `trace/` "
            "and `report.html` in the run's folder compare it with the prediction. 0: none.",
            ge=0,
        ),
    ] = 0


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that the trained model generates at the end."""

    prompt: Annotated[str, Field("The beginning of the text.")] = "def "
    tokens: Annotated[int, Field("Tokens to generate; 0: no sample.", ge=0)] = 64
    temperature: Annotated[float, Field("Divides the logits; 0: always the most likely token.", ge=0)] = 0.8
    top_k: Annotated[int | None, Field("Sample from this many most likely tokens; null: from all.", gt=0)] = (
        50
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the results go: `DIR/NAME/`."""

    name: Annotated[
        str,
        Field(
            "Name of the run and of its folder; by default the config file's name.",
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+=@-]*$",
            examples=("gpt-small.2",),
        ),
    ] = "train"
    dir: Annotated[str, Field("Folder of all runs.", filled=True)] = "runs"
    private: Annotated[bool, Field("Only the user who trains may enter the run's folder (mode 0700).")] = (
        False
    )

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.dir) / self.name


@dataclass(frozen=True, kw_only=True)
class ElasticLayout:
    """A layout of another number of ranks than `layout`'s. Sizes that are left out are 1; what is not said
    here is as in `layout`, `batch` and `schedule` of the config, whichever layout the job had before.
    """

    tp: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    cp: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    ep: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    dp: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    pp: Annotated[int, Field("As in `layout`.", gt=0)] = 1
    expert_tp: Annotated[int | None, Field("As in `layout`.", gt=0)] = None
    stages: Annotated[list[int] | None, Field("As in `layout`.")] = None
    encoder_pp: Annotated[int | None, Field("As in `layout`.", gt=0)] = None
    micro_size: Annotated[int | None, Field("Samples per microbatch; null: `batch.micro_size`.", gt=0)] = None
    schedule: Annotated[
        str | None,
        Field("Name of the schedule, with its usual options; null: that of `schedule`.", filled=True),
    ] = None

    @property
    def ranks(self) -> int:
        """Processes of the layout; experts share those of other axes."""
        return self.tp * self.cp * self.dp * self.pp


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Fewer or more ranks: a run continues from its checkpoint with the layout for the number that there is,
    with the same global batch and the same samples in the same order. `WORLD_SIZE` of torchrun chooses it, or
    `--ranks`; where a local rank dies twice in one step, or devices are gone, a restart takes the next
    smaller one.
    """

    layouts: Annotated[
        list[ElasticLayout] | Literal["auto"],
        Field(
            "One layout for each further number of ranks; or `auto`: any number takes the fastest layout "
            "that fits it, as `stretto plan --cluster here` finds it, with its microbatches, schedule, "
            "sharding and recomputation.",
            examples=("[{dp: 3}, {pp: 2, micro_size: 2}]",),
        ),
    ] = field(default_factory=list[ElasticLayout])

    @property
    def listed(self) -> list[ElasticLayout]:
        """The layouts that are listed; none where they are planned."""
        return [] if self.layouts == "auto" else self.layouts


class HasRate(Protocol):
    """Optimiser settings of any kind of model."""

    @property
    def rate(self) -> RateCurve: ...


class JobConfig(Protocol):
    """What the config of every training job has, whatever its kind of model."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

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


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training job. Relative paths start at the working directory.

    Attributes:
        required: fields that the file marks REQUIRED, as in "train.steps"; these have their defaults.
        replaced: the sections of the file, if the job has those of another number of ranks instead.
    """

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    dp: DataParallelSettings = field(default_factory=DataParallelSettings)
    precision: PrecisionSettings = field(default_factory=PrecisionSettings)
    finetune: TrainedParameters = field(default_factory=TrainedParameters)
    lora: LoraConfig = field(default_factory=LoraConfig)
    recompute: Recompute = field(default_factory=Recompute)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: Optimiser = field(default_factory=Optimiser)
    train: RunTimeConfig = field(default_factory=RunTimeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: WeightsConfig = field(default_factory=WeightsConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    run: RunConfig = field(default_factory=RunConfig)
    required: tuple[str, ...] = ()
    replaced: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def configured(self) -> Self:
        """The job with the layout of its config, if it has that of another number of ranks."""
        return replace(self, **self.replaced, replaced={}) if self.replaced else self

    def replacing(self, sections: Mapping[str, Any]) -> Self:
        """Return the job with these sections for another number of ranks, and all others as in its config."""
        base = self.configured
        return replace(base, **sections, replaced={name: getattr(base, name) for name in sections})

    @property
    def user_parts(self) -> dict[str, str]:
        """The parts of the job that files of the user's define, by field: FILE.py:NAME or a file."""
        parts = {"optim.name": self.optim.name, "schedule.name": self.schedule.name}
        parts = {field: named for field, named in parts.items() if is_file(named)}
        if self.schedule.file is not None:
            parts["schedule.file"] = self.schedule.file
        lists = {"data.source": self.data.sources, "train.hooks": self.train.hooks}
        named = {f"{field}[{at}]": name for field, names in lists.items() for at, name in enumerate(names)}
        named |= {"train.loss": self.train.loss or "", "model.build": self.model.build or ""}
        return parts | {field: name for field, name in named.items() if is_function_name(name)}

    @property
    def vocab(self) -> int | None:
        """Entries of the model's vocabulary if the config determines them, else None: the tokenizer's."""
        return self.model.vocab if self.model.build is None else self.shape().vocab

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
            StrettoError: sizes that do not fit each other; or `model.build` returns no model that can be
                trained.
        """
        if self.model.build is not None:
            from stretto.engine.user_model import try_user_model

            return try_user_model(self.model.build, self.model.arguments, self.data.sequence)
        positions = max(self.data.sequence, self.target_sequence)
        shape = self.model.shape(vocab or self._likely_vocab, positions)
        lora = self.lora.shape()
        return shape if lora is None else replace(shape, lora=lora)

    @property
    def _has_encoder(self) -> bool:
        model, data = self.model, self.data
        return model.build is None and model.shape(data.vocab, data.sequence).encoder_layers > 0

    @property
    def corruption(self) -> Corruption | None:
        """See `DataConfig.corruption`."""
        return self.data.corruption(self._has_encoder)

    @property
    def denoising(self) -> Denoising | None:
        """See `DataConfig.denoising`."""
        return self.data.denoising(self._has_encoder)

    @property
    def _likely_vocab(self) -> int:
        """The tokenizer's entries as far as the config alone tells; one that is given is not read here."""
        if self.data.tokenizer and self.model.preset:
            return find_shape(Path(self.model.preset).expanduser()).vocab
        return self.data.vocab + (0 if self.corruption is None else self.data.marks(self.corruption))
