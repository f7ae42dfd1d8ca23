"""Plans for a framework: of what it has, and at the cost that this has there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.presets import preset
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.fixed import fixed
from stretto.planner.search.ranking import Plan
from stretto.planner.search.search import search
from stretto.planner.search.task import SearchTask, job_to_plan
from stretto.run.config import load
from stretto_interop.frameworks.fields import run_values
from stretto_interop.frameworks.mapping import ExternalFramework, emit, refusals
from stretto_interop.frameworks.planned import task_for
from stretto_interop.frameworks.registry import FRAMEWORKS

# with choices that leave few candidates, so that all are examined
PLANS = [
    ("mixtral-8x7b", "h100:8", "megatron", "tp=2,8"),  # fits with states on the host alone
    ("llama3-70b", "h100:32", "torchtitan", "tp=8 pp=4 chunks=2"),
    ("llama3-8b", "a100-80gb:8", "deepspeed", "tp=1,2"),
]
SLOW = [
    ("mixtral-8x7b", "h100:8", "nemo", "tp=2"),
    ("qwen3-30b-a3b", "h100:16", "torchtitan", "pp=1 tp=1"),
    ("gpt3-175b", "h100:128", "megatron", "tp=8 pp=8"),
    ("llama3-70b", "h100:32", "torchtitan", "tp=8 pp=1,4"),
]
MODELS = (
    *("llama3-8b", "mistral-7b", "qwen3-30b-a3b", "gpt2", "deepseek-v3", "mixtral-8x22b"),
    *("llama3-70b", "llama3.1-405b", "gpt3-175b", "mixtral-8x7b", "gemma3-27b"),
)


def task(model: str, cluster: str, seconds: float | None = None) -> SearchTask:
    shape = preset(model)
    job = job_to_plan(shape=shape, global_batch=256, sequence=min(4096, shape.sequence))
    return SearchTask(job=job, cluster=find_cluster(cluster), seconds=seconds)


def check_written(framework: ExternalFramework, plan: Plan) -> None:
    """Write all layouts that a plan shows: the ranking, the safe one and the plain ones."""
    plain = (row for kind in plan.baselines.values() for row in (kind.fastest, kind.safe))
    for row in (*plan.ranking, plan.safe, *plain):
        assert row is None or emit(framework, row.estimate.job).strip(), row


@pytest.mark.parametrize(
    ("model", "cluster", "framework", "fix"),
    [*PLANS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)],
)
def test_every_row_can_be_written(model: str, cluster: str, framework: str, fix: str) -> None:
    framework_rules = FRAMEWORKS[framework]
    plan = search(task_for(framework_rules, task(model, cluster), ["micro_batch=1", *fix.split()]))
    assert plan.ranking
    check_written(framework_rules, plan)


def test_the_first_and_the_plain_layouts_of_a_free_search_can_be_written() -> None:
    framework_rules = FRAMEWORKS["torchtitan"]
    plan = search(task_for(framework_rules, task("llama3-70b", "h100:64", seconds=0.5)))
    assert plan.ranking
    assert plan.baselines["FSDP"].fastest is not None
    check_written(framework_rules, plan)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=lambda framework: framework.name)
@pytest.mark.parametrize("cluster", ["h100:8", "h100:64", "a100-40gb:256"])
@pytest.mark.parametrize("model", MODELS)
def test_every_row_of_more_models_can_be_written(
    model: str, cluster: str, framework: ExternalFramework
) -> None:
    wanted = task(model, cluster, seconds=1.0)
    wrong = refusals(framework, replace(wanted.job, dp=DataParallelSettings(mode="zero3")))
    if any(problem.field.startswith(("model.", "layout.")) for problem in wrong):
        with pytest.raises(StrettoError):
            task_for(framework, wanted)
        return
    check_written(framework, search(task_for(framework, wanted)))


def test_torchtitan_recomputes_all_blocks_or_none() -> None:
    """Where a plan for no framework recomputes some of a stage, also if it may recompute all or none."""
    large, fix = task("llama3-70b", "a100-40gb:64"), ["micro_batch=4", "tp=8", "pp=1", "mode=zero3"]
    among = replace(large, fixed=fixed([*fix, "recompute=full,none", "sequence_parallel=true", "cp=1"]))
    again = search(among).ranking[0].estimate.job.recompute
    assert (again.mode, again.blocks) == ("full", 71)
    plan = search(task_for(FRAMEWORKS["torchtitan"], large, fix))
    recomputed = [row.estimate.job.recompute for row in plan.ranking]
    assert {(recompute.mode, recompute.blocks) for recompute in recomputed} <= {
        ("full", None),
        ("none", None),
    }
    assert recomputed[0].mode == "full"


def test_what_no_layout_mends_is_refused_before_the_search() -> None:
    with pytest.raises(StrettoError, match=r"model\.family is gpt: torchtitan has no GPT-2"):
        task_for(FRAMEWORKS["torchtitan"], task("gpt2", "h100:8"))
    config = load("configs/llama-tiny-tp2.yaml", ["data.packing=none", "layout.tp=1", "layout.dp=2"])
    with pytest.raises(StrettoError, match=r"data\.packing is none"):
        task_for(FRAMEWORKS["megatron"], task("llama3-8b", "h100:8"), (), run_values(config))
