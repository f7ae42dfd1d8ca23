"""Placements of tables: shards cover each table once, and what is no placement is refused with its reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.recommender.placement import (
    SPLITS,
    TablePlacement,
    TableSpec,
    check_placements,
    divisor_of,
    physical_tables,
    shards_of,
)


@st.composite
def placed(draw: st.DrawFn) -> tuple[list[TableSpec], dict[str, TablePlacement], int]:
    world = draw(st.integers(1, 5))
    tables, placements = list[TableSpec](), dict[str, TablePlacement]()
    for number in range(draw(st.integers(1, 4))):
        table = TableSpec(name=f"C{number}", rows=draw(st.integers(1, 12)), dim=draw(st.integers(1, 6)))
        split = draw(st.sampled_from(SPLITS))
        if split == "row":
            ranks = draw(st.permutations(range(world)))[: draw(st.integers(1, world))]
        elif split == "column":
            ranks = draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=table.dim))
        else:
            ranks = [draw(st.integers(0, world - 1))] if split == "table" else []
        tables.append(table)
        placements[table.name] = TablePlacement(split, tuple(ranks))
    return tables, placements, world


@given(placed())
def test_shards_cover_every_number_of_a_table_once(
    job: tuple[list[TableSpec], dict[str, TablePlacement], int],
) -> None:
    tables, placements, world = job
    shards = shards_of(tables, placements, world)
    assert [shard.number for shard in shards] == list(range(len(shards)))
    for index, table in enumerate(tables):
        of_table = [shard for shard in shards if shard.table == index]
        given = placements[table.name]
        copied = given.split == "data"
        assert [shard.rank for shard in of_table] == (list(range(world)) if copied else list(given.ranks))
        cells = [
            (shard.residue + row * shard.modulus, column)
            for shard in (of_table[:1] if copied else of_table)
            for row in range(shard.rows)
            for column in range(shard.start, shard.stop)
        ]
        every = [(row, column) for row in range(table.rows) for column in range(table.dim)]
        assert sorted(cells) == every
        if copied:
            assert {(shard.rows, shard.width) for shard in of_table} == {(table.rows, table.dim)}
        if given.split == "column":  # runs of columns in order, none longer than another by more than one
            assert [shard.start for shard in of_table] == sorted(shard.start for shard in of_table)
            assert max(s.width for s in of_table) - min(s.width for s in of_table) <= 1
        if given.split == "row":
            assert max(s.rows for s in of_table) - min(s.rows for s in of_table) <= 1


@pytest.mark.parametrize(
    ("placement", "hashed", "message"),
    [
        (TablePlacement("rows", (0,)), False, "split is 'rows'"),  # pyright: ignore[reportArgumentType]
        (TablePlacement("table", (0,), "ram"), False, "place is 'ram'"),  # pyright: ignore[reportArgumentType]
        (TablePlacement("table", (0,), "cpu", 0.0), False, "cache is 0.0"),
        (TablePlacement("data", (0,)), False, r"data-parallel on ranks \[0\]"),
        (TablePlacement("data"), True, "data-parallel with ids: hash"),
        (TablePlacement("table"), False, r"ranks are \[\]"),
        (TablePlacement("table", (2,)), False, r"ranks are \[2\]"),
        (TablePlacement("table", (0, 1)), False, "split table on 2 ranks"),
        (TablePlacement("row", (1, 1)), False, "name a rank twice"),
        (TablePlacement("column", (1, 1)), True, "name a rank twice"),
        (TablePlacement("column", (0, 1, 0, 1, 0)), False, "5 parts of 4 columns"),
    ],
)
def test_what_is_no_placement(placement: TablePlacement, hashed: bool, message: str) -> None:
    table = TableSpec(name="C1", rows=9, dim=4, ids="hash" if hashed else "modulo")
    with pytest.raises(StrettoError, match=message) as caught:
        check_placements([table], {"C1": placement}, 2)
    assert "table C1" in str(caught.value)


def test_tables_and_placements_have_the_same_names() -> None:
    tables = [TableSpec(name="C1", rows=9, dim=4), TableSpec(name="C2", rows=9, dim=4)]
    placement = TablePlacement("table", (0,))
    with pytest.raises(StrettoError, match="C2 has no placement"):
        check_placements(tables, {"C1": placement}, 1)
    with pytest.raises(StrettoError, match="C3, which is not a table"):
        check_placements(tables, {"C1": placement, "C2": placement, "C3": placement}, 1)


@pytest.mark.parametrize("field", ["rows", "dim", "admit", "evict_every"])
def test_sizes_below_one(field: str) -> None:
    with pytest.raises(StrettoError, match=f"table C1: {field} is 0"):
        TableSpec(**({"name": "C1", "rows": 5, "dim": 4} | {field: 0}))


def test_a_product_is_stored_as_two_tables() -> None:
    product = TableSpec(name="C2", rows=1000, dim=8, ids="quotient-remainder")
    assert divisor_of(product) == 32
    stored = physical_tables(
        [TableSpec(name="C1", rows=5, dim=8), product, TableSpec(name="C3", rows=7, dim=8, ids="hash")]
    )
    assert [(table.name, table.rows) for table in stored] == [
        ("C1", 5),
        ("C2.quotient", 32),
        ("C2.remainder", 32),
        ("C3", 7),
    ]
    assert divisor_of(TableSpec(name="C2", rows=1000, dim=8, ids="quotient-remainder", divisor=7)) == 7
