"""Every field of a recommender's training job, with its meaning, unit, default and limits beside it.

The reference in `docs/reference/config.md` is made from this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from stretto.errors import StrettoError
from stretto.job.field import Field
from stretto.job.optimiser import Optimiser, RateCurve, RateSchedule
from stretto.recommender.config.model import Feature, RecommenderModel, default_name
from stretto.recommender.placement import TableSpec
from stretto.recommender.shape import DlrmShape
from stretto.run.config.for_ranks import no_layout_error
from stretto.run.config.schema import (
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    LoopConfig,
    ReportConfig,
    RunConfig,
)

SYNTHETIC = "synthetic"


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Clicks of `source: synthetic`, drawn on the fly from a known true probability. The number of features,
    their rows and ids per sample are the model's where it sets them.
    """

    samples: Annotated[int, Field("Samples of the log, held-out ones included.", gt=0)] = 1_000_000
    features: Annotated[int, Field("Categorical features, if the model's tables are not set.", gt=0)] = 26
    rows: Annotated[
        list[int],
        Field(
            "Ids per feature, evenly spaced from the first to the second number on a logarithmic scale, if "
            "the model's tables are not set."
        ),
    ] = field(default_factory=lambda: [1000, 100_000])
    hot: Annotated[float, Field("Ids per sample and feature, if the table does not set it.", gt=0)] = 1.0
    varying: Annotated[
        bool,
        Field(
            "The number of a sample's ids varies uniformly from 0 to twice the average; otherwise it is a "
            "constant whole number."
        ),
    ] = False
    skew: Annotated[
        float, Field("Ids are as popular as 1 / rank^skew, if the table does not set it.", ge=0)
    ] = 1.05
    base_rate: Annotated[float, Field("Fraction of the samples that are clicks.", gt=0, lt=1)] = 0.25
    strength: Annotated[
        float,
        Field(
            "Standard deviation of the true logit: 0 is pure noise, above 3 hardly any noise.", ge=0, le=10
        ),
    ] = 1.5
    seed: Annotated[int, Field("Seed of the clicks, independent of `train.seed`.", ge=0, lt=2**63)] = 0

    def __post_init__(self) -> None:
        if len(self.rows) != 2 or not 1 <= self.rows[0] <= self.rows[1]:
            raise StrettoError(f"has rows: {self.rows}", hint="two whole numbers, the smaller first")

    def features_of(self, count: int | None, preset: bool) -> list[Feature]:
        """The features of the synthetic log.

        Args:
            count: number of tables that the model sets; None: it sets none, and `features` and `rows` apply.
            preset: the model's preset sets the ids per sample.
        """
        if count is not None:
            hot = None if preset else self.hot
            return [Feature(default_name(i), None, hot, self.skew) for i in range(count)]
        low, high = self.rows
        last = max(1, self.features - 1)
        rows = [round(low * (high / low) ** (i / last)) for i in range(self.features)]
        return [Feature(default_name(i), each, self.hot, self.skew) for i, each in enumerate(rows)]


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """Names of a Parquet or CSV log's columns."""

    label: Annotated[str, Field("The column of labels.", filled=True)] = "label"
    numbers: Annotated[list[str] | None, Field("Those of numbers; null: I1, I2, ...")] = None
    features: Annotated[list[str] | None, Field("Those of categorical features; null: C1, C2, ...")] = None


@dataclass(frozen=True, kw_only=True)
class ClickDataConfig:
    """What the model reads."""

    source: Annotated[
        str | list[str],
        Field(
            "`synthetic`, a click folder that `stretto data clicks` or `stretto data synth-clicks` wrote, or "
            "files of a click log, which become such a folder once."
        ),
    ] = SYNTHETIC
    format: Annotated[
        Literal["criteo", "parquet", "csv"] | None,
        Field("Of files: their format; null: by their names, else `criteo`."),
    ] = None
    threshold: Annotated[
        int, Field("Of files: ids that are seen less often share one row of their table.", gt=0)
    ] = 10
    hash_rows: Annotated[
        int | None,
        Field(
            "Of files: rows for ids hashed by modulo in place of a vocabulary, in one pass; null: a "
            "vocabulary.",
            gt=0,
        ),
    ] = None
    raw: Annotated[
        bool, Field("Of files: ids as they are, in place of a vocabulary, for tables with `ids: hash`.")
    ] = False
    missing_flags: Annotated[
        bool,
        Field("Of files: add a number for each that says whether it was missing; doubles `model.dense`."),
    ] = False
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    on_error: Annotated[
        Literal["skip", "fatal"], Field("Of files: how to handle a line that cannot be read.")
    ] = "skip"
    cache: Annotated[
        str | None,
        Field("Of files: where the resulting click folder is kept; null: the user's cache folder."),
    ] = None
    valid: Annotated[
        float,
        Field(
            "Fraction of the log that is held out for evaluation, always its end, with `split: share`, and "
            "with `named` if no file is named so.",
            ge=0,
            lt=1,
        ),
    ] = 0.1
    split: Annotated[
        Literal["named", "share", "last-part"],
        Field(
            "What is held out. `named`: the files whose names, or folders, say so (valid, validation, val, "
            "dev, eval, test, heldout), else as `share`; `share`: `valid` of the log, whatever its files are "
            "named; `last-part`: the last file or day."
        ),
    ] = "named"
    shuffle: Annotated[
        bool, Field("Shuffle training samples in an order that depends on the seed and the epoch.")
    ] = True
    block: Annotated[
        int,
        Field(
            "Number of neighbouring samples that are shuffled as one run, for logs much larger than memory "
            "(4096 is usual); 0: each sample individually.",
            ge=0,
        ),
    ] = 0
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    @property
    def sources(self) -> list[str]:
        """`source` as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source)

    @property
    def is_synthetic(self) -> bool:
        """True if clicks are generated instead of read."""
        return self.sources == [SYNTHETIC]


DenseRuleName = Literal["adamw", "sgd", "lamb"]
TableRuleName = Literal["sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "split_sgd"]


@dataclass(frozen=True, kw_only=True)
class TablesConfig:
    """Where tables are placed, and how their rows are communicated."""

    placement: Annotated[
        str | dict[str, Any],
        Field(
            "`auto` (planned for these ranks), `table`, `column`, `row`, `table-row` or `data` (all tables "
            "alike), a YAML file as `stretto plan --write` makes it, or a mapping as {C1: {split: row, "
            "ranks: all}}."
        ),
    ] = "auto"
    place: Annotated[
        Literal["device", "cpu", "disk"] | None,
        Field(
            "Device memory, host memory with a cache on the device, or files, for all tables that "
            "`placement` leaves open; null: the plan's choice, else `device`."
        ),
    ] = None
    cache: Annotated[
        float,
        Field(
            "Fraction of a table's rows that the device caches, if `place` puts the table elsewhere.",
            gt=0,
            le=1,
        ),
    ] = 0.1
    folder: Annotated[str | None, Field("Folder for `disk`; null: a temporary one in the run's folder.")] = (
        None
    )
    device_gib: Annotated[
        float | None,
        Field(
            "Device memory per rank that tables and their states may use, for `auto`, GiB; null: all that is "
            "available.",
            gt=0,
        ),
    ] = None
    host_gib: Annotated[
        float | None,
        Field("Host memory per rank that they may use, for `auto`, GiB; null: all that is available.", gt=0),
    ] = None
    wire: Annotated[
        Literal["float32", "float16", "bfloat16"],
        Field("Type in which pooled vectors and their gradients are sent; float64 with train.dtype=float64."),
    ] = "float32"
    overlap: Annotated[
        bool,
        Field(
            "Send the next batch's ids during the current one, and run the bottom network during the "
            "exchange; results are the same."
        ),
    ] = True


@dataclass(frozen=True, kw_only=True)
class RecommenderLayout:
    """The processes: dense networks are replicated on all of them, tables are placed on them."""

    ranks: Annotated[int, Field("Number of processes.", gt=0)] = 1
    ranks_per_node: Annotated[
        int | None, Field("Ranks of a node, for `table-row` and planning; null: all of them.", gt=0)
    ] = None


@dataclass(frozen=True, kw_only=True)
class RecommenderBatch:
    """The number of samples per step."""

    global_size: Annotated[
        int,
        Field(
            "Samples per step, over all ranks; if they do not divide evenly, the first ranks take one more.",
            gt=0,
        ),
    ] = 2048


@dataclass(frozen=True, kw_only=True)
class DenseOptimConfig:
    """The optimiser of the dense networks."""

    name: Annotated[DenseRuleName, Field("The update rule.")] = "adamw"
    lr: Annotated[float, Field("Peak learning rate.", gt=0)] = 1e-3
    betas: Annotated[
        tuple[float, float], Field("Decay of the means of gradient and squared gradient in adamw and lamb.")
    ] = (0.9, 0.999)
    eps: Annotated[float, Field("Added to the denominator in adamw and lamb.", gt=0)] = 1e-8
    weight_decay: Annotated[float, Field("Decoupled weight decay; biases have none.", ge=0)] = 0.0
    momentum: Annotated[float, Field("Momentum of sgd; 0 for the others.", ge=0, lt=1)] = 0.0


@dataclass(frozen=True, kw_only=True)
class TableOptimConfig:
    """The optimiser of the tables: it updates the rows that a step has looked up, with their gradients
    summed.
    """

    name: Annotated[
        TableRuleName,
        Field("The update rule. `split_sgd`: SGD in float32 on rows that are read as bfloat16."),
    ] = "rowwise_adagrad"
    lr: Annotated[float, Field("Peak learning rate.", gt=0)] = 0.02
    betas: Annotated[tuple[float, float], Field("Decay of the means in lazy_adam.")] = (0.9, 0.999)
    eps: Annotated[
        float, Field("Added to the denominator in adagrad, rowwise_adagrad and lazy_adam.", gt=0)
    ] = 1e-8


@dataclass(frozen=True, kw_only=True)
class RecommenderOptim:
    """The optimisers; both learning rates follow one schedule."""

    dense: DenseOptimConfig = field(default_factory=DenseOptimConfig)
    tables: TableOptimConfig = field(default_factory=TableOptimConfig)
    clip: Annotated[
        float | None,
        Field("Largest gradient norm over all parameters, tables included; null: no clipping.", gt=0),
    ] = None
    rate: RateCurve = field(default_factory=RateCurve)


@dataclass(frozen=True, kw_only=True)
class RecommenderRunTime(LoopConfig):
    """The training loop and the machine."""

    steps: Annotated[int, Field("Number of updates in the whole run.", gt=0)] = 500
    seed: Annotated[int, Field("Seed of initial values and data order.", ge=0, lt=2**63)] = 0
    dtype: Annotated[Literal["float32", "float64"], Field("Type of weights and computation.")] = "float32"


@dataclass(frozen=True, kw_only=True)
class ElasticRanks:
    """Other numbers of ranks: a run continues from its checkpoint with its tables placed on the ranks that
    exist, with the same global batch and the same samples in the same order. torchrun's `WORLD_SIZE` or
    `--ranks` sets the number; if a local rank dies twice in one step, or devices are gone, a restart takes
    the next smaller one.
    """

    ranks: Annotated[
        list[int] | Literal["auto"],
        Field("Numbers of ranks beside `layout.ranks`; or `auto`: any number.", examples=("[3, 2, 1]",)),
    ] = field(default_factory=list[int])


@dataclass(frozen=True, kw_only=True)
class RecommenderConfig:
    """A recommender's training job. Relative paths start at the working directory.

    Attributes:
        required: fields that the file marks REQUIRED, as in "train.steps"; these have their defaults.
    """

    model: RecommenderModel
    data: ClickDataConfig = field(default_factory=ClickDataConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    layout: RecommenderLayout = field(default_factory=RecommenderLayout)
    elastic: ElasticRanks = field(default_factory=ElasticRanks)
    batch: RecommenderBatch = field(default_factory=RecommenderBatch)
    optim: RecommenderOptim = field(default_factory=RecommenderOptim)
    train: RecommenderRunTime = field(default_factory=RecommenderRunTime)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    metrics: ReportConfig = field(default_factory=ReportConfig)
    run: RunConfig = field(default_factory=RunConfig)
    required: tuple[str, ...] = ()

    def table_specs(self, data: Sequence[Feature] | Sequence[int] | None = None) -> list[TableSpec]:
        """The tables, in the order of the features.

        Args:
            data: the features of the data, or just their rows; None: the config alone determines the tables.

        Raises:
            StrettoError: the data has a different number of features, or rows are known only with the data.
        """
        if data is None:
            count = self.model.features()
            preset = self.model.preset is not None and self.model.rows is None and self.model.tables is None
            drawn = self.data.synthetic.features_of(count, preset) if self.data.is_synthetic else None
            return self.model.table_specs(drawn)
        features = [d if isinstance(d, Feature) else Feature(f"C{i + 1}", d) for i, d in enumerate(data)]
        return self.model.table_specs(features)

    def shape(self, tables: Sequence[TableSpec] | None = None) -> DlrmShape:
        """The model's sizes with these tables; None: with the tables of the config.

        Raises:
            StrettoError: as `table_specs`.
        """
        return self.model.shape(self.table_specs() if tables is None else tables)

    def dense_optimiser(self) -> Optimiser:
        """The dense networks' optimiser, without clipping: dense and table gradients are clipped together."""
        return Optimiser(**vars(self.optim.dense), clip=None, rate=RateSchedule(**vars(self.optim.rate)))

    @property
    def rank_choices(self) -> list[int]:
        """Numbers of ranks that the job can have, the largest first; with `auto` all up to its own."""
        if self.elastic.ranks == "auto":
            return list(range(self.layout.ranks, 0, -1))
        return sorted({self.layout.ranks, *self.elastic.ranks}, reverse=True)

    def for_ranks(self, ranks: int) -> Self:
        """Return the job on `ranks` ranks.

        Raises:
            StrettoError: the config does not list this number.
        """
        if self.elastic.ranks != "auto" and ranks not in (choices := self.rank_choices):
            raise no_layout_error(ranks, choices, "elastic.ranks")
        return replace(self, layout=replace(self.layout, ranks=ranks))
