"""The placement table: what it says of tables and ranks adds up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.recommender.placement import TablePlacement, TableSpec
from stretto.recommender.view import RankTables, bytes_text, placement_text, ranks_of, ranks_text

TABLES = [
    TableSpec(name="C1", rows=1_000_000, dim=64, hot=3),
    TableSpec(name="tiny", rows=50, dim=64),
    TableSpec(name="C3", rows=400_000_000, dim=64, hot=10),
    TableSpec(name="users", rows=100_000, dim=64, ids="hash"),
]
PLACEMENTS = {
    "C1": TablePlacement("row", (0, 1, 2)),
    "tiny": TablePlacement("data"),
    "C3": TablePlacement("column", (2, 0), "disk", 0.01),
    "users": TablePlacement("table", (1,)),
}
EXPECTED = """\
table         rows  dim  split        ranks  place               bytes  share
C1       1,000,000   64  row          all    device            244 MiB  20.0%
tiny            50   64  data         all    device           12.5 KiB   6.7%
C3     400,000,000   64  column       2 0    disk, 1% cached  95.4 GiB  66.7%
users      100,000   64  table, hash  1      device           24.4 MiB   6.7%
4 tables, 401,100,050 rows, 95.6 GiB

rank  load                       device memory
0     ████████████████████ 100%  ████████████████████ 570 MiB, disk 47.7 GiB
1     ███████·············  37%  ████················ 106 MiB
2     ████████████████████ 100%  ████████████████████ 570 MiB, disk 47.7 GiB
the busiest rank has 1.27 times the mean load"""


def test_a_line_a_table_and_a_line_a_rank() -> None:
    assert placement_text(TABLES, PLACEMENTS, 3) == EXPECTED


def test_costs_that_are_given_are_shown() -> None:
    text = placement_text(
        TABLES,
        PLACEMENTS,
        3,
        bytes_of={"C1": 2**30, "tiny": 1, "C3": 2**40, "users": 3},
        load_of={"C1": 1.0, "tiny": 0.0, "C3": 2.0, "users": 1.0},
        ranks=[RankTables(1e-3, {"device": 10 * 2**30, "cpu": 2**30}), RankTables(4e-3), RankTables(0.0)],
        room={"device": 40 * 2**30, "cpu": 2**37},
    )
    lines = text.splitlines()
    ranks = lines[8:]
    assert "1 GiB  25.0%" in lines[1]
    assert "1 TiB  50.0%" in lines[3]
    assert ranks == [
        "0     █████···············  25%  █████··············· 10 GiB of 40 GiB, cpu 1 GiB of 128 GiB",
        "1     ████████████████████ 100%  ···················· 0 B of 40 GiB",
        "2     ····················   0%  ···················· 0 B of 40 GiB",
        "the busiest rank has 2.40 times the mean load",
    ]


def test_of_many_tables_and_ranks_the_heaviest_are_shown() -> None:
    tables = [TableSpec(name=f"C{i}", rows=100, dim=8, hot=1 + i % 7) for i in range(60)]
    placements = {t.name: TablePlacement("table", (i % 50,)) for i, t in enumerate(tables)}
    lines = placement_text(tables, placements, 50, limit=8).splitlines()
    assert [line.split()[0] for line in lines[1:9]] == [f"C{i}" for i in range(6, 60, 7)]
    assert lines[9].startswith("and 52 more with less load: ")
    assert lines[10] == "60 tables, 6,000 rows, 188 KiB"
    assert sum(line[:1].isdigit() and "█" in line for line in lines) == 8
    assert lines[-2].startswith("and 42 less loaded, down to ")


@given(
    st.lists(st.sampled_from(["table", "column", "row", "data"]), min_size=1, max_size=6), st.integers(1, 4)
)
def test_what_ranks_have_adds_up(splits: list[str], world: int) -> None:
    tables = [TableSpec(name=f"C{i}", rows=7 + i, dim=8) for i in range(len(splits))]
    everywhere = tuple(range(world))
    ranks = {"table": (world - 1,), "column": everywhere, "row": everywhere, "data": ()}
    placements = {
        table.name: TablePlacement(split, ranks[split])  # pyright: ignore[reportArgumentType]
        for table, split in zip(tables, splits, strict=True)
    }
    sizes, loads = {t.name: 3.0 * t.rows for t in tables}, {t.name: 5.0 + t.rows for t in tables}
    shown = ranks_of(tables, placements, world, sizes, loads)
    assert sum(rank.load for rank in shown) == pytest.approx(sum(loads.values()))
    copies = {t.name: world if split == "data" else 1 for t, split in zip(tables, splits, strict=True)}
    on_devices = sum(rank.bytes.get("device", 0.0) for rank in shown)
    assert on_devices == pytest.approx(sum(sizes[name] * n for name, n in copies.items()))
    assert placement_text(tables, placements, world)


def test_ranks_and_bytes_in_words() -> None:
    assert ranks_text([0, 1, 2], 3) == ranks_text([], 5) == "all"
    assert ranks_text([2, 1, 0], 3) == "2 1 0"
    assert ranks_text([0, 5, 6, 7], 16) == "0 5-7"
    assert [bytes_text(n) for n in (0, 999, 1000, 421 * 2**30, 1e6 * 2**40)] == [
        "0 B",
        "999 B",
        "0.977 KiB",
        "421 GiB",
        "1,000,000 TiB",
    ]
