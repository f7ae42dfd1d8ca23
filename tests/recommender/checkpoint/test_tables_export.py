"""Single tables of a checkpoint as files of numpy and safetensors; what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stretto.cli.main import run
from stretto.engine.checkpoint.files import DamageError
from stretto.engine.checkpoint.index import SavedPiece, SavedTensor
from stretto.engine.checkpoint.save import save
from stretto.errors import StrettoError
from stretto.recommender.checkpoint import export
from stretto.recommender.checkpoint.load import load_tables
from stretto.recommender.checkpoint.names import saved_tables
from stretto.recommender.checkpoint.save import tensors_to_save
from stretto.recommender.optim.rules import join_halves, split_halves
from stretto.recommender.placement import TablePlacement, TableSpec, shards_of
from stretto.recommender.stores.store import DeviceStore, GrowingStore, StateSpec
from stretto.recommender.tables.ids.hash import HashIds
from stretto.recommender.tables.pools import LocalShard

SPECS = [TableSpec(name="C1", rows=40, dim=6), TableSpec(name="C2", rows=9, dim=6)]
HASHED = TableSpec(name="H", rows=100, dim=6, ids="hash", admit=2)
# one process may hold all parts of a table
SPLIT = {"C1": TablePlacement("row", (0, 1, 2)), "C2": TablePlacement("column", (0, 0, 0, 0))}
ADAGRAD = {"sum": StateSpec(True, torch.float32)}


def _new_shards(
    specs: list[TableSpec] = SPECS,
    dtype: torch.dtype = torch.float32,
    states: Mapping[str, StateSpec] | None = None,
) -> list[LocalShard]:
    return [
        LocalShard(shard, DeviceStore(shard.rows, shard.width, dtype, states or {}), 0)
        for shard in shards_of(specs, {name: SPLIT[name] for name in (spec.name for spec in specs)}, 3)
    ]


def _plain(spec: TableSpec) -> Tensor:
    return torch.randn(spec.rows, spec.dim, generator=torch.Generator().manual_seed(spec.rows))


def _cut(values: Tensor, local: LocalShard) -> Tensor:
    rows = values[local.shard.residue :: local.shard.modulus]
    return rows if rows.dim() == 1 else rows[:, local.shard.start : local.shard.stop]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint with row-wise Adagrad, its tables split."""
    shards = _new_shards(states=ADAGRAD)
    for local in shards:
        spec = SPECS[local.shard.table]
        local.write(
            0, {"weight": _cut(_plain(spec), local), "sum": _cut(torch.arange(float(spec.rows)), local)}
        )
    return save(tmp_path / "run" / "checkpoints", 3, tensors_to_save(shards, SPECS, box=64), {})


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_table_is_written_in_order(
    path: Path, tmp_path: Path, spec: TableSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "CHUNK", 1000)
    exported = export.export_table(path, spec.name, tmp_path / "rows.npy")
    assert (exported.shape, exported.dtype) == ((spec.rows, 6), "float32")
    assert np.array_equal(np.load(exported.path, allow_pickle=False), _plain(spec).numpy())
    assert np.load(exported.path, mmap_mode="r").flags["C_CONTIGUOUS"]
    export.export_table(path, spec.name, tmp_path / "rows.safetensors")
    assert torch.equal(load_file(tmp_path / "rows.safetensors")[spec.name], _plain(spec))
    export.export_table(path, spec.name, tmp_path / "sum.npy", "sum")
    assert np.array_equal(np.load(tmp_path / "sum.npy"), np.arange(spec.rows, dtype=np.float32))


def test_two_halves_are_one_number_and_become_weights_of_any_rule(tmp_path: Path) -> None:
    shards = _new_shards(dtype=torch.bfloat16, states={"low": StateSpec(False, torch.int16)})
    for local in shards:
        weight, low = split_halves(_cut(_plain(SPECS[local.shard.table]), local))
        local.write(0, {"weight": weight, "low": low})
    path = save(tmp_path, 1, tensors_to_save(shards, SPECS), {})
    local = export.export_table(path, "C1", tmp_path / "rows.npy")
    assert np.array_equal(np.load(local.path), _plain(SPECS[0]).numpy())
    with pytest.raises(StrettoError, match=r"has the states low, this one wants the states sum"):
        load_tables(path, _new_shards(states=ADAGRAD), SPECS)
    plain = _new_shards(states=ADAGRAD)
    for local in plain:
        local.write(0, {"sum": torch.ones(local.shard.rows)})
    load_tables(path, plain, SPECS, states=False)
    for local in plain:
        assert torch.equal(local.store.weight, _cut(_plain(SPECS[local.shard.table]), local))
        assert not local.store.states["sum"].any()


def test_weights_become_two_halves(path: Path) -> None:
    shards = _new_shards(dtype=torch.bfloat16, states={"low": StateSpec(False, torch.int16)})

    def encode(values: Tensor) -> dict[str, Tensor]:
        weight, low = split_halves(values)
        return {"weight": weight, "low": low}

    load_tables(path, shards, SPECS, states=False, encode=encode)
    for local in shards:
        rows = local.read(0, local.shard.rows)
        assert torch.equal(
            join_halves(rows["weight"], rows["low"]), _cut(_plain(SPECS[local.shard.table]), local)
        )


def test_floats_convert_and_integers_do_not(path: Path) -> None:
    shards = _new_shards(dtype=torch.float64, states={"sum": StateSpec(True, torch.float64)})
    load_tables(path, shards, SPECS)
    assert torch.equal(shards[0].store.weight, _cut(_plain(SPECS[0]), shards[0]).double())
    with pytest.raises(StrettoError, match="sum of table C1 is float32, this one wants int64"):
        load_tables(path, _new_shards(states={"sum": StateSpec(True, torch.int64)}), SPECS)


@pytest.mark.parametrize(
    ("shards", "specs", "message"),
    [
        (_new_shards(), SPECS, "table C1 has the states sum, this one wants no states"),
        (
            _new_shards(states={"sum": StateSpec(False, torch.float32)}),
            SPECS,
            "state sum of table C1 is one number a row, this one wants one an element",
        ),
        (
            _new_shards(states=ADAGRAD),
            [TableSpec(name="C1", rows=41, dim=6), SPECS[1]],
            "C1 has 40 rows of 6, the model wants 41 rows",
        ),
        (
            _new_shards(states=ADAGRAD),
            [TableSpec(name="C1", rows=40, dim=6, ids="hash"), SPECS[1]],
            "saved with a fixed number of rows",
        ),
        (_new_shards(SPECS[:1], states=ADAGRAD), SPECS[:1], "it has table C2, which the model does not have"),
    ],
)
def test_another_model_is_refused(
    path: Path, shards: list[LocalShard], specs: list[TableSpec], message: str
) -> None:
    before = [local.store.weight.clone() for local in shards]
    with pytest.raises(StrettoError, match=message):
        load_tables(path, shards, specs)
    assert all(torch.equal(local.store.weight, was) for local, was in zip(shards, before, strict=True))


def test_a_table_that_is_not_there(path: Path) -> None:
    specs = [TableSpec(name="C11", rows=40, dim=6), SPECS[1]]
    shard = shards_of(specs, {"C11": TablePlacement("table", (0,)), "C2": SPLIT["C2"]}, 1)[0]
    with pytest.raises(StrettoError, match="it has no table C11") as caught:
        load_tables(path, [LocalShard(shard, DeviceStore(40, 6, torch.float32, ADAGRAD), 0)], specs)
    assert "C1" in str(caught.value.hint)


def test_damage_is_told(path: Path) -> None:
    file = path / "shard-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StrettoError, match=r"is damaged: file shard-00000\.safetensors: crc32"):
        load_tables(path, _new_shards(states=ADAGRAD), SPECS)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"tables.C1.0of2.weight": (5, 2)}, "missing or differs in some of 2 parts"),
        ({"tables.C1.0of1.sum": (5,)}, "1 splits, with sum"),
        ({"tables.C1.0of1.weight": (5, 2), "tables.C1.0of2.weight": (5, 2)}, "in 2 splits"),
        (
            {"tables.C1.0of2.weight": (5, 2), "tables.C1.1of2.weight": (3, 2)},
            "but the table has 8 rows of 2",
        ),
        ({"tables.C1.0of1.weight": (5, 2), "tables.C1.0of1.sum": (4,)}, "but the table has 5 rows of 2"),
        ({"tables.C1.0of1.weight": (5,), "tables.C1.0of1.sum": ()}, "shape"),
        ({"tables.C1.0of1.weight": ()}, "no rows"),
        ({"tables.C1.hash-1of2.weight": (5, 2)}, "missing in some of 2 shards"),
    ],
)
def test_tables_that_are_not_whole_are_damage(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    pieces = {name: (SavedPiece("a", (0,) * len(shape), shape),) for name, shape in shapes.items()}
    with pytest.raises(DamageError, match=message):
        saved_tables({name: SavedTensor("float32", shape, pieces[name]) for name, shape in shapes.items()})


def test_rows_of_a_hash_table_come_with_their_ids(tmp_path: Path) -> None:
    shards = list[LocalShard]()
    values = {7: 1.0, 1 << 40: 2.0, 12345: 3.0, 99: 4.0}
    for shard in shards_of([HASHED], {"H": TablePlacement("row", (0, 1))}, 2):
        grown = LocalShard(
            shard, GrowingStore(0, 6, torch.float32, ADAGRAD), 0, HashIds(HASHED, compiled=False)
        )
        assert grown.ids is not None
        assert isinstance(grown.store, GrowingStore)
        local = torch.tensor([[7, 12345, 55], [1 << 40, 99, 56]][shard.residue])
        taken = grown.ids.rows(torch.cat([local[:2], local]), 0)  # the last is seen once: it waits
        grown.store.grow(grown.ids.extent)
        rows = torch.tensor([values[id] for id in taken.fresh_ids.tolist()])
        grown.store.set(taken.fresh_rows, {"weight": rows[:, None].expand(-1, 6)})
        shards.append(grown)
    path = save(tmp_path, 1, tensors_to_save(shards, [HASHED]), {})
    grown = export.export_table(path, "H", tmp_path / "H.safetensors")
    got = load_file(grown.path)
    assert grown.shape == (4, 6)
    assert dict(zip(got["ids"].tolist(), got["H"][:, 5].tolist(), strict=True)) == values
    with pytest.raises(StrettoError, match="H is a hash table"):
        export.export_table(path, "H", tmp_path / "H.npy")
    assert not (tmp_path / "H.npy").exists()


def _answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(["checkpoint", "export", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "C1.npy"
    answer = _answer(capsys, path.parent.parent, "--table", "C1", "--out", out)
    assert answer["files"] == [str(out)]
    assert (answer["shape"], answer["dtype"], answer["state"]) == ([40, 6], "float32", None)
    assert np.array_equal(np.load(out), _plain(SPECS[0]).numpy())
    for wrong, text in (
        (["--table", "C1", "--out", out], "exists already"),
        (["--table", "C9", "--out", tmp_path / "x.npy"], "has no table C9"),
        (["--table", "C1", "--state", "v", "--out", tmp_path / "x.npy"], "has no state v"),
        (["--table", "C1", "--out", tmp_path / "x.csv"], "neither .npy nor .safetensors"),
        (["--state", "sum", "--out", tmp_path / "x.npy"], "--state without --table"),
        (["--table", "C1", "--out", tmp_path / "not" / "x.npy"], "cannot write"),
    ):
        assert run(["checkpoint", "export", str(path), *map(str, wrong)]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "x.npy").exists()
