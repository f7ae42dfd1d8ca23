"""Layouts of models with the routers, experts and attention of published families equal one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from proofs import verify
from stretto.run.config import TrainConfig
from tiny_job import Changes, changes, job, varied

pytestmark = pytest.mark.apart

LATENT = "kv_rank: 6, rope_dim: 4, value_dim: 5"
DEEPSEEK_V3 = (
    "{family: deepseek_v3, layers: 3, hidden: 16, heads: 4, head_dim: 10, ffn: 24, "
    f"attention: {{latent: {{{LATENT}, q_rank: 8}}}}, "
    "moe: {experts: 8, top_k: 3, ffn: 8, shared_ffn: 8, groups: 4, top_groups: 2, scale: 2.5, "
    "correction_rate: 0.01, dense_layers: 1}}"
)
DEEPSEEK_V2 = (
    "{family: deepseek_v2, layers: 2, hidden: 16, heads: 4, head_dim: 10, ffn: 24, "
    f"attention: {{latent: {{{LATENT}}}}}, "
    "moe: {experts: 6, top_k: 2, ffn: 8, shared_ffn: 8, groups: 3, top_groups: 2, scale: 4.0}}"
)
QWEN3_MOE = (
    "{family: qwen3_moe, layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 6, ffn: 24, "
    "moe: {experts: 4, ffn: 8, every: 2}}"
)
GPT_OSS = (
    "{family: gpt_oss, layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 6, ffn: 8, "
    "attention: {window: 5, full_every: 2}, moe: {experts: 4, top_k: 2}}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routers")


def routed(folder: Path, model: str, *overrides: str) -> TrainConfig:
    """Four microbatches: schedules with more are proved in other files."""
    return job(folder, "batch.global_size=4", *overrides, model=model)


def prove(config: TrainConfig, cases: list[Changes]) -> None:
    for verdict in verify(config, [varied(config, case) for case in cases], steps=1):
        assert verdict.equal, verdict
        assert verdict["weights"].bound <= 1e-9


@pytest.mark.parametrize(
    "cases",
    [
        [changes(tp=2, dp=2, ep=2, sequence_parallel=True)],
        pytest.param(
            [
                changes(cp=2, pp=2, context="ulysses"),
                changes(tp=2, cp=2, ep=4, expert_tp=1),
                changes(dp=2, pp=2, schedule="zb-h1", recompute="full", mode="zero3"),
                changes(pp=2, tp=2, schedule="dualpipe"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "more"],
)
def test_deepseek_v3(folder: Path, cases: list[Changes]) -> None:
    prove(routed(folder, DEEPSEEK_V3), cases)


@pytest.mark.slow
def test_deepseek_v2(folder: Path) -> None:
    cases = [
        changes(tp=2, ep=2, expert_tp=1),
        changes(tp=2, sequence_parallel=True),
        changes(cp=2),
        changes(dp=2, mode="zero1"),
    ]
    prove(routed(folder, DEEPSEEK_V2, "data.sequence=15"), cases)


EVERY_AXIS = [
    changes(tp=2, dp=2, ep=2, sequence_parallel=True),
    changes(tp=4, ep=2, expert_tp=2),
    changes(tp=2, cp=2),
    changes(cp=4, context="ulysses"),
    changes(dp=2, pp=2, schedule="zb-h1", mode="zero3"),
]


@pytest.mark.parametrize(
    ("model", "cases"),
    [
        pytest.param(
            QWEN3_MOE, EVERY_AXIS[1:2], id="qwen3_moe", marks=pytest.mark.slow
        ),  # gpt_oss routes alike
        pytest.param(GPT_OSS, EVERY_AXIS[2:3], id="gpt_oss"),
        pytest.param(QWEN3_MOE, EVERY_AXIS, marks=pytest.mark.slow, id="qwen3_moe every axis"),
        pytest.param(GPT_OSS, EVERY_AXIS, marks=pytest.mark.slow, id="gpt_oss every axis"),
    ],
)
def test_models_with_windows_and_heads_that_share_keys(
    folder: Path, model: str, cases: list[Changes]
) -> None:
    prove(routed(folder, model), cases)
