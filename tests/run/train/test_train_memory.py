"""Weights and states that change between two updates are found where no other rank has a copy, and undone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planted_numbers import flip, flip_bit
from stretto.engine.parallel.control import this_rank
from stretto.run.launch.local import RankFailed
from stretto.run.train.metrics import read_lines
from tiny_job import LLAMA, MOE, job
from train_runs import Hook, losses, same, tensors, train

ZERO = ("layout.dp=2", "dp.mode=zero1", "guard.check_memory=1", "eval.every=null")
MOMENTS = ("optim.exp_avg.blocks.1.mlp.gate_up.weight", "optim.exp_avg.blocks.0.mlp.gate_up.weight")


def flip_before_saving(step: int, rank: int, name: str, *, element: int, bit: int) -> Hook:
    """The checkpoint of that step has the flipped bit."""
    return _flip_before_saving, (step, rank, name, element, bit)


def _flip_before_saving(step: int, rank: int, name: str, element: int, bit: int) -> None:
    from stretto.run.train.checkpointing import Checkpointer

    inner, done = Checkpointer._write, list[int]()

    def wrapped(self: Checkpointer, write: Any) -> Path:
        if self._progress.step == step and not done:
            done.append(1)
            if rank == this_rank():
                flip(self._task.tensors("replicas")[name][0], element, bit)
        return inner(self, write)

    Checkpointer._write = wrapped


def test_a_shard_that_changes_is_undone_and_no_checkpoint_has_it(tmp_path: Path) -> None:
    more = (*ZERO, "checkpoint.every=2", "checkpoint.keep=9", "guard.on_mismatch=rollback")
    plain, flipped = (job(tmp_path, *more, f"run.name={n}", model=LLAMA) for n in ("plain", "flipped"))
    train(plain)
    train(
        flipped,
        flip_before_saving(4, 1, MOMENTS[1], element=3, bit=12),
        flip_bit(6, 0, MOMENTS[0], element=5, bit=30),
    )
    assert losses(plain) == losses(flipped)
    for step in (2, 4, 6):
        assert same(tensors(plain, step), tensors(flipped, step)), step
    first, second = read_lines(flipped.run.folder / "guard.jsonl")
    assert [first["step"], first["action"], first["samples"]] == [4, "rollback", [16, 16]]
    assert first["reason"].startswith(f"{MOMENTS[1]} on rank 1 has changed since the update")
    assert second["reason"].startswith(f"{MOMENTS[0]} on rank 0 has changed since the update")


@pytest.mark.parametrize(
    ("rank", "name"),
    # a whole weight beside another rank's shard, and one that begins with the rank's own
    [(1, "weights.head.out.weight"), (0, "weights.blocks.1.norm1.weight")],
)
def test_a_run_stops_where_memory_has_changed(tmp_path: Path, rank: int, name: str) -> None:
    config = job(tmp_path, *ZERO, "run.name=stopped", model=LLAMA)
    with pytest.raises(RankFailed) as caught:
        train(config, flip_bit(3, rank, name, element=20, bit=0))
    assert caught.value.failure.message.startswith(f"after step 2: {name} on rank {rank} has changed")


@pytest.mark.slow
@pytest.mark.parametrize("model", [LLAMA, MOE])
@pytest.mark.parametrize(
    "layout",
    [
        ("layout.tp=2",),
        ("layout.pp=2", "layout.dp=2"),
        ("layout.cp=2",),
        ("layout.dp=4", "dp.mode=zero1", "dp.shard_states=2"),
        ("layout.dp=2", "dp.mode=zero2", "dp.offload=cpu", "optim.clip=null"),
        ("layout.dp=2", "dp.mode=zero3"),
        ("layout.dp=2", "dp.mode=zero3", "dp.offload=cpu", "dp.offload_parameters=cpu"),
        ("layout.dp=2", "dp.mode=server"),
        ("layout.dp=2", "dp.mode=zero1", "train.dtype=bfloat16"),
        ("layout.dp=2", "train.dtype=float16"),
        ("layout.pp=2", "schedule.name=dualpipe", "batch.global_size=8"),
        ("layout.pp=2", "schedule.name=zb-h1", "batch.global_size=8"),
        ("optim.name=muon",),
        ("layout.dp=2", "optim.name=adafactor"),
    ],
)
def test_nothing_changes_by_itself(tmp_path: Path, layout: tuple[str, ...], model: str) -> None:
    more = ("guard.check_memory=1", "eval.every=3", "checkpoint.every=2", "run.name=healthy")
    config = job(tmp_path, *layout, *more, model=model)
    train(config)
    assert not (config.run.folder / "guard.jsonl").exists()
    assert json.loads((config.run.folder / "checkpoints/step-00000006/manifest.json").read_text())
