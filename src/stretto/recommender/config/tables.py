"""The tables of a recommender as a config lists them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from stretto.recommender.placement import TableSpec
from stretto.run.config.section import Section


class TableConfig(Section):
    """One categorical feature and its table; its width is the last size of `model.bottom`."""

    name: str | None = Field(
        default=None,
        min_length=1,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$",
        examples=["C1"],
        description="Name of the feature; null: C and its number, from C1 on.",
    )
    rows: int | None = Field(
        default=None,
        gt=0,
        description="Rows of the table; null: those of the data's vocabulary. With `hash` ids, the most "
        "that stay after an eviction.",
    )
    pooling: Literal["sum", "mean"] = Field(
        default="sum", description="How the rows of a sample's ids become one vector."
    )
    hot: float | None = Field(
        default=None, ge=0, description="Ids of a sample, on average, for planning; null: the data's."
    )
    skew: float | None = Field(
        default=None,
        ge=0,
        description="Ids are as popular as 1 / rank^skew, for planning; null: the data's, where it is known.",
    )
    ids: Literal["modulo", "quotient-remainder", "hash"] = Field(
        default="modulo",
        description="How an id becomes a row: id mod rows; a product of a row of id // divisor and one of "
        "id % divisor; or a row of its own for every id.",
    )
    divisor: int | None = Field(
        default=None, gt=0, description="Of `quotient-remainder`; null: about the square root of rows."
    )
    admit: int = Field(
        default=1, gt=0, description="Of `hash`: times that an id is seen until it gets a row."
    )
    evict: Literal["least-frequent", "age"] = Field(
        default="least-frequent", description="Of `hash`: which ids give their rows back."
    )
    evict_every: int = Field(
        default=100, gt=0, description="Of `hash`: steps from one look at what can go to the next."
    )
    max_age: int | None = Field(
        default=None,
        gt=0,
        description="Of `hash` with `age`: steps unseen after which an id goes; null: none.",
    )

    def spec(self, name: str, dim: int, rows: int, hot: float = 1.0, skew: float | None = None) -> TableSpec:
        """The table; `name`, `rows`, `hot` and `skew` count where this says nothing."""
        given: dict[str, Any] = self.model_dump(exclude={"name", "rows", "hot", "skew"})
        return TableSpec(
            name=self.name or name,
            rows=self.rows or rows,
            dim=dim,
            hot=hot if self.hot is None else self.hot,
            skew=skew if self.skew is None else self.skew,
            **given,
        )


def default_name(number: int) -> str:
    """Of feature `number` (from 0)."""
    return f"C{number + 1}"
