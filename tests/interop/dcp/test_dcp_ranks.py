"""A checkpoint that two ranks wrote, each its shards, is read as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import titan_models as titan
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ranks import on_ranks
from stretto.engine.checkpoint.read import read_whole
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.dcp.reader import read_dcp_index
from stretto_interop.checkpoints.dcp.titan import DcpImport

# odd numbers of rows: shards of unequal sizes
SHAPE = ModelShape(family="llama", layers=2, hidden=18, heads=3, ffn=25, vocab=31, sequence=12)


def _write(folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = titan.Titan(SHAPE, "old")
    mesh = init_device_mesh("cpu", (2,))
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = titan.adamw(model, lr=1e-2)
    for tokens, targets in titan.batches(SHAPE, 2):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimiser.step()
    dcp.save(titan.state_of(model, optimiser, 2), checkpoint_id=folder)
    weights = {name: _full_tensor(value) for name, value in model.named_parameters()}
    moments = {name: _full_tensor(optimiser.state[p]["exp_avg_sq"]) for name, p in model.named_parameters()}
    return {"weights": weights, "moments": moments}


def _full_tensor(value: Any) -> torch.Tensor:
    assert isinstance(value, DTensor)
    return value.full_tensor().detach().clone()


def test_shards_of_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    plain = on_ranks(2, _write, str(folder))[0]
    index = read_dcp_index(folder)
    files = {chunk.extent.file for tensor in index.tensors.values() for chunk in tensor.chunks}
    assert files == {"__0_0.distcp", "__1_0.distcp"}
    assert len({chunk.sizes for chunk in index.tensors["tok_embeddings.weight"].chunks}) == 2
    with DcpImport(folder, SHAPE) as opened:
        tensors, _ = read_whole(opened.write(tmp_path / "run"), "")
    weights, moments = plain["weights"], plain["moments"]
    for titan_name, name in (
        ("tok_embeddings.weight", "embed.tok.weight"),
        ("norm.weight", "head.norm.weight"),
        ("layers.1.feed_forward.w2.weight", "blocks.1.mlp.down.weight"),
    ):
        assert torch.equal(tensors[f"model.{name}"], weights[titan_name])
        assert torch.equal(tensors[f"optim.exp_avg_sq.{name}"], moments[titan_name])
    both = [weights[f"layers.1.feed_forward.{name}.weight"] for name in ("w1", "w3")]
    assert torch.equal(tensors["model.blocks.1.mlp.gate_up.weight"], torch.cat(both))
