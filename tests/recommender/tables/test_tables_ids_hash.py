"""A map of ids beside a dict with the same rules, in compiled code and in torch operations."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from hash_model import PlainTable
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.recommender.placement import TableSpec
from stretto.recommender.tables.ids.hash import HashIds, kth_smallest, lowest, open_map
from stretto.recommender.tables.ids.id_map import SortedMap
from stretto.recommender.tables.splitmix import owner

WAYS = [
    pytest.param(
        True, marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba"), id="compiled"
    ),
    pytest.param(False, id="sorted"),
]
POOL = [*range(12), 2**31, 2**53 + 1, 2**62, 2**63 - 1]
SPECS = st.builds(
    TableSpec,
    name=st.just("C1"),
    rows=st.integers(1, 8),
    dim=st.just(4),
    ids=st.just("hash"),
    admit=st.integers(1, 3),
    evict=st.sampled_from(["least-frequent", "age"]),
    evict_every=st.integers(1, 4),
    max_age=st.one_of(st.none(), st.integers(1, 5)),
)
STREAMS = st.lists(st.lists(st.sampled_from(POOL), max_size=12), min_size=1, max_size=14)


def tensor(ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def entries(ids: HashIds) -> dict[int, tuple[int, int, bool]]:
    state = ids.state()
    columns = (state[name].tolist() for name in ("ids", "counts", "last_seen", "rows"))
    return {key: (count, last, row >= 0) for key, count, last, row in zip(*columns, strict=True)}


@pytest.mark.parametrize("compiled", WAYS)
@given(SPECS, STREAMS)
def test_as_a_dict_with_the_same_rules(compiled: bool, spec: TableSpec, stream: list[list[int]]) -> None:
    map_, plain = HashIds(spec, compiled=compiled), PlainTable(spec)
    taken = dict[int, int]()  # rows in use, by id
    for step, batch in enumerate(stream):
        map_.evict(step)
        plain.evict(step)
        taken = {key: row for key, row in taken.items() if key in plain.by_id}
        answer = map_.rows(tensor(batch), step)
        assert answer.fresh_ids.tolist() == plain.see(batch, step)
        smallest = iter(row for row in range(100) if row not in taken.values())
        assert answer.fresh_rows.tolist() == [next(smallest) for _ in answer.fresh_rows]
        taken |= dict(zip(answer.fresh_ids.tolist(), answer.fresh_rows.tolist(), strict=True))
        assert answer.rows.tolist() == [taken.get(key, -1) for key in batch]
        assert entries(map_) == plain.entries()
        assert (map_.used, map_.waiting) == (len(taken), len(plain.by_id) - len(taken))
        assert map_.extent > max(taken.values(), default=-1)
        assert map_.peek(tensor(POOL)).tolist() == [taken.get(key, -1) for key in POOL]
        assert entries(map_) == plain.entries()  # looking changes nothing


@given(SPECS, STREAMS, st.randoms(use_true_random=False))
def test_copies_stay_equal_whatever_the_order_of_a_batch(
    spec: TableSpec, stream: list[list[int]], order: Any
) -> None:
    """Column shards of one table: each keeps its own map."""
    table, other = HashIds(spec), HashIds(spec, compiled=False)
    for step, batch in enumerate(stream):
        mixed = order.sample(batch, len(batch))
        assert table.evict(step) == other.evict(step)
        table.rows(tensor(batch), step)
        other.rows(tensor(mixed), step)
        for name, values in table.state().items():
            assert values.tolist() == other.state()[name].tolist()


@pytest.mark.parametrize("compiled", WAYS)
def test_growing_loses_nobody(compiled: bool) -> None:
    spec = TableSpec(name="C1", rows=10**6, dim=4, ids="hash", admit=2)
    map_ = HashIds(spec, compiled=compiled)
    ids = torch.randint(0, 2**62, (20_000,), generator=torch.Generator().manual_seed(0))
    ids = torch.cat((ids, torch.arange(5000)))
    for step, part in enumerate(ids.split(7000)):
        assert not len(map_.rows(part, step).fresh_ids)
    answer = map_.rows(ids, 9)
    assert answer.fresh_ids.tolist() == sorted(ids.tolist())
    assert sorted(answer.rows.tolist()) == list(range(25_000))
    assert (map_.used, map_.waiting, map_.extent) == (25_000, 0, 25_000)
    assert map_.peek(ids).tolist() == answer.rows.tolist()


def test_what_waits_is_forgotten_in_time() -> None:
    spec = TableSpec(name="C1", rows=50, dim=4, ids="hash", admit=2, evict_every=10)
    map_ = HashIds(spec)
    for step in range(200):
        map_.evict(step)
        map_.rows(torch.arange(step * 20, step * 20 + 20), step)
        assert map_.waiting <= 50 + 10 * 20
        assert not map_.used


@pytest.mark.parametrize("compiled", WAYS)
@given(SPECS, STREAMS, st.integers(1, 4), st.integers(1, 4))
def test_saved_shards_into_another_number(
    compiled: bool, spec: TableSpec, stream: list[list[int]], before: int, after: int
) -> None:
    saved = [HashIds(spec, compiled=compiled) for _ in range(before)]
    for step, batch in enumerate(stream):
        ids = tensor(batch)
        for part, map_ in enumerate(saved):
            map_.evict(step)  # each by itself: which entries there are does not matter here
            map_.rows(ids[owner(ids, before) == part], step)
    merged = {key: entry for map_ in saved for key, entry in entries(map_).items()}
    for part in range(after):
        loaded, moved = HashIds(spec, compiled=compiled), dict[int, tuple[int, int]]()
        for number, map_ in enumerate(saved):
            taken = loaded.load_state(map_.state(), part, after)
            pairs = zip(taken.old.tolist(), taken.new.tolist(), strict=True)
            moved |= {new: (number, old) for old, new in pairs}
        local = [key for key in merged if owner(tensor([key]), after).item() == part]
        assert entries(loaded) == {key: merged[key] for key in local}
        for key in local:
            row = int(loaded.peek(tensor([key])))
            from_there = next(i for i, map_ in enumerate(saved) if key in entries(map_))
            if merged[key][2]:
                assert moved[row] == (from_there, int(saved[from_there].peek(tensor([key]))))
            else:
                assert row == -1
        if before == after:  # nothing has moved
            for name, values in saved[part].state().items():
                assert values.tolist() == loaded.state()[name].tolist()


def test_going_on_from_a_checkpoint_gives_out_the_same_rows() -> None:
    spec = TableSpec(name="C1", rows=6, dim=4, ids="hash", evict_every=3)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(0, 30, (40, 8), generator=generator)
    table, other = HashIds(spec), HashIds(spec)
    for step, batch in enumerate(batches):
        if step == 20:
            other = HashIds(spec, compiled=False)
            other.load_state(table.state())
        rows = list[list[int]]()
        for map_ in (table, other):
            map_.evict(step)
            rows.append(map_.rows(batch, step).rows.tolist())
        assert rows[0] == rows[1]


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1)), min_size=1, max_size=40), st.data())
def test_the_kth_smallest(values: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    smallest = kth_smallest(tensor(values), k, None)
    value = sorted(values)[k - 1]
    assert smallest.value == value
    assert smallest.below == sum(other < value for other in values)
    assert smallest.equal == values.count(value)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30), st.data())
def test_the_lowest_by_several_keys(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(pairs)))
    ids = data.draw(st.permutations(range(len(pairs))))
    keys = [tensor(list(column)) for column in zip(*pairs, strict=True)] or [tensor([]), tensor([])]
    gone = lowest([*keys, tensor(ids)], k, None)
    expected = sorted((*pair, key) for pair, key in zip(pairs, ids, strict=True))[:k]
    assert sorted(ids[i] for i in gone.nonzero().flatten().tolist()) == sorted(key for *_, key in expected)


def test_without_numba_ids_are_found_by_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for room in ("ids", "kernels"):
        monkeypatch.delitem(sys.modules, f"stretto.recommender.tables.{room}.compiled", raising=False)
    assert isinstance(open_map(), SortedMap)
    with pytest.raises(ImportError):
        open_map(compiled=True)


def test_what_is_no_id_and_no_state() -> None:
    spec = TableSpec(name="C1", rows=5, dim=4, ids="hash")
    map_ = HashIds(spec)
    with pytest.raises(StrettoError, match="table C1: id -3"):
        map_.rows(tensor([4, -3]), 0)
    with pytest.raises(StrettoError, match="table C1: id -1"):
        map_.peek(tensor([-1]))
    map_.rows(tensor([1, 2]), 0)
    state = map_.state()
    with pytest.raises(StrettoError, match="already"):
        map_.load_state(state)
    for name in state:
        with pytest.raises(StrettoError, match=f"without {name}"):
            HashIds(spec).load_state({other: state[other] for other in state if other != name})
    with pytest.raises(StrettoError, match="occur twice"):
        HashIds(spec).load_state(state | {"rows": tensor([0, 0])})
    with pytest.raises(StrettoError, match="wrong type or length"):
        HashIds(spec).load_state(state | {"rows": tensor([0])})
    with pytest.raises(StrettoError, match="negative"):
        HashIds(spec).load_state(state | {"rows": tensor([0, -7])})
    with pytest.raises(StrettoError, match="no id map"):
        HashIds(TableSpec(name="C2", rows=5, dim=4))
