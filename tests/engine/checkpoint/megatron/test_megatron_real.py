"""Megatron-core's own checkpoints, where it is installed: it writes what is imported, and loads an export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from installed import installed
from ranks import on_ranks
from stretto.engine.checkpoint.megatron.exporting import export_megatron
from stretto.engine.checkpoint.megatron.importing import MegatronImport
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.models.build import build
from stretto.run.frameworks.megatron.saved import saved_arguments
from stretto.spec.shape import ModelShape

pytestmark = pytest.mark.skipif(not installed("megatron-core"), reason="megatron-core is not installed")
SHAPE = ModelShape(family="llama", layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=32, sequence=12)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, SHAPE.vocab, (2, 11), generator=torch.Generator().manual_seed(seed))


def first_run(folder: Path) -> Tensor:
    """Three steps, a checkpoint, one more step and its checkpoint; the logits after three."""
    from real_megatron import Run

    run = Run(SHAPE)
    for seed in range(3):
        run.step(tokens(seed))
    run.save(folder, 3)
    logits = run.logits(tokens(9))
    run.step(tokens(3))
    run.save(folder, 4)
    return logits


def second_run(place: Path, folder: Path) -> None:
    """The same model goes on from an iteration."""
    from real_megatron import Run

    run = Run(SHAPE)
    run.load(place)
    run.save(folder, 3)
    run.step(tokens(3))
    run.save(folder, 4)


def imported(place: Path, run: Path) -> Path:
    with MegatronImport(place, SHAPE) as opened:
        return opened.write(run)


@pytest.mark.parametrize("ranks", [1, 2])
def test_there_and_back(tmp_path: Path, ranks: int) -> None:
    logits = torch.cat(on_ranks(ranks, first_run, tmp_path / "there"), dim=-1)
    path = imported(tmp_path / "there" / "iter_0000003", tmp_path / "run")
    model = build(SHAPE)
    model.load_state_dict(read_whole(path)[0])
    assert torch.allclose(model(tokens(9)), logits, atol=1e-5)
    export_megatron(path, tmp_path / "out", saved_arguments)
    on_ranks(ranks, second_run, tmp_path / "out" / "iter_0000003", tmp_path / "again")
    for step in (3, 4):
        ours, theirs = (
            read_whole(imported(tmp_path / where / f"iter_{step:07d}", tmp_path / f"{where}{step}"), "")[0]
            for where in ("again", "there")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
