"""Megatron-core's own checkpoints, where it is installed: it writes what is imported, and loads an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from installed import installed
from ranks import on_ranks
from stretto.engine.checkpoint.read import read_whole
from stretto.engine.models.build import build
from stretto.errors import StrettoError
from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape
from stretto_interop.checkpoints.megatron.exporting import export_megatron
from stretto_interop.checkpoints.megatron.importing import MegatronImport
from stretto_interop.frameworks.megatron.framework import saved_arguments

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
        again, original = (
            read_whole(imported(tmp_path / where / f"iter_{step:07d}", tmp_path / f"{where}{step}"), "")[0]
            for where in ("again", "there")
        )
        assert again.keys() == original.keys()
        assert all(torch.equal(again[name], original[name]) for name in original)


FORMS = ("fully_reshardable", "dp_reshardable")
MOE = replace(SHAPE, moe=ExpertShape(experts=4, top_k=2))
# sizes of parameters that need no padding at the end of a bucket: with it, core_v0.16.1 writes zeros for the
# last values of `fully_reshardable`, and cannot write the bucket of a tied embedding
TIED = replace(SHAPE, hidden=64, head_dim=16, tied=True)


def buffered_run(folder: Path, shape: ModelShape, ranks: dict[str, int], forms: tuple[str, ...]) -> None:
    from real_megatron import Buffered

    run = Buffered(shape, **ranks)
    for number in range(3):
        run.step(number)
    for form in forms:
        run.save(folder / form, form, 3)


@pytest.mark.parametrize(
    ("shape", "world", "ranks"),
    [
        (replace(SHAPE, layers=4), 4, {"tp": 2, "pp": 2, "bucket": 1500}),
        (replace(SHAPE, layers=4), 2, {"tp": 1, "pp": 2, "chunks": 2, "bucket": 10**6}),
        (TIED, 2, {"tp": 1, "pp": 2, "bucket": 10**6}),
        (MOE, 2, {"tp": 1, "pp": 1, "ep": 2, "bucket": 5000}),
    ],
    ids=["tp2-pp2", "chunks", "tied", "experts"],
)
def test_states_in_buffers(tmp_path: Path, shape: ModelShape, world: int, ranks: dict[str, int]) -> None:
    on_ranks(world, buffered_run, tmp_path, shape, ranks, FORMS)
    per_tensor, states = (
        read_whole(imported_as(tmp_path / form / "iter_0000003", tmp_path / f"run-{form}", shape), "")[0]
        for form in FORMS
    )
    assert states.keys() == per_tensor.keys()
    assert all(torch.equal(states[name], per_tensor[name]) for name in per_tensor)
    assert per_tensor["optim.exp_avg.head.norm.weight"].abs().min() > 0


def test_replicas_and_padding(tmp_path: Path) -> None:
    """Buckets that are padded for two replicas; what Megatron-core itself makes of them whole is refused."""
    ranks = {"tp": 1, "pp": 1, "bucket": 1500}
    on_ranks(2, buffered_run, tmp_path, SHAPE, ranks, FORMS)
    imported_as(tmp_path / "dp_reshardable" / "iter_0000003", tmp_path / "run", SHAPE)
    with pytest.raises(StrettoError, match="do not round to the weights of the model"):
        imported_as(tmp_path / "fully_reshardable" / "iter_0000003", tmp_path / "other", SHAPE)


@pytest.mark.parametrize("spread", [True, False])
def test_experts_there_and_back(tmp_path: Path, spread: bool) -> None:
    """Exported states are those that Megatron has after it loaded them, for either of its optimisers."""
    ranks = {"tp": 1, "pp": 1, "ep": 2 if spread else 1, "bucket": 10**6}
    on_ranks(2, buffered_run, tmp_path / "there", MOE, ranks, FORMS[1:2])
    path = imported_as(tmp_path / "there" / FORMS[1] / "iter_0000003", tmp_path / "run", MOE)
    export_megatron(path, tmp_path / "out", saved_arguments, experts_spread=spread)
    on_ranks(2, loaded_run, tmp_path / "out" / "iter_0000003", tmp_path / "again", MOE, ranks)
    again = imported_as(tmp_path / "again" / "iter_0000003", tmp_path / "back", MOE)
    reimported, original = (read_whole(folder, "")[0] for folder in (again, path))
    assert reimported.keys() == original.keys()
    assert all(torch.equal(reimported[name], original[name]) for name in original)


def loaded_run(place: Path, folder: Path, shape: ModelShape, ranks: dict[str, int]) -> None:
    from real_megatron import Buffered

    run = Buffered(shape, **ranks)
    run.load(place)
    run.save(folder, FORMS[1], 3)


def imported_as(place: Path, run: Path, shape: ModelShape) -> Path:
    with MegatronImport(place, shape) as opened:
        assert (opened.step, opened.updates, opened.samples) == (3, 3, 24)
        return opened.write(run)
