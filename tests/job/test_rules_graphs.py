"""Jobs that a device cannot replay as graphs are told before they start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto import Layout
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.experts import ExpertShape
from stretto.job.job import Job, Recompute
from stretto.job.lora import LoraShape
from stretto.job.rules import problems
from stretto.job.shape import ModelShape
from stretto.planner.counts.state_bytes import StateConfig
from stretto.program.checks.in_turn import in_turn
from stretto.program.schedules.registry import schedule

SIZES: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 32, "sequence": 8}
LLAMA = ModelShape(family="llama", **SIZES)
JOB = Job(shape=LLAMA, global_batch=8, graphs="microbatch")
ZERO2 = DataParallelSettings(mode="zero2")


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        replace(JOB, layout=Layout(tp=2), sequence_parallel=True, recompute=Recompute(mode="full")),
        replace(JOB, layout=Layout(dp=2), dp=DataParallelSettings(mode="zero1", offload="cpu")),
        replace(JOB, layout=Layout(dp=2), dp=replace(ZERO2, reduce="step")),
    ],
)
def test_what_a_graph_holds_is_legal(job: Job) -> None:
    assert not problems(job)


@pytest.mark.parametrize(
    ("job", "rule", "fix"),
    [
        (replace(JOB, layout=Layout(pp=2)), "layout.pp=2 has several microbatches in flight", "layout.pp=1"),
        (replace(JOB, layout=Layout(cp=2)), "layout.cp=2 exchanges keys and values", "layout.cp=1"),
        (replace(JOB, schedule="gpipe"), "schedule gpipe does not finish a microbatch", "schedule.name=1f1b"),
        (replace(JOB, schedule="zb-h1"), "schedule zb-h1 does not finish a microbatch", "schedule.name=1f1b"),
        (
            replace(JOB, shape=replace(LLAMA, moe=ExpertShape(experts=2))),
            "the host counts the tokens of each expert",
            "a dense model",
        ),
        (
            replace(JOB, shape=ModelShape(family="gpt", dropout=0.1, **SIZES)),
            "the host computes the seed of each sample's dropout",
            "model.dropout=0",
        ),
        (
            replace(JOB, shape=replace(LLAMA, lora=LoraShape(rank=2, alpha=4.0, dropout=0.1))),
            "the host computes the seed of each sample's dropout",
            "lora.dropout=0",
        ),
        (
            replace(JOB, layout=Layout(dp=2), dp=ZERO2),
            "dp.mode=zero2 reduces gradients in the backward of each microbatch",
            "dp.reduce=step",
        ),
        (
            replace(JOB, layout=Layout(dp=2), dp=DataParallelSettings(mode="zero3", reduce="step")),
            "dp.mode=zero3 frees gathered weights",
            "dp.mode=zero2",
        ),
        (
            replace(JOB, layout=Layout(dp=2), dp=DataParallelSettings(mode="server")),
            "dp.mode=server",
            "dp.mode=ddp",
        ),
    ],
)
def test_what_a_graph_cannot_hold_is_named_with_what_else_would_do(job: Job, rule: str, fix: str) -> None:
    (problem,) = problems(job)
    assert problem.message.startswith(f"train.graphs is microbatch: {rule}")
    assert problem.fix is not None
    assert problem.fix.startswith("train.graphs=off, or ")
    assert fix in problem.fix
    assert not problems(replace(job, graphs="off"))


def test_whole_gradients_that_are_kept_between_steps_are_counted() -> None:
    """Without graphs a rank has them and its part in turns."""
    job = replace(JOB, layout=Layout(dp=4), dp=replace(ZERO2, reduce="step"))
    program, both = job.program(), [replace(job, graphs=value) for value in ("off", "microbatch")]
    assert [StateConfig.of(job, program).lasting for job in both] == [False, True]


def test_one_microbatch_at_a_time() -> None:
    assert in_turn(schedule("1f1b", 1, 3))
    for name, ranks in (("1f1b", 2), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 1), ("pipedream", 1)):
        assert not in_turn(schedule(name, ranks, 4)), name
