"""The `data` section of a recommender: synthetic clicks, a click folder, or files of a click log."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from stretto.errors import StrettoError
from stretto.recommender.config.model import Feature, default_name
from stretto.run.config.section import Section

SYNTHETIC = "synthetic"


class SyntheticConfig(Section):
    """Clicks of `source: synthetic`, drawn as they are read, from a true probability that is known.

    The number of features, their rows, and ids of a sample are the model's where it says them.
    """

    samples: int = Field(
        default=1_000_000,
        gt=0,
        description="Samples of the log, held-out ones included.",
    )
    features: int = Field(
        default=26, gt=0, description="Categorical features, where the model's tables are not given."
    )
    rows: list[int] = Field(
        default=[1000, 100_000],
        description="Ids of the features, evenly from the first to the second number on a logarithmic scale, "
        "where the model's tables are not given.",
    )
    hot: float = Field(
        default=1.0, gt=0, description="Ids of a sample of each feature, where a table says nothing."
    )
    varying: bool = Field(
        default=False,
        description="The number of a sample's ids varies, evenly from 0 to twice their average; otherwise it "
        "is whole and always the same.",
    )
    skew: float = Field(
        default=1.05, ge=0, description="Ids are as popular as 1 / rank^skew, where a table says nothing."
    )
    base_rate: float = Field(default=0.25, gt=0, lt=1, description="Part of the samples that are clicks.")
    strength: float = Field(
        default=1.5,
        ge=0,
        le=10,
        description="Standard deviation of the true logit: 0 is noise alone, above 3 hardly any noise.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the clicks, whatever `train.seed` is.")

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if len(self.rows) != 2 or not 1 <= self.rows[0] <= self.rows[1]:
            raise StrettoError(f"has rows: {self.rows}", hint="two whole numbers, the smaller first")
        return self

    def features_of(self, count: int | None, preset: bool) -> list[Feature]:
        """What the log says of its features.

        Args:
            count: of the model's tables; None: it names none, and rows are drawn too.
            preset: the model's preset knows how many ids a sample has.
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
        description="Of files: ids modulo so many rows in place of a vocabulary, in one pass; null: a "
        "vocabulary.",
    )
    raw: bool = Field(
        default=False,
        description="Of files: ids as they are, in place of a vocabulary, for tables with `ids: hash`.",
    )
    missing_flags: bool = Field(
        default=False,
        description="Of files: beside each number whether it was missing; twice as many for `model.dense`.",
    )
    columns: ColumnsConfig = Field(default_factory=ColumnsConfig)
    on_error: Literal["skip", "fatal"] = Field(
        default="skip", description="Of files: what a line that cannot be read does."
    )
    cache: str | None = Field(
        default=None,
        description="Of files: where the click folder made of them is kept; null: the user's cache folder.",
    )
    valid: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Part of the log that is held out for evaluation, always its end.",
    )
    split: Literal["share", "last-part"] = Field(
        default="share",
        description="What is held out: `valid` of the log, or its `last-part`, the last file or day.",
    )
    shuffle: bool = Field(
        default=True, description="Training samples in an order that the seed gives, another in each epoch."
    )
    block: int = Field(
        default=0,
        ge=0,
        description="Shuffle runs of so many neighbouring samples, for logs that are much larger than memory "
        "(4096 is usual); 0: every sample for itself.",
    )
    synthetic: SyntheticConfig = Field(default_factory=SyntheticConfig)

    @property
    def sources(self) -> list[str]:
        """The names of `source`."""
        return [self.source] if isinstance(self.source, str) else list(self.source)

    @property
    def is_synthetic(self) -> bool:
        """Whether clicks are drawn, not read."""
        return self.sources == [SYNTHETIC]
