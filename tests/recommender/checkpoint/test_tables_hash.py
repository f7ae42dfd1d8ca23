"""Hash tables in checkpoints: every id keeps its row, its states and its counts in any number of shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks
from stretto.engine.checkpoint.save import save
from stretto.errors import StrettoError
from stretto.recommender.checkpoint.load import load_tables
from stretto.recommender.checkpoint.save import tensors_to_save
from stretto.recommender.placement import Placements, TablePlacement, TableSpec, shards_of
from stretto.recommender.stores.store import DeviceStore, GrowingStore, StateSpec
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.pools import LocalShard
from stretto.recommender.tables.splitmix import owner

SPEC = TableSpec(name="C1", rows=60, dim=6, ids="hash", admit=2)
EMPTY = TableSpec(name="C2", rows=60, dim=6, ids="hash")
SPECS = [SPEC, EMPTY]
STATES = {"sum": StateSpec(True, torch.float32), "moment": StateSpec(False, torch.float64)}
STREAM = [
    torch.randint(0, 2**40, (50,), generator=torch.Generator().manual_seed(1))[i % 50 :] for i in range(20)
]


def _placed(split: str, *ranks: int) -> Placements:
    return {name: TablePlacement(split, ranks) for name in ("C1", "C2")}  # pyright: ignore[reportArgumentType]


SPLITS: list[tuple[int, Placements]] = [
    (1, _placed("table", 0)),
    (2, _placed("row", 1, 0)),
    (2, _placed("column", 0, 1)),
    (3, _placed("row", 0, 1, 2)),
]


def _values(ids: Tensor) -> dict[str, Tensor]:
    """What the rows of ids hold, all columns."""
    columns = torch.arange(SPEC.dim)
    return {
        "weight": (ids[:, None] % 1000 + columns).float(),
        "sum": (ids % 77).float(),
        "moment": (ids[:, None] * 3 - columns).double(),
    }


def _held(rank: int, world: int, placements: Placements) -> list[LocalShard]:
    return [
        LocalShard(
            shard,
            GrowingStore(0, shard.width, torch.float32, STATES),
            0,
            HashIds(SPECS[shard.table], compiled=False),
        )
        for shard in shards_of(SPECS, placements, world)
        if shard.rank == rank
    ]


def _cut(values: dict[str, Tensor], one: LocalShard) -> dict[str, Tensor]:
    return {n: v if v.dim() == 1 else v[:, one.shard.start : one.shard.stop] for n, v in values.items()}


def _learn(one: LocalShard) -> None:
    assert one.ids is not None
    assert isinstance(one.store, GrowingStore)
    if one.shard.name == "C2":
        return
    for step, ids in enumerate(STREAM):
        local = ids[owner(ids, one.shard.modulus) == one.shard.residue]
        taken = one.ids.rows(local, step)
        one.store.grow(one.ids.extent)
        one.store.set(taken.fresh_rows, _cut(_values(taken.fresh_ids), one))


def _entries(one: LocalShard) -> dict[int, tuple[int, int, bool]]:
    """Count, step and whether it has a row, of each id."""
    assert one.ids is not None
    state = one.ids.state()
    columns = (state[name].tolist() for name in ("counts", "last_seen", "rows"))
    facts = ((count, last, row >= 0) for count, last, row in zip(*columns, strict=True))
    return dict(zip(state["ids"].tolist(), facts, strict=True))


def _check(one: LocalShard, states: bool = True) -> None:
    fresh = LocalShard(
        one.shard,
        GrowingStore(0, one.shard.width, torch.float32, STATES),
        0,
        HashIds(SPECS[one.shard.table], compiled=False),
    )
    _learn(fresh)
    assert _entries(one) == _entries(fresh)
    assert one.ids is not None
    ids = torch.tensor(sorted(id for id, (_, _, has) in _entries(one).items() if has), dtype=torch.int64)
    if one.shard.name == "C1":
        assert len(ids) > 5
    rows = one.ids.peek(ids)
    for name, value in _cut(_values(ids), one).items():
        held = one.store.weight if name == "weight" else one.store.states[name]
        assert torch.equal(held[rows], value if states or name == "weight" else torch.zeros_like(value)), name


def _save_all(world: int, folder: Path) -> None:
    for number, (ranks, placements) in enumerate(SPLITS):
        if ranks == world:
            held = _held(dist.get_rank() if world > 1 else 0, world, placements)
            for one in held:
                _learn(one)
            save(folder / str(number), 1, tensors_to_save(held, SPECS, box=100), {})


def _check_all(world: int, folder: Path) -> None:
    for saved in range(len(SPLITS)):
        for ranks, placements in SPLITS:
            if ranks == world:
                held = _held(dist.get_rank() if world > 1 else 0, world, placements)
                load_tables(folder / str(saved) / "step-00000001", held, SPECS)
                for one in held:
                    _check(one)


def _save_and_check(world: int, folder: Path) -> None:
    _save_all(world, folder)
    _check_all(world, folder)


def test_any_number_of_shards_reads_any_other(tmp_path: Path) -> None:
    _save_all(1, tmp_path)
    on_ranks(2, _save_all, 2, tmp_path)
    on_ranks(3, _save_and_check, 3, tmp_path)
    _check_all(1, tmp_path)
    on_ranks(2, _check_all, 2, tmp_path)


def test_one_shard_comes_back_row_by_row(tmp_path: Path) -> None:
    _save_all(1, tmp_path)
    one, held = _held(0, 1, SPLITS[0][1])[0], _held(0, 1, SPLITS[0][1])
    _learn(one)
    load_tables(tmp_path / "0" / "step-00000001", held, SPECS)
    assert one.ids is not None
    assert held[0].ids is not None
    for name, value in one.ids.state().items():
        assert torch.equal(held[0].ids.state()[name], value)
    rows = one.ids.extent
    for name, value in one.store.read(0, rows).items():
        assert torch.equal(held[0].store.read(0, rows)[name], value)


def test_weights_alone(tmp_path: Path) -> None:
    _save_all(1, tmp_path)
    held = _held(0, 1, SPLITS[0][1])
    load_tables(tmp_path / "0" / "step-00000001", held, SPECS, states=False)
    for one in held:
        _check(one, states=False)


def test_rows_of_a_number_are_not_a_hash_table(tmp_path: Path) -> None:
    _save_all(1, tmp_path)
    specs = [TableSpec(name="C1", rows=60, dim=6), EMPTY]
    held = _held(0, 1, SPLITS[0][1])
    shard = shards_of(specs, SPLITS[0][1], 1)[0]
    held[0] = LocalShard(shard, DeviceStore(60, 6, torch.float32, STATES), 0)
    with pytest.raises(StrettoError, match="C1 was saved with ids: hash, the model has ids: modulo"):
        load_tables(tmp_path / "0" / "step-00000001", held, specs)
