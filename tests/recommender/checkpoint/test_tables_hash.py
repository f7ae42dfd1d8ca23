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


def _new_shards(rank: int, world: int, placements: Placements) -> list[LocalShard]:
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


def _cut(values: dict[str, Tensor], local: LocalShard) -> dict[str, Tensor]:
    return {n: v if v.dim() == 1 else v[:, local.shard.start : local.shard.stop] for n, v in values.items()}


def _learn(local_shard: LocalShard) -> None:
    assert local_shard.ids is not None
    assert isinstance(local_shard.store, GrowingStore)
    if local_shard.shard.name == "C2":
        return
    for step, ids in enumerate(STREAM):
        local = ids[owner(ids, local_shard.shard.modulus) == local_shard.shard.residue]
        taken = local_shard.ids.rows(local, step)
        local_shard.store.grow(local_shard.ids.extent)
        local_shard.store.set(taken.fresh_rows, _cut(_values(taken.fresh_ids), local_shard))


def _entries(local: LocalShard) -> dict[int, tuple[int, int, bool]]:
    """Count, step and whether it has a row, of each id."""
    assert local.ids is not None
    state = local.ids.state()
    columns = (state[name].tolist() for name in ("counts", "last_seen", "rows"))
    counts = ((count, last, row >= 0) for count, last, row in zip(*columns, strict=True))
    return dict(zip(state["ids"].tolist(), counts, strict=True))


def _check(local: LocalShard, states: bool = True) -> None:
    fresh = LocalShard(
        local.shard,
        GrowingStore(0, local.shard.width, torch.float32, STATES),
        0,
        HashIds(SPECS[local.shard.table], compiled=False),
    )
    _learn(fresh)
    assert _entries(local) == _entries(fresh)
    assert local.ids is not None
    ids = torch.tensor(sorted(id for id, (_, _, has) in _entries(local).items() if has), dtype=torch.int64)
    if local.shard.name == "C1":
        assert len(ids) > 5
    rows = local.ids.peek(ids)
    for name, value in _cut(_values(ids), local).items():
        stored = local.store.weight if name == "weight" else local.store.states[name]
        assert torch.equal(stored[rows], value if states or name == "weight" else torch.zeros_like(value)), (
            name
        )


def _save_all(world: int, folder: Path) -> None:
    for number, (ranks, placements) in enumerate(SPLITS):
        if ranks == world:
            shards = _new_shards(dist.get_rank() if world > 1 else 0, world, placements)
            for local in shards:
                _learn(local)
            save(folder / str(number), 1, tensors_to_save(shards, SPECS, box=100), {})


def _check_all(world: int, folder: Path) -> None:
    for saved in range(len(SPLITS)):
        for ranks, placements in SPLITS:
            if ranks == world:
                shards = _new_shards(dist.get_rank() if world > 1 else 0, world, placements)
                load_tables(folder / str(saved) / "step-00000001", shards, SPECS)
                for local in shards:
                    _check(local)


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
    original, shards = _new_shards(0, 1, SPLITS[0][1])[0], _new_shards(0, 1, SPLITS[0][1])
    _learn(original)
    load_tables(tmp_path / "0" / "step-00000001", shards, SPECS)
    assert original.ids is not None
    assert shards[0].ids is not None
    for name, value in original.ids.state().items():
        assert torch.equal(shards[0].ids.state()[name], value)
    rows = original.ids.extent
    for name, value in original.store.read(0, rows).items():
        assert torch.equal(shards[0].store.read(0, rows)[name], value)


def test_weights_alone(tmp_path: Path) -> None:
    _save_all(1, tmp_path)
    shards = _new_shards(0, 1, SPLITS[0][1])
    load_tables(tmp_path / "0" / "step-00000001", shards, SPECS, states=False)
    for local in shards:
        _check(local, states=False)


def test_rows_of_a_number_are_not_a_hash_table(tmp_path: Path) -> None:
    _save_all(1, tmp_path)
    specs = [TableSpec(name="C1", rows=60, dim=6), EMPTY]
    shards = _new_shards(0, 1, SPLITS[0][1])
    shard = shards_of(specs, SPLITS[0][1], 1)[0]
    shards[0] = LocalShard(shard, DeviceStore(60, 6, torch.float32, STATES), 0)
    with pytest.raises(StrettoError, match="C1 was saved with ids: hash, the model has ids: modulo"):
        load_tables(tmp_path / "0" / "step-00000001", shards, specs)
