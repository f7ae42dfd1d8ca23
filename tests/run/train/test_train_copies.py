"""Copies of weights and states are compared in training: a flipped bit is found, and no others differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planted_numbers import flip_bit
from stretto.run.launch.local import RankFailed
from stretto.run.train.metrics import read_lines
from tiny_job import LLAMA, MOE, job
from train_runs import losses, same, tensors, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("copies")


CHECK = ("guard.check_replicas=2", "eval.every=null")


def message(config: Any, *hooks: Any) -> str:
    with pytest.raises(RankFailed) as caught:
        train(config, *hooks)
    return caught.value.failure.message


def test_a_flipped_bit_of_a_weight_and_of_a_state_is_found(folder: Path) -> None:
    config = job(folder, "layout.tp=2", *CHECK, "run.name=tp", model=LLAMA)
    says = message(config, flip_bit(3, 1, "model.blocks.0.norm1.weight", element=3, bit=1))
    assert says.startswith("after step 4: copies differ: ")
    assert "model.blocks.0.norm1.weight is not the same on ranks 0 and 1" in says
    config = job(folder, "layout.dp=2", *CHECK, "run.name=dp", model=LLAMA)
    says = message(config, flip_bit(3, 1, "optim.exp_avg.embed.tok.weight", element=3, bit=30))
    assert says.startswith("after step 4: copies differ: ")


def test_a_rollback_for_a_flipped_bit_comes_to_the_bits_of_the_undisturbed_run(folder: Path) -> None:
    layout = ("layout.dp=2", "dp.mode=ddp", *CHECK, "checkpoint.every=3", "guard.on_mismatch=rollback")
    plain = job(folder, *layout, "run.name=plain")
    flipped = job(folder, *layout, "run.name=flipped")
    train(plain)
    train(flipped, flip_bit(5, 0, "model.blocks.0.mlp.up.weight", element=7, bit=22))
    assert same(tensors(plain, 6), tensors(flipped, 6))
    assert losses(plain) == losses(flipped)
    (event,) = read_lines(flipped.run.folder / "guard.jsonl")
    assert event["action"] == "rollback"
    assert event["samples"] == [
        20,
        20,
    ]  # after step 5: two after the checkpoint's
    assert "model.blocks.0.mlp.up.weight" in event["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("model", [LLAMA, MOE])
@pytest.mark.parametrize(
    "layout",
    [
        ("layout.dp=4",),
        ("layout.dp=2", "layout.tp=2"),
        ("layout.tp=4", "model.kv_heads=2"),
        ("layout.pp=2", "layout.dp=2"),
        ("layout.cp=2", "layout.tp=2"),
        ("layout.dp=4", "dp.mode=zero1", "dp.shard_states=2"),
        ("layout.dp=4", "dp.mode=zero3"),
        ("layout.dp=2", "train.dtype=bfloat16"),
        ("layout.pp=2", "schedule.name=dualpipe-v", "batch.global_size=8"),
    ],
)
def test_no_copies_differ_by_themselves(folder: Path, layout: tuple[str, ...], model: str) -> None:
    train(job(folder, *layout, *CHECK, "run.name=healthy", model=model))
