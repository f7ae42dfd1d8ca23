"""Conversations under any layout: microbatches and replicas with different numbers of targets, also none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chats import chat, tokenizer_folder, write_chats
from proofs import verify
from stretto.engine.models.language import IGNORED
from stretto.run.config.schema import TrainConfig
from stretto.run.train.batches import Batches
from stretto.run.train.metrics import StepRecord, step_line
from stretto.verify.language.cases import configured_job, vary
from stretto.verify.language.proof import batches
from texts import describe, open_tokens
from tiny_job import LLAMA, Changes, changes, job, varied
from train_runs import train

MOE = (
    "{family: llama, layers: 2, hidden: 32, heads: 4, ffn: 32, "
    "moe: {experts: 4, shared_ffn: 16, balance: 0.1, z: 0.001}}"
)
LAYOUTS = [
    changes(tp=1, dp=2, pp=2, schedule="1f1b"),
    changes(tp=1, dp=2, pp=1, cp=2, schedule="1f1b"),
]


def config_of(folder: Path, *overrides: str, model: str = LLAMA) -> TrainConfig:
    if not (folder / "chats.jsonl").exists():
        write_chats(folder / "chats.jsonl", [chat(1 + i % 3, f"question {i}") for i in range(40)])
        tokenizer_folder(folder / "tokenizer", "llama3")
    return job(
        folder,
        f"data.source={folder / 'chats.jsonl'}",
        f"data.tokenizer={folder / 'tokenizer'}",
        "data.chat=assistant",
        *overrides,
        model=model,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masked")


def count_on_each_replica() -> None:
    """Each replica divides by its own targets, and the replicas are averaged: the usual mistake."""

    def own(self: Batches, targets: list[Tensor]) -> Tensor:
        count = torch.stack([(t != IGNORED).sum() for t in targets]).double()
        return count * self.mesh.size("dp")

    Batches._count = own


def test_layouts_agree_on_masked_samples_some_without_a_target(folder: Path) -> None:
    config = config_of(folder, "data.packing=stream")
    (batch, *_) = batches(config, open_tokens(config), 1)
    counts = (batch.targets != IGNORED).sum(1).tolist()
    assert 0 in counts
    assert len(set(counts)) > 2
    verdicts = verify(config, [varied(config, case) for case in LAYOUTS], steps=1)
    assert [verdict.diagnosis for verdict in verdicts] == [None] * len(LAYOUTS)


PACKED = ("data.packing=stream", "data.sequence=15")
ON_TWO = [changes(tp=2, sequence_parallel=True), changes(cp=2, context="ulysses"), changes(cp=2)]
WITHIN_LAYERS = [
    changes(dp=2, tp=2),
    changes(dp=2, tp=2, sequence_parallel=True),
    changes(dp=2, cp=2),
    changes(dp=2, cp=2, context="ulysses"),
    changes(tp=2, cp=2, sequence_parallel=True),
]


@pytest.mark.parametrize(
    ("overrides", "cases"),
    [
        pytest.param(PACKED, ON_TWO[:2], id="packed"),
        pytest.param(("data.sequence=97",), ON_TWO[2:], id="padded"),
        pytest.param(PACKED, WITHIN_LAYERS[1::2], id="packed more", marks=pytest.mark.slow),
        pytest.param(("data.sequence=97",), WITHIN_LAYERS, id="padded more", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_sample_count_its_targets_once(
    folder: Path, overrides: tuple[str, ...], cases: list[Changes]
) -> None:
    """Tensor, sequence and context parallelism, on lengths that none of them divides."""
    config = config_of(folder, *overrides)
    (batch, *_) = batches(config, open_tokens(config), 1)
    targets = batch.targets
    masked = (targets == IGNORED).sum(1)
    assert 0 < int(masked.sum()) < targets.numel()
    assert len(set(masked.tolist())) > 1
    verdicts = verify(config, [varied(config, case) for case in cases], steps=1)
    assert [verdict.diagnosis for verdict in verdicts] == [None] * len(cases)
    for verdict in verdicts:
        assert verdict.error("loss") < 1e-12
        assert verdict.error("gradients") < 1e-9


def count_masked_targets() -> None:
    """Positions without a target take part in the loss of a vocabulary that is split, as target 0."""
    from stretto.engine.parallel.tensor.vocabulary import VocabParallelCrossEntropy

    inner = VocabParallelCrossEntropy.forward

    def forward(self: VocabParallelCrossEntropy, logits: Tensor, targets: Tensor) -> Tensor:
        return inner(self, logits, targets.clamp(min=0))

    VocabParallelCrossEntropy.forward = forward  # type: ignore[method-assign]


def test_a_loss_of_masked_targets_is_caught(folder: Path) -> None:
    config = config_of(folder, "data.sequence=97")
    (verdict,) = verify(config, [varied(config, changes(tp=2))], steps=1, on_rank=count_masked_targets)
    assert not verdict.equal
    assert verdict.error("loss") > 1e-4


def test_experts_are_balanced_over_all_tokens(folder: Path) -> None:
    config = config_of(folder, "data.sequence=96", model=MOE)
    cases = [changes(tp=1, dp=2, pp=1, schedule="1f1b", ep=2), changes(tp=1, dp=1, pp=2, schedule="1f1b")]
    verdicts = verify(config, [varied(config, case) for case in cases], steps=1)
    assert [verdict.diagnosis for verdict in verdicts] == [None, None]


def test_a_count_on_each_replica_is_caught(folder: Path) -> None:
    config = config_of(folder, "data.sequence=96")
    case = varied(config, changes(tp=1, dp=2, pp=1, schedule="1f1b"))
    (verdict,) = verify(config, [case], steps=1, on_rank=count_on_each_replica)
    assert not verdict.equal
    assert max(verdict.error("loss"), verdict.error("gradients")) > 1e-4


def test_a_server_counts_the_targets_of_all(folder: Path) -> None:
    config = config_of(folder, "data.sequence=96", "dp.mode=server", "layout.dp=2")
    (verdict,) = verify(config, [vary(configured_job(config))])
    assert verdict.diagnosis is None


def test_a_run_reports_tokens_and_those_that_count(folder: Path) -> None:
    config = config_of(
        folder, "data.sequence=96", "layout.dp=2", "eval.every=3", "run.name=description", "eval.batches=1"
    )
    outcome = train(config)
    steps = [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["tokens"] == 6 * 4 * 96
    assert 0 < steps[-1]["targets"] < 0.8 * steps[-1]["tokens"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert outcome["loss"] == steps[-1]["loss"]
    assert steps[-1].pop("version") == 1
    steps[-1].pop("memory", None)  # the process's, which the line lacks
    assert "| targets " in step_line(StepRecord(**steps[-1]), 6)
    description = describe(open_tokens(config), config)
    assert [line.split(":")[0] for line in description] == ["train", "valid"]
    assert "longer than 96 tokens are cut off" in description[0]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (config.run.folder / name).exists()
