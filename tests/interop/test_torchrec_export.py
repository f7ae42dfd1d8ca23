"""A recommender as TorchRec's state dict: by the formulas of its models, and by its classes if installed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recommender_job import config_of
from stretto import Scorer
from stretto.cli.main import run
from stretto.recommender.tables.jagged import Jagged
from stretto.recommender.train.job import RECOMMENDER
from stretto.run.train.launch import run_job

TABLES = "model.tables=[{rows: 40, hot: 2, pooling: mean}, {rows: 60, hot: 3}, {rows: 30}]"
CROSSED = ("model.interaction=dcn", "model.cross_layers=2", "model.cross_rank=3")
INTERACTIONS = {"DLRM": (), "DLRM_DCN": CROSSED}


def forward(state: dict[str, Tensor], numbers: Tensor, pooled: Tensor) -> Tensor:
    """Logits as torchrec/models/dlrm.py computes them."""

    def mlp(prefix: str, x: Tensor) -> Tensor:
        layer = 0
        while (name := f"{prefix}._mlp.{layer}._linear") + ".weight" in state:
            x = torch.relu(x @ state[f"{name}.weight"].T + state[f"{name}.bias"])
            layer += 1
        return x

    x = mlp("dense_arch.model", numbers)
    vectors = torch.cat([x.unsqueeze(1), pooled], 1)
    kernels = [name for name in state if "W_kernels" in name]
    if kernels:
        first = crossed = vectors.flatten(1)
        for layer in range(len(kernels)):
            v, w, b = (state[f"inter_arch.crossnet.{k}.{layer}"] for k in ("V_kernels", "W_kernels", "bias"))
            crossed = first * (crossed @ v.T @ w.T + b) + crossed
    else:
        row, column = torch.triu_indices(vectors.shape[1], vectors.shape[1], offset=1)
        crossed = torch.cat([x, torch.bmm(vectors, vectors.transpose(1, 2))[:, row, column]], 1)
    top = mlp("over_arch.model.0", crossed)
    return (top @ state["over_arch.model.1.weight"].T + state["over_arch.model.1.bias"]).squeeze(1)


@pytest.mark.parametrize("model", INTERACTIONS)
def test_torchrec_computes_what_the_scorer_does(
    tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_job(RECOMMENDER, config_of(tmp_path, TABLES, *INTERACTIONS[model], "train.dtype=float32"), quiet=True)
    trained, out = tmp_path / "runs/tiny", tmp_path / "out"
    assert run(["checkpoint", "export", str(trained), "--format", "torchrec", "--out", str(out)]) == 0
    assert "no optimiser states" in capfd.readouterr().out
    state, arguments = load_file(out / "model.safetensors"), json.loads((out / "torchrec.json").read_text())
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (3, 17), generator=generator)
    ids = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
    numbers = torch.randn(17, 13, generator=generator)
    pooled = list[Tensor]()
    for table, bags, counts in zip(
        arguments["tables"], ids.split(lengths.sum(1).tolist()), lengths, strict=True
    ):
        weight = state[f"sparse_arch.embedding_bag_collection.embedding_bags.{table['name']}.weight"]
        assert weight.shape == (table["num_embeddings"], table["embedding_dim"])
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        mode = table["pooling"].lower()
        pooled.append(
            torch.nn.functional.embedding_bag(bags, weight, offsets, mode=mode, include_last_offset=True)
        )
    wanted = Scorer.load(trained)(numbers, Jagged(ids, lengths))
    assert arguments["model"] == model
    assert wanted.std() > 1e-3
    logits = forward(state, numbers, torch.stack(pooled, 1))
    torch.testing.assert_close(logits.sigmoid(), wanted, rtol=1e-5, atol=1e-6)
    try:
        torchrec = importlib.import_module("torchrec")
    except ImportError:
        return
    torch.testing.assert_close(_torchrec(torchrec, arguments, state, numbers, ids, lengths), logits)


def _torchrec(
    torchrec: Any,
    arguments: dict[str, Any],
    state: dict[str, Tensor],
    numbers: Tensor,
    ids: Tensor,
    lengths: Tensor,
) -> Tensor:
    """Logits of TorchRec's own model, loaded strictly."""
    pooling = torchrec.PoolingType
    configs = [
        torchrec.EmbeddingBagConfig(**{**table, "pooling": pooling[table["pooling"]]})
        for table in arguments["tables"]
    ]
    model = getattr(importlib.import_module("torchrec.models.dlrm"), arguments["model"])(
        embedding_bag_collection=torchrec.EmbeddingBagCollection(tables=configs), **arguments["arguments"]
    )
    model.load_state_dict(state)
    names = [table["feature_names"][0] for table in arguments["tables"]]
    keyed = torchrec.KeyedJaggedTensor(keys=names, values=ids, lengths=lengths.flatten())
    with torch.no_grad():
        return model(numbers, keyed).squeeze(1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.tables=[{rows: 40}, {rows: 60, ids: hash}]"], "ids: hash"),
        (["model.top=[1]"], "model.top"),
    ],
)
def test_what_torchrec_cannot_express_is_refused_by_field(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    run_job(RECOMMENDER, config_of(tmp_path, *overrides, "layout.ranks=1", "train.steps=2"), quiet=True)
    trained, out = tmp_path / "runs/tiny", tmp_path / "out"
    assert run(["checkpoint", "export", str(trained), "--format", "torchrec", "--out", str(out)]) == 2
    assert message in capfd.readouterr().err
    assert not (out / "model.safetensors").exists()
