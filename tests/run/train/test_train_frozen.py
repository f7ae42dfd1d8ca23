"""Frozen weights keep their bits, in training and in checkpoints, and nothing is kept for them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from proofs import verify
from stretto.engine.models.weights import initial_values
from stretto.job.finetune import TrainedParameters
from stretto.job.rules import problems
from stretto.run.config.schema import TrainConfig
from tiny_job import GPT, LLAMA, MOE, Changes, changes, job, varied
from train_runs import at_step, losses, same, send_self, tensors, train

pytestmark = pytest.mark.apart

FREEZE = 'finetune.freeze=["embed.*", "blocks.0.*", "*norm*"]'
STOP_AT_3 = at_step(3, 0, send_self, signal.SIGTERM)
HOW = {
    "ddp": ("layout.dp=2",),
    "zero1 in bfloat16": ("layout.dp=2", "dp.mode=zero1", "train.dtype=bfloat16"),
    "zero3": ("layout.dp=2", "dp.mode=zero3"),
    "zero3 in files": ("layout.dp=2", "dp.mode=zero3", "dp.offload=nvme", "dp.offload_parameters=nvme"),
    "zero3 in host memory": ("layout.dp=2", "dp.mode=zero3", "dp.offload_parameters=cpu"),
    "server": ("layout.dp=2", "dp.mode=server", "train.dtype=bfloat16"),
    "split backwards": ("layout.pp=2", "schedule.name=zb-h1"),
    "delayed updates": ("layout.pp=2", "schedule.name=pipedream", "optim.clip=null"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frozen")


def run(folder: Path, name: str, *overrides: str, freeze: str = FREEZE) -> TrainConfig:
    path = (f"dp.path={folder}",) if any("nvme" in override for override in overrides) else ()
    small = ("model.init_std=0.05", "batch.global_size=4")
    return job(folder, freeze, *small, f"run.name={name}", *path, *overrides, model=LLAMA)


@pytest.mark.parametrize(
    "how",
    [
        *("zero1 in bfloat16", "zero3 in files"),
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in (
                "ddp",
                "zero3",
                "zero3 in host memory",
                "server",
                "split backwards",
                "delayed updates",
            )
        ),
    ],
)
def test_frozen_weights_keep_their_bits_and_have_no_states(folder: Path, how: str) -> None:
    name = how.replace(" ", "-")
    config = run(folder, name, *HOW[how])
    train(config, STOP_AT_3)
    config = run(folder, name, *HOW[how], "checkpoint.resume=auto")
    assert train(config)["step"] == 6
    trained, shape = TrainedParameters(tuple(config.finetune.freeze)), config.shape(300)
    begin = (config.train.seed, shape, config.model.initial())
    saved = tensors(config, 6)
    frozen = [key for key in saved if key.startswith("model.") and not trained(key.removeprefix("model."))]
    assert len(frozen) > 8
    for key in frozen:
        name = key.removeprefix("model.")
        first = initial_values(name, tuple(saved[key].shape), *begin)
        assert torch.equal(saved[key], first.to(saved[key].dtype)), key
    states = {key.split(".", 2)[2] for key in saved if key.startswith("optim.")}
    assert states == {key.removeprefix("model.") for key in saved if key.startswith("model.")} - {
        key.removeprefix("model.") for key in frozen
    }
    moved = initial_values("head.out.weight", (300, 32), *begin)
    assert not torch.equal(saved["model.head.out.weight"], moved)


def test_a_checkpoint_with_frozen_weights_goes_on_bitwise_and_under_another_layout(folder: Path) -> None:
    uninterrupted = run(folder, "whole", "layout.dp=2", "dp.mode=zero3")
    train(uninterrupted)
    parts = run(folder, "parts", "layout.dp=2", "dp.mode=zero3")
    train(parts, STOP_AT_3)
    train(run(folder, "parts", "layout.dp=2", "dp.mode=zero3", "checkpoint.resume=auto"))
    assert same(tensors(uninterrupted, 6), tensors(parts, 6))
    assert losses(uninterrupted) == losses(parts)
    train(run(folder, "moved", "layout.tp=2"), STOP_AT_3)
    nvme = ("layout.dp=2", "dp.mode=zero3", "dp.offload_parameters=nvme")
    train(run(folder, "moved", *nvme, "checkpoint.resume=auto"))
    for key, value in tensors(run(folder, "moved"), 6).items():
        torch.testing.assert_close(value, tensors(uninterrupted, 6)[key], rtol=1e-4, atol=1e-5)


DENSE = 'finetune.freeze=["embed.*", "blocks.*.norm2.*", "*.attn.qkv.weight"]'
EXPERTS = 'finetune.freeze=["*.mlp.experts.*", "*.router.*"]'


@pytest.mark.parametrize(
    ("freeze", "model", "cases"),
    [
        (DENSE, GPT, [changes(tp=2, sequence_parallel=True), changes(pp=2, schedule="zb-v")]),
        (EXPERTS, MOE, [changes(dp=2, ep=2)]),
        pytest.param(
            DENSE,
            GPT,
            [changes(cp=2, mode="zero3"), changes(dp=2, mode="zero2", offload="cpu")],
            marks=pytest.mark.slow,
        ),
        pytest.param(EXPERTS, MOE, [changes(tp=2)], marks=pytest.mark.slow),
    ],
)
def test_layouts_with_frozen_weights_equal_one_process(
    folder: Path, freeze: str, model: str, cases: list[Changes]
) -> None:
    config = job(folder, freeze, model=model)
    jobs = [varied(config, case) for case in cases]
    assert all(verdict.equal for verdict in verify(config, jobs, steps=2 if model is MOE else 1))


@pytest.mark.parametrize(
    ("patterns", "rule", "fix"),
    [
        (["blocks.0.attn.qvk.weight"], "it matches no parameter of the model", "blocks.0.attn.qkv.weight"),
        (["*"], "it leaves no parameter to train", "freeze fewer"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(
    folder: Path, patterns: list[str], rule: str, fix: str
) -> None:
    config = job(folder, f"finetune.freeze={patterns}".replace("'", '"'), model=LLAMA)
    (problem,) = problems(varied(config, changes()))
    assert problem.field == "finetune.freeze"
    assert (rule, fix in (problem.fix or "")) == (problem.rule, True)
