"""The `model` section of a recommender: a preset, or a family with its sizes and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from stretto.errors import StrettoError
from stretto.job.field import Field, declared
from stretto.recommender.placement import TableOptions, TableSpec
from stretto.recommender.shape import DlrmShape, Interaction, TableShape, dlrm_preset


@dataclass(frozen=True, kw_only=True)
class TableConfig(TableOptions):
    """One categorical feature and its table; its width is the last size of `model.bottom`."""

    name: Annotated[
        str | None,
        Field(
            "Name of the feature; null: C and its number, from C1 on.",
            filled=True,
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$",
            examples=("C1",),
        ),
    ] = None
    rows: Annotated[
        int | None,
        Field(
            "Rows of the table; null: those of the data's vocabulary. With `hash` ids, the most that stay "
            "after an eviction.",
            gt=0,
        ),
    ] = None
    hot: Annotated[
        float | None, Field("Ids per sample, on average, for planning; null: the data's.", ge=0)
    ] = None
    skew: Annotated[
        float | None,
        Field(
            "Ids are as popular as 1 / rank^skew, for planning; null: the data's, where it is known.", ge=0
        ),
    ] = None

    def spec(self, name: str, dim: int, rows: int, hot: float = 1.0, skew: float | None = None) -> TableSpec:
        """The table; `name`, `rows`, `hot` and `skew` are used for fields that the config does not set."""
        return TableSpec(
            name=self.name or name,
            rows=self.rows or rows,
            dim=dim,
            hot=hot if self.hot is None else self.hot,
            skew=skew if self.skew is None else self.skew,
            **{option: getattr(self, option) for option in declared(TableOptions)},
        )


def default_name(number: int) -> str:
    """Default name of feature `number` (from 0)."""
    return f"C{number + 1}"


@dataclass(frozen=True)
class Feature:
    """A categorical feature of the data.

    rows: size of its vocabulary; None: unbounded, or set by the model.
    hot: average number of ids per sample, or None if unknown.
    skew: popularity of ids is proportional to 1 / rank^skew; None if unknown.
    """

    name: str
    rows: int | None
    hot: float | None = None
    skew: float | None = None


@dataclass(frozen=True, kw_only=True)
class RecommenderModel:
    """`preset`, or `family: dlrm` with `bottom` and `top`; fields set beyond a preset override it."""

    preset: Annotated[
        str | None, Field("Name of a known recommender, such as `dlrm-dcnv2` or `dlrm-kaggle`.")
    ] = None
    family: Annotated[
        Literal["dlrm"] | None,
        Field(
            "`dlrm`: a bottom network for numbers, a table for each categorical feature, their interaction, "
            "a top network."
        ),
    ] = None
    interaction: Annotated[
        Literal["dot", "dcn"] | None,
        Field(
            "`dot`: products of all pairs of vectors; `dcn`: cross layers of low rank (DCN-V2); null: the "
            "preset's, else `dot`."
        ),
    ] = None
    dense: Annotated[int | None, Field("Numbers per sample; null: the preset's, else 13.", gt=0)] = None
    bottom: Annotated[
        list[int] | None,
        Field("Outputs of the bottom network's layers; the last is the width of all tables."),
    ] = None
    top: Annotated[
        list[int] | None, Field("Outputs of the top network's layers; the last is 1, the logit.")
    ] = None
    cross_layers: Annotated[int | None, Field("Of `dcn`: layers; null: the preset's, else 3.", gt=0)] = None
    cross_rank: Annotated[
        int | None, Field("Of `dcn`: rank of their weights; null: the preset's, else 512.", gt=0)
    ] = None
    rows: Annotated[
        list[int] | None,
        Field("Rows of each table, named C1, C2, ...; null: those of `tables`, the preset or the data."),
    ] = None
    tables: Annotated[
        list[TableConfig] | None, Field("One mapping for each table, in place of `rows`; null: see `rows`.")
    ] = None
    max_rows: Annotated[
        int | None,
        Field(
            "Most rows of any table; larger tables are cut, and ids are mapped by modulo; null: no limit.",
            gt=0,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.preset is None:
            missing = [name for name in ("family", "bottom", "top") if getattr(self, name) is None]
            if missing:
                raise StrettoError(
                    f"has no {', no '.join(missing)}", hint="give a preset, or family, bottom and top"
                )
        else:
            dlrm_preset(self.preset)
        if self.rows is not None and self.tables is not None:
            raise StrettoError(
                "has rows and tables", hint="rows: [...] or tables: [{rows: ...}, ...], not both"
            )
        for name in ("bottom", "top", "rows"):
            sizes: list[int] | None = getattr(self, name)
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise StrettoError(f"has {name}: {sizes}", hint="a list of whole numbers of 1 or more")
        if self.tables is not None and not self.tables:
            raise StrettoError("has tables: []", hint="one mapping or more, or null")
        if self._top[-1] != 1:
            raise StrettoError(
                f"has a top network that ends with {self._top[-1]}",
                hint=f"its last layer is the logit: top: {[*self._top[:-1], 1]}",
            )
        names = [table.name or default_name(i) for i, table in enumerate(self.tables or ())]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise StrettoError(f"has two tables of the name {twice}", hint="names tell features apart")
        self.shape([TableSpec(name="C1", rows=1, dim=self.dim)])

    @property
    def _preset_shape(self) -> DlrmShape | None:
        return None if self.preset is None else dlrm_preset(self.preset)

    @property
    def _top(self) -> tuple[int, ...]:
        model = self._preset_shape
        return tuple(self.top or (model.top if model is not None else ()))

    @property
    def _bottom(self) -> tuple[int, ...]:
        model = self._preset_shape
        return tuple(self.bottom or (model.bottom if model is not None else ()))

    @property
    def dim(self) -> int:
        """Width of every table."""
        return self._bottom[-1]

    @property
    def numbers(self) -> int:
        """Number of dense features per sample."""
        model = self._preset_shape
        return self.dense or (13 if model is None else model.dense)

    def features(self) -> int | None:
        """Number of categorical features; None if only the data determines it."""
        if self.rows is not None or self.tables is not None:
            return len(self.rows or self.tables or ())
        model = self._preset_shape
        return None if model is None else len(model.tables)

    def table_specs(self, data: Sequence[Feature] | None = None) -> list[TableSpec]:
        """The tables, in the order of the features.

        Args:
            data: the features of the data; None: not known yet.

        Raises:
            StrettoError: the data has a different number of features, or neither the model nor the data sets
                a table's rows.
        """
        count = self.features()
        if count is None and data is None:
            raise StrettoError(
                "model.rows is null: the tables' rows are known only with the data",
                hint="give model.rows, model.tables or a preset",
            )
        if data is not None and count is not None and count != len(data):
            raise StrettoError(
                f"model has {count} tables, the data {len(data)} categorical features",
                hint="one table a feature, in the data's order; or model.rows=null for the data's own",
            )
        number = len(data) if data is not None else count or 0
        return [self._spec(i, None if data is None else data[i]) for i in range(number)]

    def _spec(self, number: int, data: Feature | None) -> TableSpec:
        model = self._preset_shape
        preset = model.tables[number] if model is not None and self.rows is None else None
        if self.tables is not None:
            table, preset = self.tables[number], None
        else:
            table = TableConfig(rows=self.rows[number] if self.rows is not None else preset and preset.rows)
        rows = table.rows or (data.rows if data is not None else None)
        if rows is None:
            field = f"model.tables[{number}].rows" if self.tables is not None else "model.rows"
            if data is None:
                raise StrettoError(f"{field} is null: it is known only with the data", hint="give rows")
            raise StrettoError(
                f"{field} is null, and the ids of {data.name} have no bound in the data",
                hint="give its rows in model.tables, perhaps with ids: hash",
            )
        hot = (data.hot if data is not None else None) or (float(preset.pooling) if preset else 1.0)
        name = table.name or (data.name if data is not None else default_name(number))
        spec = table.spec(name, self.dim, rows, hot, None if data is None else data.skew)
        return spec if self.max_rows is None else replace(spec, rows=min(spec.rows, self.max_rows))

    def shape(self, tables: Sequence[TableSpec]) -> DlrmShape:
        """The sizes of the model with these tables.

        Raises:
            StrettoError: the sizes do not fit together.
        """
        model = self._preset_shape
        interaction: Interaction = self.interaction or ("dot" if model is None else model.interaction)
        sizes: dict[str, Any] = {}
        for name, default in (("cross_layers", 3), ("cross_rank", 512)):
            value: int | None = getattr(self, name)
            if interaction == "dot" and value is not None:
                raise StrettoError(
                    f"has {name}: {value} and interaction: dot", hint=f"{name}: null, or interaction: dcn"
                )
            if interaction == "dcn":
                sizes[name] = value or (getattr(model, name) if model is not None else 0) or default
        vectors = tuple(TableShape(table.rows, table.dim, table.hot) for table in tables)
        return DlrmShape(
            tables=vectors,
            dense=self.numbers,
            bottom=self._bottom,
            top=self._top,
            interaction=interaction,
            **sizes,
        )
