"""Embedding tables and their placement: table-wise, column-wise, row-wise, or replicated (data-parallel)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from stretto.errors import StrettoError
from stretto.job.field import Field

Pooling = Literal["sum", "mean"]
Ids = Literal["modulo", "quotient-remainder", "hash"]
Split = Literal["table", "column", "row", "data"]
Place = Literal["device", "cpu", "disk"]
Evict = Literal["least-frequent", "age"]

SPLITS: tuple[Split, ...] = ("table", "column", "row", "data")
PLACES: tuple[Place, ...] = ("device", "cpu", "disk")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How the ids of a table are mapped to rows, and the rows combined."""

    pooling: Annotated[
        Pooling, Field("How the rows of a sample's ids become one vector; without ids it is zeros.")
    ] = "sum"
    ids: Annotated[
        Ids,
        Field(
            "How an id becomes a row: id mod rows; the product of row id // divisor of one table and row id "
            "% divisor of another (Shi et al. 2020, arXiv 1909.02107), after id mod rows; or a row of its "
            "own for every id."
        ),
    ] = "modulo"
    divisor: Annotated[
        int | None, Field("Of `quotient-remainder`; null: about the square root of rows.", gt=0)
    ] = None
    admit: Annotated[
        int,
        Field(
            "Of `hash`: number of occurrences after which an id gets a row; until then its vector is zeros.",
            gt=0,
        ),
    ] = 1
    evict: Annotated[Evict, Field("Of `hash`: which ids are evicted.")] = "least-frequent"
    evict_every: Annotated[int, Field("Of `hash`: steps between evictions.", gt=0)] = 100
    max_age: Annotated[
        int | None,
        Field(
            "Of `hash` with `age`: steps without an occurrence after which an id is evicted; null: none.",
            gt=0,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TableSpec(TableOptions):
    """The embedding table of one categorical feature, unsharded.

    Attributes:
        rows, dim: its size. With `hash` ids, `rows` is the maximum after an eviction.
        hot: average pooling factor (ids per sample). For planning only.
        skew: popularity of ids is proportional to 1 / rank^skew; None if unknown. For planning only.
    """

    name: str
    rows: int
    dim: int
    hot: float = 1.0
    skew: float | None = None

    def __post_init__(self) -> None:
        for field, minimum in (("rows", 1), ("dim", 1), ("hot", 0), ("admit", 1), ("evict_every", 1)):
            if getattr(self, field) < minimum:
                raise StrettoError(
                    f"table {self.name}: {field} is {getattr(self, field)}", hint=f"at least {minimum}"
                )


@dataclass(frozen=True)
class TablePlacement:
    """The placement of a table.

    split: `table`, all of it on one rank; `column`, an equal range of columns on each of `ranks`; `row`, row
        r on `ranks[r % len(ranks)]` (all ranks, or those of a node); `data`, a copy on every rank.
    ranks: rank of each shard, in order; empty for `data`.
    place: device memory; host memory (`cpu`) or files (`disk`), both with a cache on the device.
    cache: fraction of the rows that is cached on the device, for `cpu` and `disk`.
    """

    split: Split
    ranks: tuple[int, ...] = ()
    place: Place = "device"
    cache: float = 0.1


Placements = Mapping[str, TablePlacement]


@dataclass(frozen=True, kw_only=True)
class TableShard:
    """The shard of a table on one rank: rows residue, residue + modulus, ... and columns [start, stop).

    Local row l is row residue + l modulus of the table. `number` is the shard's index among all shards of the
    job, the same on every rank; `part` is its index among the shards of its table.
    """

    number: int
    table: int
    name: str
    part: int
    rank: int
    residue: int
    modulus: int
    start: int
    stop: int
    rows: int
    place: Place
    cache: float

    @property
    def width(self) -> int:
        return self.stop - self.start


def shards_of(tables: Sequence[TableSpec], placements: Placements, world: int) -> list[TableShard]:
    """Return all shards of a job, table by table and, within a table, in the order of `ranks`.

    A data-parallel table has a shard on every rank.

    Raises:
        StrettoError: a table has no placement, or a placement does not fit its table or the ranks.
    """
    check_placements(tables, placements, world)
    shards = list[TableShard]()
    for index, table in enumerate(tables):
        placement = placements[table.name]
        ranks = tuple(range(world)) if placement.split == "data" else placement.ranks
        for part, rank in enumerate(ranks):
            residue = 0
            modulus = 1
            start = 0
            stop = table.dim
            if placement.split == "row":
                residue, modulus = part, len(ranks)
            elif placement.split == "column":
                start, stop = (table.dim * (part + i) // len(ranks) for i in (0, 1))
            rows = max(0, -(-(table.rows - residue) // modulus))
            shards.append(
                TableShard(
                    number=len(shards),
                    table=index,
                    name=table.name,
                    part=part,
                    rank=rank,
                    residue=residue,
                    modulus=modulus,
                    start=start,
                    stop=stop,
                    rows=rows,
                    place=placement.place,
                    cache=placement.cache,
                )
            )
    return shards


def check_placements(tables: Sequence[TableSpec], placements: Placements, world: int) -> None:
    """Raise StrettoError, with the name of the table, for an invalid placement."""
    names = [table.name for table in tables]
    unknown = sorted(set(placements) - set(names))
    if unknown:
        raise StrettoError(
            f"placement of {unknown[0]}, which is not a table", hint=f"tables: {', '.join(names[:8])}"
        )
    for table in tables:
        if table.name not in placements:
            raise StrettoError(f"table {table.name} has no placement", hint="give it one, or `tables: auto`")
        _check_placement(table, placements[table.name], world)


def _check_placement(table: TableSpec, placement: TablePlacement, world: int) -> None:
    def wrong(problem: str, hint: str) -> StrettoError:
        return StrettoError(f"placement of table {table.name}: {problem}", hint=hint)

    if placement.split not in SPLITS:
        raise wrong(f"split is {placement.split!r}", ", ".join(SPLITS))
    if placement.place not in PLACES:
        raise wrong(f"place is {placement.place!r}", ", ".join(PLACES))
    if not 0 < placement.cache <= 1:
        raise wrong(f"cache is {placement.cache}", "a share of the rows, above 0 and at most 1")
    if placement.split == "data":
        if placement.ranks:
            raise wrong(
                f"data-parallel on ranks {list(placement.ranks)}", "leave ranks out: every rank has a copy"
            )
        if table.ids == "hash":
            raise wrong("data-parallel with ids: hash, whose rows one owner assigns", "split: table")
        return
    if not placement.ranks or not all(0 <= rank < world for rank in placement.ranks):
        raise wrong(f"ranks are {list(placement.ranks)}", f"one or more of 0 to {world - 1}")
    if placement.split == "table" and len(placement.ranks) != 1:
        raise wrong(f"split table on {len(placement.ranks)} ranks", "split: row or column for several ranks")
    if (placement.split == "row" or table.ids == "hash") and len(set(placement.ranks)) < len(placement.ranks):
        raise wrong(f"ranks {list(placement.ranks)} name a rank twice", "each rank once")
    if placement.split == "column" and len(placement.ranks) > table.dim:
        raise wrong(f"{len(placement.ranks)} parts of {table.dim} columns", f"at most {table.dim} ranks")


def physical_tables(tables: Sequence[TableSpec]) -> list[TableSpec]:
    """Return the stored tables: a quotient-remainder feature has `NAME.quotient` and `NAME.remainder`."""
    stored = list[TableSpec]()
    for table in tables:
        if table.ids != "quotient-remainder":
            stored.append(table)
            continue
        divisor = divisor_of(table)
        for name, rows in (("quotient", -(-table.rows // divisor)), ("remainder", divisor)):
            stored.append(
                TableSpec(
                    name=f"{table.name}.{name}",
                    rows=rows,
                    dim=table.dim,
                    pooling=table.pooling,
                    hot=table.hot,
                    skew=table.skew,
                )
            )
    return stored


def divisor_of(table: TableSpec) -> int:
    """Rows of the remainder table."""
    return table.divisor or max(1, round(table.rows**0.5))
