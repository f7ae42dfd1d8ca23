"""Checkpoints to and from Hugging Face: the same logits there, the same bits back."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stretto.engine.checkpoint.huggingface.exporting import export_huggingface
from stretto.engine.checkpoint.huggingface.importing import import_huggingface
from stretto.engine.checkpoint.read import read_whole, shape_of
from stretto.engine.checkpoint.save import save
from stretto.engine.models.build import build
from stretto.engine.models.weights import initialise
from stretto.engine.parallel.fragment import ShardPlacement, TensorBox
from stretto.errors import StrettoError
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.dcp.titan import export_dcp

SHAPES = {
    "gpt": ModelShape(family="gpt", layers=2, hidden=16, heads=2, vocab=31, sequence=12),
    "llama": ModelShape(
        family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=31, sequence=12
    ),
}


def halves(name: str, tensor: Tensor) -> tuple[Tensor, ShardPlacement]:
    """The tensor in two pieces that lie the other way round locally, as sharded layouts may leave them."""
    half = tensor.shape[0] // 2
    rest, tail = tensor.shape[0] - half, tuple(tensor.shape[1:])
    zeros = (0,) * len(tail)
    pieces = (
        TensorBox(offsets=(0, *zeros), sizes=(half, *tail), local=(rest, *zeros)),
        TensorBox(offsets=(half, *zeros), sizes=(rest, *tail), local=(0, *zeros)),
    )
    return torch.cat([tensor[half:], tensor[:half]]), ShardPlacement(name, tuple(tensor.shape), pieces)


def written(folder: Path, family: str) -> tuple[Path, torch.nn.Module]:
    """A checkpoint with optimiser state, and the model that is in it."""
    shape = SHAPES[family]
    model = build(shape)
    initialise(model, seed=7)
    weights = dict(model.named_parameters())
    state = {f"model.{n}": halves(n, w) for n, w in weights.items()}
    state |= {
        f"optim.exp_avg.{n}": (torch.ones_like(w), ShardPlacement.unsharded(n, tuple(w.shape)))
        for n, w in weights.items()
    }
    return save(folder, 5, state, {"model": asdict(shape)}), model


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("limit", [10**9, 3000])
def test_exports_load_in_transformers_and_import_again(tmp_path: Path, family: str, limit: int) -> None:
    from transformers import AutoModelForCausalLM

    path, model = written(tmp_path / "run", family)
    out = tmp_path / "out"
    files = export_huggingface(path, out, limit)
    assert sorted(files) == sorted(out.iterdir())
    assert len(files) == 2 if limit == 10**9 else len(files) > 4
    transformers_model = AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = torch.arange(24).reshape(2, 12) % 31
    with torch.no_grad():
        logits = model.eval()(tokens)
        assert torch.allclose(transformers_model(tokens).logits, logits, atol=1e-5)
    back = import_huggingface(out, tmp_path / "new")
    assert back == tmp_path / "new" / "checkpoints" / "step-00000000"
    weights, loaded = read_whole(back)
    assert shape_of(back, loaded.meta) == SHAPES[family]
    want = dict(model.named_parameters())
    assert weights.keys() == want.keys()
    assert all(torch.equal(w, want[n]) for n, w in weights.items())


def test_exports_and_imports_do_not_overwrite(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "run", "gpt")
    export_huggingface(path, tmp_path / "out")
    with pytest.raises(StrettoError, match="already holds"):
        export_huggingface(path, tmp_path / "out")
    import_huggingface(tmp_path / "out", tmp_path / "new")
    with pytest.raises(StrettoError, match="already holds checkpoints"):
        import_huggingface(tmp_path / "out", tmp_path / "new")


def test_a_recommender_is_told_what_it_can_be_exported_to(tmp_path: Path) -> None:
    dense = {"model.w": (torch.ones(2), ShardPlacement.unsharded("model.w", (2,)))}
    path = save(tmp_path / "run", 1, dense, {"model": {"family": "dlrm", "tables": {"C3": {}, "C4": {}}}})
    for export in (export_huggingface, export_dcp):
        with pytest.raises(StrettoError, match="is of a recommender, for which other libraries") as caught:
            export(path, tmp_path / "out")
        assert caught.value.hint is not None
        assert f"stretto checkpoint export {path} --table C3 --out C3.npy" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_users_own_model_cannot_be_exported(tmp_path: Path) -> None:
    mine = {"model.w": (torch.ones(2), ShardPlacement.unsharded("model.w", (2,)))}
    for meta in ({}, {"model": {"layers": 2}}, {"model": "gpt"}):
        path = save(tmp_path / "run", 1, mine, meta)
        with pytest.raises(StrettoError, match=r"has no model sizes in its metadata"):
            export_huggingface(path, tmp_path / "out")
    path = save(tmp_path / "run", 2, mine, {"model": {"family": "mine.py:build", "parameters": {"w": [2]}}})
    with pytest.raises(StrettoError, match=r"is of a model from a file, mine\.py:build, which other"):
        export_dcp(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert read_whole(path)[0]["w"].tolist() == [1, 1]
    with pytest.raises(StrettoError, match="has no tensors named optim"):
        read_whole(path, "optim.")


class TestBadFolders:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        path, _ = written(tmp_path / "run", "llama")
        export_huggingface(path, tmp_path / "out", 3000)
        return tmp_path / "out"

    def refused(self, source: Path, match: str) -> None:
        with pytest.raises(StrettoError, match=match):
            import_huggingface(source, source.parent / "new")
        assert not (source.parent / "new").exists()

    def test_no_config(self, source: Path) -> None:
        (source / "config.json").unlink()
        self.refused(source, r"config\.json does not exist")

    @pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
    def test_bad_config(self, source: Path, text: str) -> None:
        (source / "config.json").write_text(text)
        self.refused(source, r"config\.json is not")

    def test_weights_in_files_of_objects(self, source: Path) -> None:
        for file in source.glob("model*"):
            file.rename(file.with_suffix(".bin"))
        self.refused(source, r"model\.safetensors does not exist")

    def test_a_file_outside(self, source: Path) -> None:
        index = source / "model.safetensors.index.json"
        body = json.loads(index.read_text())
        body["weight_map"]["lm_head.weight"] = "../out/config.json"
        index.write_text(json.dumps(body))
        self.refused(source, "names the file")

    def test_a_truncated_file(self, source: Path) -> None:
        file = sorted(source.glob("model-*"))[0]
        file.write_bytes(file.read_bytes()[:-10])
        self.refused(source, "is damaged")

    def test_a_missing_weight(self, source: Path) -> None:
        index = source / "model.safetensors.index.json"
        body = json.loads(index.read_text())
        files = sorted(set(body["weight_map"].values()))
        body["weight_map"] = {k: v for k, v in body["weight_map"].items() if v != files[0]}
        index.write_text(json.dumps(body))
        self.refused(source, "is missing")
