"""One rank of the largest models in published layouts: the configs that ship, with fewer blocks for speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.cli.jobs import load_language
from stretto.job.rules import problems
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import one_rank
from stretto.planner.rank_step.counts import counts
from stretto.run.config.job import job_of
from stretto.run.dryrun.run import dry_run

CONFIGS = Path(__file__).parents[3] / "configs"
# config, rank, fields that leave the layout and a block in each stage, ranks, how close memory is
SIZES = [
    pytest.param("llama3.1-405b-8192gpu", 1000, [], 8192, 0.005, marks=pytest.mark.slow),
    ("qwen3-235b-256gpu", 100, ["model.layers=30", "batch.global_size=512"], 256, 0.01),
    pytest.param(
        *("deepseek-v3-2048gpu", 1000, ["model.layers=14", "batch.global_size=4096"], 2048, 0.02),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("name", "rank", "fewer", "ranks", "close"), SIZES)
def test_a_rank_of_the_largest_models(
    name: str, rank: int, fewer: list[str], ranks: int, close: float
) -> None:
    job = job_of(load_language(str(CONFIGS / f"{name}.yaml"), fewer))
    assert not problems(job)
    assert job.layout.world == ranks
    ran, memory = dry_run(job, rank, quick=True), memory_of(job)
    predicted = counts(job, rank, memory)
    assert {key: count for key, count in ran.flops.items() if count} == predicted.flops
    assert (ran.bytes, ran.calls) == (predicted.bytes, predicted.calls)
    assert one_rank(memory, ran.coordinates["pp"]).total == pytest.approx(ran.peak, rel=close)


@pytest.mark.parametrize("name", ["llama3.1-405b-8192gpu", "qwen3-235b-256gpu", "deepseek-v3-2048gpu"])
def test_the_whole_job_is_legal(name: str) -> None:
    job = job_of(load_language(str(CONFIGS / f"{name}.yaml"), []))
    assert not problems(job)
