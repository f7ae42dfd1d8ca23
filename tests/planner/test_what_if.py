"""What would make a plan faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from stretto.job.presets import preset
from stretto.planner import what_if
from stretto.planner.assumptions import software_profile
from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.search.fixed import fixed
from stretto.planner.search.ranking import TIE, Plan
from stretto.planner.search.search import search
from stretto.planner.search.task import SearchTask, job_to_plan
from stretto.planner.what_if import Answer, Change, answer, binding, changes

FEW = ["tp=1", "pp=1", "cp=1", "micro_batch=2", "mode=zero3", "sequence_parallel=false"]


def task(cluster: str, batch: int) -> SearchTask:
    job = job_to_plan(shape=preset("llama3-8b"), global_batch=batch, sequence=8192)
    return SearchTask(job=job, cluster=find_cluster(cluster), fixed=fixed(FEW), seconds=0.5)


@cache
def planned() -> tuple[SearchTask, Plan, Mapping[str, Answer]]:
    asked = task("a100-40gb:16", 192)
    plan = search(asked)
    few = [
        change for change in changes(asked) if not change.name.startswith(("96 GB", "half the b", "tuned"))
    ]
    return asked, plan, {change.name: answer(change, plan, asked) for change in few}


def by_name(asked: SearchTask) -> dict[str, Change]:
    return {change.name: change for change in changes(asked)}


def test_what_cannot_change_has_a_reason() -> None:
    asked = task("h200:8", 15)
    reasons = {name: change.reason for name, change in by_name(asked).items() if change.task is None}
    assert reasons == {
        "twice the network between nodes": "all devices are in one node",
        "half the network between nodes": "all devices are in one node",
        "half the batch": "15 samples are odd",
    }
    measured = replace(task("h100:16", 16).cluster, tables={"all-reduce": []})
    link = by_name(replace(asked, cluster=measured))["twice the network between nodes"]
    assert link.task is None
    assert "measurements are not scaled" in link.reason
    assert by_name(task("a100:16", 16))["fp8"].reason == "a100-80gb-sxm has no 8-bit products"


def test_cards_and_software_differ_from_those_planned_for() -> None:
    names = by_name(task("h200:8", 16))
    assert "141 GB cards" not in names
    assert names["96 GB cards"].resource is None  # less memory does not show that it binds
    assert by_name(task("h100:8", 16))["96 GB cards"].resource == "device memory"
    tuned = replace(task("h100:8", 16).assumptions, software=software_profile("tuned"))
    assert "today software" in by_name(replace(task("h100:8", 16), assumptions=tuned))


@pytest.mark.parametrize(("batch", "name"), [(64, "one more node, batch 72"), (60, "one more node")])
def test_one_more_node_divides_the_batch_as_before(batch: int, name: str) -> None:
    grown = by_name(task("a100:16", batch))[name].task
    assert grown is not None
    assert (grown.devices, grown.cluster.nodes) == (24, 3)
    assert grown.global_batch == (72 if batch == 64 else 60)


def test_an_answer_is_the_estimate_of_its_job_on_the_changed_machine() -> None:
    _, plan, answers = planned()
    first = plan.ranking[0].estimate
    for found in answers.values():
        if found.change.name == "fp8":
            assert found.best is None
            continue
        assert found.best is not None, found.reason
        assert found.change.task is not None
        best, changed = found.best.estimate, found.change.task
        again = estimate(best.job, changed.cluster, changed.assumptions)
        assert best.seconds == again.seconds
        assert best.memory is not None
        assert best.memory.likely
        assert best.memory.capacity == changed.cluster.device.memory
        assert (best.job.global_batch, best.job.layout.world) == (changed.global_batch, changed.devices)
        assert found.gain == best.tokens_per_s / first.tokens_per_s - 1
        assert found.best.layout.startswith(str(best.job.layout))


def test_no_answer_is_worse_than_to_keep_the_plan() -> None:
    _, plan, answers = planned()
    planned_first = plan.ranking[0]
    for name in ("twice the network between nodes", "half the network between nodes", "141 GB cards"):
        found, changed = answers[name], answers[name].change.task
        assert changed is not None
        assert found.best is not None
        unmoved = estimate(planned_first.estimate.job, changed.cluster, changed.assumptions, memory=False)
        assert found.best.estimate.seconds <= unmoved.seconds
    # 40 GB recompute what larger cards store
    assert planned_first.estimate.job.recompute.mode == "full"
    larger = answers["141 GB cards"]
    assert larger.best is not None
    assert larger.best.estimate.job.recompute.mode == "none"
    assert larger.gain is not None
    assert larger.gain > 0.1
    assert answers["half the network between nodes"].gain <= 0 < larger.gain  # pyright: ignore
    assert all(found.unchanged <= TIE for found in answers.values())


def test_the_same_question_has_the_same_answer() -> None:
    asked, plan, answers = planned()
    change = by_name(asked)["one more node"]
    again, before = answer(change, plan, asked), answers[change.name]
    assert again.best is not None
    assert before.best is not None
    assert (again.best.layout, again.gain) == (before.best.layout, before.gain)


def test_what_the_plan_has_missed_is_reported() -> None:
    """A plan that knows only a slow layout, and the same machine as the change."""
    asked = task("h100:16", 32)
    slow = search(replace(asked, fixed={**asked.fixed, **fixed(["recompute=full"])}))
    missed = answer(Change(name="none", task=asked), replace(slow, baselines={}), asked)
    assert missed.gain == missed.unchanged > 0.1


def test_the_slowest_resource_binds() -> None:
    asked, plan, answers = planned()
    shares = binding(plan, asked, [*answers.values()])
    assert [*shares.values()] == sorted(shares.values(), reverse=True)
    assert shares["bubble"] == pytest.approx(0)
    gain = answers["141 GB cards"].gain
    assert gain is not None
    assert shares["device memory"] == pytest.approx(1 - 1 / (1 + gain))
    slow = replace(asked.cluster, outer=replace(asked.cluster.outer, bandwidth=1e8))
    plan = search(replace(asked, cluster=slow))
    shares = binding(plan, replace(asked, cluster=slow), [])
    assert next(iter(shares)) == "network between nodes"
    assert shares["network between nodes"] == pytest.approx(0.5, abs=0.1)
    assert "device memory" not in shares


def test_a_layout_that_does_not_fit_is_no_answer() -> None:
    """A plan for large cards, on small ones."""
    asked = task("h200:16", 64)
    fixed_mode = {**asked.fixed, **fixed(["recompute=none", "dp=16"])}
    asked = replace(asked, fixed=fixed_mode)
    plan = search(asked)
    assert plan.ranking
    small = replace(asked, cluster=find_cluster("v100-16gb:16"))
    refused = answer(Change(name="small cards", task=small), plan, asked)
    assert refused.best is None
    assert refused.gain is None
    assert refused.reason.startswith("nothing was found that fits: dp16, ")
    # nor with other copies than those fixed
    grown = replace(asked, cluster=find_cluster("h200:24"))
    assert answer(Change(name="one more node", task=grown), plan, asked).best is None


def test_a_search_that_finds_nothing_leaves_the_layouts_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plan, _ = planned()
    nothing = replace(plan, ranking=(), complete=False, nearest=None)
    monkeypatch.setattr(what_if, "search", lambda task, progress: nothing)
    copies = {"half the network between nodes": 16, "one more node": 24}
    for name, dp in copies.items():
        change = by_name(asked)[name]
        assert change.task is not None
        found = answer(change, replace(plan, safe=None, baselines={}), asked).best
        assert found is not None
        job = plan.ranking[0].estimate.job
        job = replace(job, layout=replace(job.layout, dp=dp))
        assert found.layout == plan.ranking[0].layout.replace("dp16", f"dp{dp}")
        assert found.estimate.seconds == estimate(job, change.task.cluster, memory=False).seconds
    silent = answer(by_name(asked)["tuned software"], replace(nothing, safe=None, baselines={}), asked)
    assert silent.reason == "nothing was found within 0.5 s of work"


def test_a_single_copy_is_not_divided() -> None:
    """The best layout of two nodes has one copy, and none on the half of its devices."""
    choices = fixed(["tp=8", "pp=1,2", "dp=1", "cp=1", "micro_batch=1", "sequence_parallel=true"])
    asked = replace(task("h100:8", 8), fixed=choices)
    plan = search(asked)
    grown = replace(asked, cluster=find_cluster("h100:16"))
    found = answer(Change(name="one more node", task=grown), plan, asked)
    assert found.best is not None
    assert found.best.estimate.job.layout.sizes["pp"] == 2
    assert found.unchanged == 0


@pytest.mark.parametrize(("seconds", "work"), [(0.5, 0.5), (8.0, 1.0), (64.0, 8.0), (None, 0.5)])
def test_changes_share_the_work_of_the_plan(seconds: float | None, work: float) -> None:
    assert what_if.work_of(replace(task("h100:8", 8), seconds=seconds)) == work
