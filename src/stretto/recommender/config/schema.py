"""Every field of a recommender's training job, with its meaning, unit, default and limits beside it.

The reference in `docs/config.md` is made from this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from stretto.errors import StrettoError
from stretto.recommender.config.elastic import ElasticRanks
from stretto.recommender.config.model import Feature, RecommenderModel, default_name
from stretto.recommender.placement import TableSpec
from stretto.recommender.shape import DlrmShape
from stretto.run.config.checkpoint import CheckpointConfig
from stretto.run.config.guard import GuardConfig
from stretto.run.config.results import ReportConfig, RunConfig
from stretto.run.config.schema import (
    EvalConfig,
    LoopConfig,
    RateConfig,
)
from stretto.run.config.section import JobSection, Section
from stretto.spec.optimiser import Optimiser

SYNTHETIC = "synthetic"


class SyntheticConfig(Section):
    """Clicks of `source: synthetic`, drawn on the fly from a known true probability. The number of features,
    their rows and ids per sample are the model's where it sets them.
    """

    samples: int = Field(
        default=1_000_000,
        gt=0,
        description="Samples of the log, held-out ones included.",
    )
    features: int = Field(
        default=26, gt=0, description="Categorical features, if the model's tables are not set."
    )
    rows: list[int] = Field(
        default=[1000, 100_000],
        description="Ids per feature, evenly spaced from the first to the second number on a logarithmic "
        "scale, if the model's tables are not set.",
    )
    hot: float = Field(
        default=1.0, gt=0, description="Ids per sample and feature, if the table does not set it."
    )
    varying: bool = Field(
        default=False,
        description="The number of a sample's ids varies uniformly from 0 to twice the average; otherwise "
        "it is a constant whole number.",
    )
    skew: float = Field(
        default=1.05, ge=0, description="Ids are as popular as 1 / rank^skew, if the table does not set it."
    )
    base_rate: float = Field(default=0.25, gt=0, lt=1, description="Fraction of the samples that are clicks.")
    strength: float = Field(
        default=1.5,
        ge=0,
        le=10,
        description="Standard deviation of the true logit: 0 is pure noise, above 3 hardly any noise.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the clicks, independent of `train.seed`."
    )

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if len(self.rows) != 2 or not 1 <= self.rows[0] <= self.rows[1]:
            raise StrettoError(f"has rows: {self.rows}", hint="two whole numbers, the smaller first")
        return self

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


class ColumnsConfig(Section):
    """Names of a Parquet or CSV log's columns."""

    label: str = Field(default="label", min_length=1, description="The column of labels.")
    numbers: list[str] | None = Field(default=None, description="Those of numbers; null: I1, I2, ...")
    features: list[str] | None = Field(
        default=None, description="Those of categorical features; null: C1, C2, ..."
    )


class ClickDataConfig(Section):
    """What the model reads."""

    source: str | list[str] = Field(
        default=SYNTHETIC,
        description="`synthetic`, a click folder that `stretto data clicks` or `stretto data synth-clicks` "
        "wrote, or files of a click log, which become such a folder once.",
    )
    format: Literal["criteo", "parquet", "csv"] | None = Field(
        default=None, description="Of files: their format; null: by their names, else `criteo`."
    )
    threshold: int = Field(
        default=10, gt=0, description="Of files: ids that are seen less often share one row of their table."
    )
    hash_rows: int | None = Field(
        default=None,
        gt=0,
        description="Of files: rows for ids hashed by modulo in place of a vocabulary, in one pass; null: "
        "a vocabulary.",
    )
    raw: bool = Field(
        default=False,
        description="Of files: ids as they are, in place of a vocabulary, for tables with `ids: hash`.",
    )
    missing_flags: bool = Field(
        default=False,
        description="Of files: add a number for each that says whether it was missing; doubles "
        "`model.dense`.",
    )
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    on_error: Literal["skip", "fatal"] = Field(
        default="skip", description="Of files: how to handle a line that cannot be read."
    )
    cache: str | None = Field(
        default=None,
        description="Of files: where the resulting click folder is kept; null: the user's cache folder.",
    )
    valid: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Fraction of the log that is held out for evaluation, always its end, with "
        "`split: share`, and with `named` if no file is named so.",
    )
    split: Literal["named", "share", "last-part"] = Field(
        default="named",
        description="What is held out. `named`: the files whose names, or folders, say so (valid, "
        "validation, val, dev, eval, test, heldout), else as `share`; `share`: `valid` of the log, whatever "
        "its files are named; `last-part`: the last file or day.",
    )
    shuffle: bool = Field(
        default=True,
        description="Shuffle training samples in an order that depends on the seed and the epoch.",
    )
    block: int = Field(
        default=0,
        ge=0,
        description="Number of neighbouring samples that are shuffled as one run, for logs much larger "
        "than memory (4096 is usual); 0: each sample individually.",
    )
    synthetic: SyntheticConfig = Field(default_factory=SyntheticConfig)

    @property
    def sources(self) -> list[str]:
        """`source` as a list."""
        return [self.source] if isinstance(self.source, str) else list(self.source)

    @property
    def is_synthetic(self) -> bool:
        """Whether clicks are generated instead of read."""
        return self.sources == [SYNTHETIC]


DenseRuleName = Literal["adamw", "sgd", "lamb"]
TableRuleName = Literal["sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "split_sgd"]


class TablesConfig(Section):
    """Where tables are placed, and how their rows are communicated."""

    placement: str | dict[str, Any] = Field(
        default="auto",
        description="`auto` (planned for these ranks), `table`, `column`, `row`, `table-row` or `data` (all "
        "tables alike), a YAML file as `stretto plan --write` makes it, or a mapping as "
        "{C1: {split: row, ranks: all}}.",
    )
    place: Literal["device", "cpu", "disk"] | None = Field(
        default=None,
        description="Device memory, host memory with a cache on the device, or files, for all tables that "
        "`placement` leaves open; null: the plan's choice, else `device`.",
    )
    cache: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Fraction of a table's rows that the device caches, if `place` puts the table elsewhere.",
    )
    folder: str | None = Field(
        default=None, description="Folder for `disk`; null: a temporary one in the run's folder."
    )
    device_gib: float | None = Field(
        default=None,
        gt=0,
        description="Device memory per rank that tables and their states may use, for `auto`, GiB; null: "
        "all that is available.",
    )
    host_gib: float | None = Field(
        default=None,
        gt=0,
        description="Host memory per rank that they may use, for `auto`, GiB; null: all that is available.",
    )
    wire: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32",
        description="Type in which pooled vectors and their gradients are sent; float64 with "
        "train.dtype=float64.",
    )
    overlap: bool = Field(
        default=True,
        description="Send the next batch's ids during the current one, and run the bottom network during "
        "the exchange; results are the same.",
    )


class RecommenderLayout(Section):
    """The processes: dense networks are replicated on all of them, tables are placed on them."""

    ranks: int = Field(default=1, gt=0, description="Number of processes.")
    ranks_per_node: int | None = Field(
        default=None, gt=0, description="Ranks of a node, for `table-row` and planning; null: all of them."
    )


class RecommenderBatch(Section):
    """The number of samples per step."""

    global_size: int = Field(
        default=2048,
        gt=0,
        description="Samples per step, over all ranks; if they do not divide evenly, the first ranks take "
        "one more.",
    )


class DenseOptimConfig(Section):
    """The optimiser of the dense networks."""

    name: DenseRuleName = Field(default="adamw", description="The update rule.")
    lr: float = Field(default=1e-3, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999),
        strict=False,
        description="Decay of the means of gradient and squared gradient in adamw and lamb.",
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator in adamw and lamb.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay; biases have none.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum of sgd; 0 for the others.")


class TableOptimConfig(Section):
    """The optimiser of the tables: it updates the rows that a step has looked up, with their gradients
    summed.
    """

    name: TableRuleName = Field(
        default="rowwise_adagrad",
        description="The update rule. `split_sgd`: SGD in float32 on rows that are read as bfloat16.",
    )
    lr: float = Field(default=0.02, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), strict=False, description="Decay of the means in lazy_adam."
    )
    eps: float = Field(
        default=1e-8, gt=0, description="Added to the denominator in adagrad, rowwise_adagrad and lazy_adam."
    )


class RecommenderOptim(Section):
    """The optimisers; both learning rates follow one schedule."""

    dense: DenseOptimConfig = Field(default_factory=DenseOptimConfig)
    tables: TableOptimConfig = Field(default_factory=TableOptimConfig)
    clip: float | None = Field(
        default=None,
        gt=0,
        description="Largest gradient norm over all parameters, tables included; null: no clipping.",
    )
    rate: RateConfig = Field(default_factory=RateConfig)


class RecommenderRunTime(LoopConfig):
    """The training loop and the machine."""

    steps: int = Field(default=500, gt=0, description="Number of updates in the whole run.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of initial values and data order.")
    dtype: Literal["float32", "float64"] = Field(
        default="float32", description="Type of weights and computation."
    )


class RecommenderConfig(JobSection):
    """A recommender's training job. Relative paths start at the working directory."""

    model: RecommenderModel
    data: ClickDataConfig = Field(default_factory=ClickDataConfig)
    tables: TablesConfig = Field(default_factory=TablesConfig)
    layout: RecommenderLayout = Field(default_factory=RecommenderLayout)
    elastic: ElasticRanks = Field(default_factory=ElasticRanks)
    batch: RecommenderBatch = Field(default_factory=RecommenderBatch)
    optim: RecommenderOptim = Field(default_factory=RecommenderOptim)
    train: RecommenderRunTime = Field(default_factory=RecommenderRunTime)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    metrics: ReportConfig = Field(default_factory=ReportConfig)
    run: RunConfig = Field(default_factory=RunConfig)

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
        return Optimiser(**self.optim.dense.model_dump(), clip=None, rate=self.optim.rate.settings())
