"""Shards of hash tables on real ranks: together the one table of a dict, rows' values included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hash_model import PlainTable

from ranks import on_ranks
from stretto.recommender.checkpoint import load as restoring
from stretto.recommender.checkpoint.load import restore
from stretto.recommender.placement import TableSpec
from stretto.recommender.stores.store import GrowingStore, StateSpec
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.splitmix import owner

WORLD = 3
STATES = {"seen": StateSpec(True, torch.float64)}


def spec_of(seed: int) -> TableSpec:
    lot = random.Random(seed)
    return TableSpec(
        name="C1",
        rows=lot.randint(1, 12),
        dim=2,
        ids="hash",
        admit=lot.randint(1, 3),
        evict="age" if lot.random() < 0.5 else "least-frequent",
        evict_every=lot.randint(1, 4),
        max_age=lot.choice([None, 2, 4]),
    )


def stream_of(seed: int) -> list[list[int]]:
    lot = random.Random(-seed)
    pool = [*range(15), *(2**62 + i for i in range(15))]
    return [lot.choices(pool, k=lot.randint(0, 25)) for _ in range(14)]


def new_store() -> GrowingStore:
    return GrowingStore(0, 2, torch.float64, STATES)


def step_of(map_: HashIds, store: GrowingStore, ids: torch.Tensor, step: int) -> None:
    """What an engine does, in short: each occurrence of an id with a row adds step + 1."""
    answer = map_.rows(ids, step)
    store.grow(map_.extent)
    begin = answer.fresh_ids.double()[:, None] * torch.tensor([1.0, -1.0])
    store.set(answer.fresh_rows, {"weight": begin})
    rows = answer.rows[answer.rows >= 0]
    add = torch.full((len(rows), 2), step + 1.0, dtype=torch.float64)
    store.weight.index_add_(0, rows, add)
    store.states["seen"].index_add_(0, rows, add[:, 0])


def rank_of_streams(parts: int, streams: int) -> list[Any]:
    """Each rank below `parts` has a shard; the others only take part in what is decided."""
    rank, group = dist.get_rank(), dist.group.WORLD
    streams_held = list[Any]()
    for seed in range(streams):
        map_, store = HashIds(spec_of(seed)), new_store()
        for step, batch in enumerate(stream_of(seed)):
            map_.evict(step, group)
            ids = torch.tensor(batch, dtype=torch.int64)
            if rank < parts:
                step_of(map_, store, ids[owner(ids, parts) == rank], step)
        streams_held.append((map_.state(), store.read(0, map_.extent)))
    return streams_held


def plain_after(seed: int) -> dict[int, tuple[float, float] | None]:
    """Id to its row's first value and state; None: no row."""
    plain = PlainTable(spec_of(seed))
    for step, batch in enumerate(stream_of(seed)):
        plain.evict(step)
        plain.see(batch, step)
        for key in batch:
            entry = plain.by_id[key]
            if entry.value is not None:
                entry.value += step + 1
    return {
        key: None if e.value is None else (float(key) + e.value, e.value) for key, e in plain.by_id.items()
    }


def values_of(state: dict[str, torch.Tensor], rows: dict[str, torch.Tensor]) -> dict[int, Any]:
    pairs = zip(state["ids"].tolist(), state["rows"].tolist(), strict=True)
    return {
        key: None if row < 0 else (rows["weight"][row, 0].item(), rows["seen"][row].item())
        for key, row in pairs
    }


@pytest.mark.parametrize(
    ("parts", "streams"), [(3, 6), *(pytest.param(n, 24, marks=pytest.mark.slow) for n in (2, 3))]
)
def test_shards_on_ranks_are_one_table_and_load_as_any_number(
    parts: int, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "CHUNK", 3)
    ranks = on_ranks(WORLD, rank_of_streams, parts, streams)
    for seed in range(streams):
        shards = [rank[seed] for rank in ranks]
        expected = plain_after(seed)
        # 2^62 plus small sums is exact to a thousand: the state's column has them exactly
        assert {key: v for shard in shards for key, v in values_of(*shard).items()} == expected
        for after in (1, 2):
            loaded = dict[int, Any]()
            for part in range(after):
                map_, store = HashIds(spec_of(seed)), new_store()
                for state, rows in shards:
                    restore(
                        ids=map_,
                        store=store,
                        state=state,
                        read=lambda start, stop, rows=rows: {name: v[start:stop] for name, v in rows.items()},
                        part=part,
                        parts=after,
                    )
                loaded |= values_of(map_.state(), store.read(0, map_.extent))
            assert loaded == expected


def test_a_growing_store_keeps_its_rows() -> None:
    store = new_store()
    for rows in (1, 5, 1024, 1025, 5000):
        before = store.rows
        store.grow(rows)
        fresh = torch.arange(before, rows)
        assert not store.read(before, rows)["weight"].any()
        store.set(fresh, {"weight": fresh[:, None].double().expand(-1, 2), "seen": fresh.double()})
        assert store.rows == rows <= store.capacity < max(2 * rows, 1025)
    stored = store.read(0, 5000)
    assert stored["weight"][:, 1].tolist() == stored["seen"].tolist() == list(range(5000))
    store.set(torch.tensor([7]), {"weight": torch.ones(1, 2)})  # another id's row: its state is gone
    assert store.read(7, 8)["seen"].tolist() == [0.0]
    store.grow(10)
    assert store.rows == 5000
