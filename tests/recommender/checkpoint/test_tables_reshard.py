"""Tables saved under one placement are read bit by bit under any other, states included."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ranks import on_ranks
from stretto.engine.checkpoint.load import load
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.recommender.checkpoint.load import load_tables
from stretto.recommender.checkpoint.names import TABLES
from stretto.recommender.checkpoint.save import tensors_to_save
from stretto.recommender.placement import Placements, TablePlacement, TableSpec, shards_of
from stretto.recommender.stores.store import DeviceStore, StateSpec
from stretto.recommender.tables.pools import LocalShard

SPECS = [
    TableSpec(name="C1", rows=29, dim=6),
    TableSpec(name="C2.quotient", rows=7, dim=6),
    TableSpec(name="C3", rows=2, dim=6),  # fewer rows than ranks
    TableSpec(name="C4", rows=40, dim=6),
]
STATES = {
    "sum": StateSpec(True, torch.float32),
    "momentum": StateSpec(False, torch.float64),
    "updates": StateSpec(True, torch.int64),
    "low": StateSpec(False, torch.int16),  # of split SGD, a part of the weight
}


def _table(*ranks: int) -> TablePlacement:
    return TablePlacement("table", ranks)


def _row(*ranks: int) -> TablePlacement:
    return TablePlacement("row", ranks)


def _column(*ranks: int) -> TablePlacement:
    return TablePlacement("column", ranks)


DATA = TablePlacement("data")
ONE_RANK = {spec.name: _table(0) for spec in SPECS}
MIXES: list[tuple[int, Placements]] = [
    (1, ONE_RANK),
    (2, {"C1": _column(0, 1), "C2.quotient": DATA, "C3": _table(1), "C4": _row(1, 0)}),
    (3, {"C1": _row(2, 0, 1), "C2.quotient": _column(0, 1, 0, 2), "C3": _row(0, 1, 2), "C4": _column(2, 0)}),
]


def _plain(table: int) -> dict[str, Tensor]:
    """Values of a whole table, and of its states."""
    spec, generator = SPECS[table], torch.Generator().manual_seed(table)
    tensors = {"weight": torch.randn(spec.rows, spec.dim, generator=generator)}
    for name, state in STATES.items():
        shape = (spec.rows,) if state.per_row else (spec.rows, spec.dim)
        tensors[name] = (torch.randn(shape, generator=generator) * 1000).to(state.dtype)
    return tensors


def _new_shards(
    rank: int, world: int, placements: Placements, states: dict[str, StateSpec]
) -> list[LocalShard]:
    """This rank's shards, those of one width in one store."""
    local = [shard for shard in shards_of(SPECS, placements, world) if shard.rank == rank]
    shards = list[LocalShard]()
    for width in sorted({shard.width for shard in local}):
        alike = [shard for shard in local if shard.width == width]
        store = DeviceStore(sum(shard.rows for shard in alike), width, torch.float32, states)
        base = 0
        for shard in alike:
            shards.append(LocalShard(shard, store, base))
            base += shard.rows
    return shards


def _expected(local: LocalShard) -> dict[str, Tensor]:
    """What a shard has of the plain table."""
    shard = local.shard
    rows = slice(shard.residue, None, shard.modulus)
    return {
        name: t[rows] if t.dim() == 1 else t[rows, shard.start : shard.stop]
        for name, t in _plain(shard.table).items()
    }


def _save(rank: int, world: int, placements: Placements, folder: Path) -> None:
    shards = _new_shards(rank, world, placements, STATES)
    for local in shards:
        local.write(0, _expected(local))
    dense = {"model.bottom": (torch.arange(3.0), ShardPlacement.unsharded("model.bottom", (3,)))}
    save(folder, 5, {**dense, **tensors_to_save(shards, SPECS, box=100)}, {})


def _check(rank: int, world: int, placements: Placements, path: Path) -> None:
    shards = _new_shards(rank, world, placements, STATES)
    load_tables(path, shards, SPECS, chunk=150)
    for local in shards:
        for name, value in local.read(0, local.shard.rows).items():
            assert torch.equal(value, _expected(local)[name]), (local.shard, name)
    dense = torch.zeros(3)
    load(
        path,
        {"model.bottom": (dense, ShardPlacement.unsharded("model.bottom", (3,)))},
        ignore=[TABLES],
        check=False,
    )
    assert dense.tolist() == [0, 1, 2]


def _save_all(world: int, folder: Path) -> None:
    rank = torch.distributed.get_rank()
    for number, (ranks, placements) in enumerate(MIXES):
        if ranks == world:
            _save(rank, world, placements, folder / str(number))


def _check_all(world: int, folder: Path) -> None:
    rank = torch.distributed.get_rank()
    for saved in range(len(MIXES)):
        for ranks, placements in MIXES:
            if ranks == world:
                _check(rank, world, placements, folder / str(saved) / "step-00000005")


def _save_and_check(world: int, folder: Path) -> None:
    _save_all(world, folder)
    _check_all(world, folder)


def test_every_placement_reads_every_other(tmp_path: Path) -> None:
    _save(0, 1, ONE_RANK, tmp_path / "0")
    on_ranks(2, _save_all, 2, tmp_path)
    on_ranks(3, _save_and_check, 3, tmp_path)
    on_ranks(2, _check_all, 2, tmp_path)
    for saved in range(len(MIXES)):
        _check(0, 1, ONE_RANK, tmp_path / str(saved) / "step-00000005")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_rows_and_columns_out_of_any_others(data: st.DataObject) -> None:
    """One process has all parts of a table under two splits."""
    spec = TableSpec(name="C1", rows=data.draw(st.integers(1, 40)), dim=data.draw(st.integers(1, 7)))
    plain = {"weight": torch.randn(spec.rows, spec.dim), "sum": torch.randn(spec.rows)}

    def new_shards() -> list[LocalShard]:
        parts = data.draw(st.integers(1, 12))
        row = data.draw(st.booleans())
        split = _row(*range(parts)) if row else _column(*[0] * min(parts, spec.dim))
        sums = {"sum": StateSpec(True, torch.float32)}
        return [
            LocalShard(shard, DeviceStore(shard.rows, shard.width, torch.float32, sums), 0)
            for shard in shards_of([spec], {"C1": split}, parts)
        ]

    def part_of(local: LocalShard, name: str) -> Tensor:
        rows = plain[name][local.shard.residue :: local.shard.modulus]
        return rows if rows.dim() == 1 else rows[:, local.shard.start : local.shard.stop]

    saved, read = new_shards(), new_shards()
    for local in saved:
        local.write(0, {name: part_of(local, name) for name in plain})
    with TemporaryDirectory() as folder:
        path = save(folder, 1, tensors_to_save(saved, [spec], box=data.draw(st.integers(1, 300))), {})
        load_tables(path, read, [spec], chunk=data.draw(st.integers(1, 300)))
    for local in read:
        for name, value in local.read(0, local.shard.rows).items():
            assert torch.equal(value, part_of(local, name)), (local.shard, name)


def test_nothing_is_read_before_it_is_written_and_little_at_a_time() -> None:
    read = list[int]()

    class Counted(DeviceStore):
        def read(self, start: int, stop: int, names: Collection[str] | None = None) -> dict[str, Tensor]:
            read.append(stop - start)
            return super().read(start, stop, names)

    shard = shards_of(SPECS, ONE_RANK, 1)[0]
    tensors = tensors_to_save([LocalShard(shard, Counted(29, 6, torch.float32, STATES), 0)], SPECS, box=200)
    assert not read
    for tensor in tensors.values():
        for sizes, get in tensor.boxes.values():
            assert tuple(get().shape) == sizes
    assert sum(read) == 29 * len(tensors)
    assert max(read) == 200 // (6 * 4 + 4 + 6 * 8 + 8)  # rows with all their states
