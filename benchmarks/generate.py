"""Tokens per second of generation: with and without the key/value cache, and on tensor-parallel ranks."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.engine.checkpoint.index import MODEL
from stretto.engine.checkpoint.save import save
from stretto.engine.models import build, initialise
from stretto.engine.models.generate import stream
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.engine.parallel.mesh import Mesh
from stretto.job.shape import ModelShape, shape_to_record
from stretto.layout.layout import Layout
from stretto.run.generate.text import load_model
from stretto.run.launch.local import run_ranks

SHAPE = ModelShape(
    family="llama", layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=8192, sequence=1024
)
PROMPT, TOKENS = 128, 128


def seconds(cache: bool, checkpoint: Path, mesh: Mesh | None = None) -> float:
    """Of `TOKENS` tokens after a prompt of `PROMPT`, greedily."""
    model, group = load_model(checkpoint, mesh=mesh), None if mesh is None else mesh.group("tp")
    ids = torch.randint(0, SHAPE.vocab, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    for _ in stream(model, ids[:, :8], 2, temperature=0.0, group=group):
        pass
    started = time.perf_counter()
    for _ in stream(model, ids, TOKENS, temperature=0.0, cache=cache, group=group):
        pass
    return time.perf_counter() - started


def on_rank(checkpoint: Path) -> float:
    """The same on one of the ranks that share the model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Mesh(Layout(tp=dist.get_world_size()))
    try:
        return seconds(True, checkpoint, mesh)
    finally:
        mesh.close()
        dist.destroy_process_group()


def saved(folder: Path) -> Path:
    """A checkpoint of the model."""
    model = build(SHAPE)
    initialise(model, 0)
    tensors = {
        MODEL + name: (weight.detach(), ShardPlacement.unsharded(name, tuple(weight.shape)))
        for name, weight in model.named_parameters()
    }
    return save(folder, 0, tensors, {"model": shape_to_record(SHAPE)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = saved(Path(folder))
        for cache in (False, True):
            print(f"cache {cache}: {TOKENS / seconds(cache, checkpoint):.1f} tokens/s")
        print(f"cache True, tp=2: {TOKENS / max(run_ranks(2, on_rank, checkpoint)):.1f} tokens/s")
