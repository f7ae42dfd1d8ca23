"""Corrections of experts' scores in training: what type they have, and that a resumed run moves them on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from ranks import on_ranks
from stretto.engine.parallel.mesh import Mesh
from stretto.job.job import Job
from stretto.run.config.job import job_of
from stretto.run.train.assemble import assemble
from tiny_job import job
from train_runs import at_step, send_self, tensors, train

MODEL = (
    "{family: deepseek_v3, layers: 2, hidden: 16, heads: 2, head_dim: 10, ffn: 24, "
    "attention: {latent: {kv_rank: 6, rope_dim: 4, value_dim: 5, q_rank: 8}}, "
    "moe: {experts: 4, top_k: 2, ffn: 8, groups: 2, correction_rate: 0.001, dense_layers: 1}}"
)
NAME = "blocks.1.mlp.router.correction"

pytestmark = pytest.mark.apart


def correction_state(job_of_test: Job) -> tuple[torch.dtype, bool, bool]:
    """The type of a rank's correction, and whether an optimiser or a gradient has it."""
    replica = assemble(job_of_test, Mesh(job_of_test.layout), seed=1)
    parameter = replica.parameters[NAME]
    updated = NAME in {fragment.name for fragment in replica.fragments}
    replica.close()
    return parameter.dtype, updated, parameter.requires_grad


def test_a_correction_stays_in_float32_and_out_of_the_optimiser(tmp_path: Path) -> None:
    sharded_job = job_of(job(tmp_path, "train.dtype=bfloat16", "layout.dp=2", "dp.mode=zero3", model=MODEL))
    assert on_ranks(2, correction_state, sharded_job) == [(torch.float32, False, False)] * 2


def test_a_resumed_run_moves_corrections_on(tmp_path: Path) -> None:
    """From another layout, to what the run that was not stopped has: they are sums of steps of one size."""
    exact = ("train.dtype=float64", "checkpoint.every=3")
    uninterrupted = job(tmp_path, *exact, "run.name=whole", model=MODEL)
    train(uninterrupted)
    parts = (*exact, "run.name=parts")
    train(job(tmp_path, *parts, "layout.dp=2", model=MODEL), at_step(3, 0, send_self, signal.SIGTERM))
    resumed = job(tmp_path, *parts, "layout.pp=2", "checkpoint.resume=auto", model=MODEL)
    train(resumed)
    before, after = (tensors(uninterrupted, step)[f"model.{NAME}"] for step in (3, 6))
    assert before.abs().max() > 0
    assert not torch.equal(before, after)
    assert torch.equal(tensors(resumed, 6)[f"model.{NAME}"], after)
