"""Training with sequence, context and expert parallelism: the losses of one process, checkpoints that any
layout reads, and expert metrics.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stretto.run.config import TrainConfig
from stretto.run.train.metrics import read_lines
from texts import banner_of, open_tokens
from tiny_job import GPT, LLAMA, MOE, job
from train_runs import losses, train

pytestmark = pytest.mark.apart

SP = ("layout.tp=2", "layout.sequence_parallel=true")
CP = ("layout.cp=2",)
SP_CP = (*SP, "layout.cp=2", "layout.context=ulysses", "recompute.mode=full")
EP = ("layout.dp=2", "layout.ep=2")
ORDERED = (*EP, "layout.tp=2", "layout.order=ep-dp-tp")  # expert ranks before tensor ranks
SP_EP = (*SP, "layout.dp=2", "layout.ep=4", "layout.expert_tp=1")
CP_EP_PP = ("layout.cp=2", "layout.pp=2", "layout.ep=2", "schedule.name=zb-h1")
ODD = ("data.sequence=15",)  # padded to 16 where it is split
BUDGET = ("recompute.mode=auto", "recompute.memory_gib=0.01")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("splits")


def run(folder: Path, name: str, *overrides: str, model: str) -> TrainConfig:
    config = job(
        folder,
        *("train.dtype=float64", "train.steps=2", "eval.every=2", "eval.batches=1", f"run.name={name}"),
        *overrides,
        model=model,
    )
    train(config)
    return config


def evaluated(config: TrainConfig) -> float:
    (row,) = read_lines(config.run.folder / "eval.jsonl")
    return row["loss"]


@pytest.mark.parametrize(
    ("model", "overrides", "layouts"),
    [
        (GPT, ODD, [(*CP, "recompute.mode=selective")]),
        (LLAMA, (), [SP_CP]),
        (MOE, ODD, [ORDERED]),
        pytest.param(GPT, ODD, [SP], marks=pytest.mark.slow),
        pytest.param(LLAMA, (), [(*CP, *BUDGET)], marks=pytest.mark.slow),
        pytest.param(MOE, ODD, [EP, SP_EP, CP_EP_PP], marks=pytest.mark.slow),
    ],
    ids=["gpt", "llama", "experts", "more gpt", "more llama", "more experts"],
)
def test_losses_are_those_of_one_process(
    folder: Path, model: str, overrides: tuple[str, ...], layouts: list[tuple[str, ...]]
) -> None:
    kind = {GPT: "gpt", LLAMA: "llama", MOE: "moe"}[model]
    plain = run(folder, f"{kind}-plain", *overrides, model=model)
    for i, layout in enumerate(layouts):
        split = run(folder, f"{kind}-{i}", *overrides, *layout, model=model)
        assert losses(split) == pytest.approx(losses(plain), rel=1e-11)
        assert evaluated(split) == pytest.approx(evaluated(plain), rel=1e-11)


def test_checkpoints_of_experts_resume_on_any_layout(folder: Path) -> None:
    steps = ("train.steps=3", "eval.every=null")
    uninterrupted = run(folder, "moe-whole", *steps, model=MOE)
    start = run(folder, "moe-start", *SP_EP, *steps, "train.steps=2", model=MOE)
    there = folder / "runs" / "moe-then"
    shutil.copytree(start.run.folder, there)
    resumed = run(folder, there.name, *CP_EP_PP, *steps, "checkpoint.resume=auto", model=MOE)
    assert losses(resumed) == pytest.approx(losses(uninterrupted), rel=1e-11)


def test_expert_metrics_are_the_same_on_every_layout(folder: Path) -> None:
    reported = []
    for name, layout in (("told-plain", ()), ("told-split", SP_EP)):
        config = run(folder, name, "train.steps=1", "eval.every=null", *layout, model=MOE)
        (row,) = read_lines(config.run.folder / "metrics.jsonl")
        reported.append([row["expert_loss"], row["expert_dropped"], row["expert_busiest"]])
    assert reported[1] == pytest.approx(reported[0], rel=1e-9)
    loss, dropped, busiest = reported[0]
    assert loss > 0
    assert 0 < dropped < 1  # the capacity is 1.2
    choices = 8 * 16 * 2 * 2  # samples, tokens, experts of a token, layers
    assert dropped * choices == pytest.approx(round(dropped * choices), abs=1e-9)
    assert 1 <= busiest <= 4


def test_the_banner_shows_how_layers_are_split(folder: Path) -> None:
    def first_line(*overrides: str) -> str:
        config = job(folder, *overrides, model=LLAMA)
        tokens = open_tokens(config)
        return banner_of(tokens, config).splitlines()[0]

    assert "(tp2 cp2), 1f1b, sequence parallel, ulysses attention, recompute full; 6 steps" in first_line(
        *SP_CP
    )
    assert "(single), 1f1b; 6 steps" in first_line("layout.sequence_parallel=true")  # of no effect with tp=1
    assert "llama of 37.8 k parameters, float32" in first_line()
    head = 300 * 32 + 32
    frozen = (
        f"llama of 37.8 k parameters ({head / 1e3:.3g} k of them trainable, {head / 377.92:.3g}%), float32"
    )
    assert frozen in first_line("finetune.freeze=[embed.*, blocks.*]")
    outer = 6 * 32 + 64 + (32 + 16 + 16 + 32 + 64 + 64 + 32)  # of a block's seven projections
    adapted = f"llama of 39.8 k parameters ({2 * 2 * outer / 1e3:.3g} k of them trainable, "
    assert adapted in first_line("lora.rank=2")


def test_dense_model_reports_no_expert_metrics(folder: Path) -> None:
    config = run(folder, "told-dense", "train.steps=1", "eval.every=null", model=LLAMA)
    (row,) = read_lines(config.run.folder / "metrics.jsonl")
    assert row["expert_loss"] is row["expert_dropped"] is row["expert_busiest"] is None
