"""Placements as YAML: read as they were written, and refused with the table, the field and the line."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.recommender.placement import PLACES, SPLITS, TablePlacement, TableSpec, check_placements
from stretto.recommender.planner.placement_file import placements_to_yaml, read_placements
from stretto.recommender.planner.uniform import UNIFORM, column_parts, traffic, uniform

WORLD, NODE = 12, 5


@st.composite
def placement(draw: st.DrawFn) -> TablePlacement:
    split = draw(st.sampled_from(SPLITS))
    ranks = draw(st.lists(st.integers(0, WORLD - 1), min_size=1, max_size=WORLD, unique=True))
    holders = draw(
        st.sampled_from([ranks, list(range(WORLD)), list(range(5, 10)), [10, 11], [11, 10], [7, 8, 9, 5, 6]])
    )
    place = draw(st.sampled_from(PLACES))
    return TablePlacement(split, () if split == "data" else tuple(holders), place, draw(st.floats(1e-6, 1)))


@given(
    st.dictionaries(
        st.one_of(st.text(min_size=1, max_size=60), st.sampled_from(["no", "C1", "a.b"])), placement()
    ),
    st.sampled_from([None, NODE]),
)
def test_a_file_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, given: dict[str, TablePlacement], node: int | None
):
    text = placements_to_yaml(given, WORLD, node, about="made here\nby a test")
    path = tmp_path_factory.mktemp("placements") / "p.yaml"
    path.write_text(text, encoding="utf-8")
    if given:
        assert read_placements(path, WORLD, node) == given
        assert read_placements(yaml.safe_load(text), WORLD, node) == given


def test_ranks_in_words():
    text = """
a: {split: row, ranks: all}
b: {split: row, ranks: node 2}
c: {split: table, ranks: 3, place: disk, cache: 1}
d: {split: data}
e: {split: data, ranks: all}
f: {split: row, ranks: all from 10}
g: {split: row, ranks: node 1 from 8}
"""
    placements = read_placements(yaml.safe_load(text), WORLD, NODE)
    assert placements["a"].ranks == tuple(range(WORLD))
    assert placements["b"].ranks == (10, 11)
    assert placements["c"] == TablePlacement("table", (3,), "disk", 1.0)
    assert placements["f"].ranks == (10, 11, *range(10))
    assert placements["g"].ranks == (8, 9, 5, 6, 7)
    assert "f: {split: row, ranks: all from 10}" in placements_to_yaml(placements, WORLD, NODE)
    assert placements["d"] == placements["e"] == TablePlacement("data")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{split: rows, ranks: all}", "split is 'rows'"),
        ("{ranks: all}", "split is missing"),
        ("{split: row}", "ranks is missing"),
        ("{split: row, ranks: [0, 12]}", "ranks has 12"),
        ("{split: row, ranks: node 3}", "ranks is 'node 3'"),
        ("{split: row, ranks: node 1 from 3}", "ranks is 'node 1 from 3'"),
        ("{split: row, ranks: [a]}", "ranks is ['a']"),
        ("{split: row, ranks: []}", "ranks is []"),
        ("{split: data, ranks: [1]}", "every rank copies"),
        ("{split: table, ranks: [1], place: gpu}", "place is 'gpu'"),
        ("{split: table, ranks: [1], cache: 0}", "cache is 0"),
        ("{split: table, ranks: [1], where: cpu}", "where"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, line: str, message: str):
    path = tmp_path / "p.yaml"
    path.write_text(f"C1: {{split: data}}\nC2: {line}\n", encoding="utf-8")
    with pytest.raises(StrettoError) as of_file:
        read_placements(path, WORLD, NODE)
    assert message in of_file.value.message
    assert ":2:" in of_file.value.message
    assert "C2" in of_file.value.message
    with pytest.raises(StrettoError) as of_mapping:
        read_placements({"C2": yaml.safe_load(line)}, WORLD, NODE)
    assert message in of_mapping.value.message
    assert "table C2" in of_mapping.value.message
    with pytest.raises(StrettoError, match="cannot read"):
        read_placements(tmp_path / "none.yaml", WORLD)


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.sampled_from([1, 3, 16, 64]), st.floats(0, 40)), min_size=1),
    st.integers(1, 9),
    st.sampled_from([None, 2, 4]),
    st.sampled_from(UNIFORM),
)
def test_all_tables_alike(sizes: list[tuple[int, int, float]], world: int, node: int | None, split: str):
    tables = [
        TableSpec(name=f"t{i}", rows=rows, dim=dim, hot=hot) for i, (rows, dim, hot) in enumerate(sizes)
    ]
    placements = uniform(tables=tables, split=split, world=world, ranks_per_node=node, place="cpu", cache=0.5)
    check_placements(tables, placements, world)
    assert list(placements) == [table.name for table in tables]
    load = [0.0] * world
    for table in tables:
        placement = placements[table.name]
        assert (placement.place, placement.cache) == ("cpu", 0.5)
        for rank in placement.ranks:
            load[rank] += traffic(table) / len(placement.ranks)
        if split == "column":
            assert table.dim % len(placement.ranks) == 0
        if split == "table-row":
            assert len({rank // (node or world) for rank in placement.ranks}) == 1
    if split == "table":  # what any list gives (Graham 1966), so the sorted one too
        longest = max(traffic(table) for table in tables)
        assert max(load) <= sum(load) / world + (1 - 1 / world) * longest + 1e-6


def test_column_parts():
    assert [column_parts(64, k) for k in (1, 2, 3, 8, 40)] == [1, 2, 2, 8, 16]
    assert column_parts(3, 3) == 1


def test_an_unknown_split_names_the_nearest():
    with pytest.raises(StrettoError) as error:
        uniform([TableSpec(name="a", rows=4, dim=4)], "colum", 2)
    assert error.value.hint == "did you mean column?"
