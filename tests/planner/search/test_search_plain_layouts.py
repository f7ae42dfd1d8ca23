"""Layouts that people use without a search, and the preference for plain ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.job.data_parallel import DataParallelSettings
from stretto.job.experts import ExpertShape
from stretto.job.presets import find_shape
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.assumptions import Assumptions
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.memory.fits import Bytes, Fit
from stretto.planner.search.branch import BranchAndBound
from stretto.planner.search.evaluator import CandidateEvaluator
from stretto.planner.search.ranking import (
    ODD,
    TIE,
    TIGHT,
    Feasible,
    Plan,
    Ranked,
    cost_factor,
    oddity,
    sort_feasible,
)
from stretto.planner.search.search import baseline_tasks, search, search_rounds
from stretto.planner.search.task import (
    Candidate,
    Parallelism,
    Saving,
    ScheduleChoice,
    SearchTask,
    job_to_plan,
)

SHAPE = ModelShape(family="llama", layers=6, hidden=512, heads=8, kv_heads=4, vocab=4096, sequence=512)


def asked(model: str, **fields: Any) -> SearchTask:
    job = job_to_plan(shape=find_shape(model), global_batch=512, sequence=8192)
    return SearchTask(job=job, cluster=find_cluster("dgx-h100", 64), **fields)


def toy(**fields: Any) -> SearchTask:
    """A search among few layouts of four devices in two nodes, two of them odd."""
    shape = replace(SHAPE, moe=ExpertShape(experts=4, ffn=256)) if fields.pop("experts", False) else SHAPE
    device = replace(find_cluster("dgx-h100").device, memory=fields.pop("memory", 0.4e9))
    cluster = replace(find_cluster("dgx-h100"), device=device, node=2, nodes=2)
    job = job_to_plan(shape=shape, global_batch=16, sequence=512)
    return SearchTask(job=job, cluster=cluster, assumptions=Assumptions(reserve=0.0), **fields)


def test_experts_are_sharded_and_split_beside_the_fastest() -> None:
    plan = search(toy(experts=True, seconds=0.5))
    for name, modes in (("expert x FSDP", {"zero3"}), ("expert x pipeline", {"ddp", "zero1"})):
        plain = plan.baselines[name].fastest
        assert plain is not None
        job = plain.estimate.job
        assert job.layout.ep > 1 == job.layout.tp
        assert job.dp.mode in modes
        assert job.layout.pp == 1 or name == "expert x pipeline"


def test_offload_is_tried_if_a_plain_layout_with_it_is_the_fastest() -> None:
    """Without it only tensor parallelism over PCIe fits, in three times the time."""
    job = job_to_plan(shape=find_shape("qwen3-8b"), global_batch=64, sequence=4096)
    plan = search(SearchTask(job=job, cluster=find_cluster("workstation-4090", 8), seconds=0.1))
    fsdp, tensor = (plan.baselines[name].fastest for name in ("FSDP", "tensor x pipeline"))
    assert fsdp is not None
    assert tensor is not None
    assert (fsdp.estimate.job.dp.offload, tensor.estimate.job.dp.offload) == ("cpu", "none")
    assert fsdp.estimate.seconds < tensor.estimate.seconds
    assert plan.widened
    assert plan.ranking[0].estimate.seconds <= fsdp.estimate.seconds


def test_a_plain_layout_with_offload_may_be_the_only_one_that_certainly_fits() -> None:
    plan = search(toy(memory=0.23e9, seconds=0.1))
    assert not plan.widened
    assert {row.estimate.job.dp.offload for row in plan.ranking} == {"none"}
    hybrid = plan.baselines["hybrid FSDP"].safe
    assert plan.safe is not None
    assert hybrid is not None
    assert (plan.safe.layout, plan.safe.estimate.job.dp.offload) == (hybrid.layout, "cpu")


def test_what_is_offloaded_has_to_fit_the_hosts() -> None:
    wanted = toy(memory=0.12e9, seconds=0.1)
    plan = search(wanted)
    assert plan.widened
    needed = [row.estimate.memory.host for row in plan.ranking if row.estimate.memory is not None]
    assert min(needed) > 0
    assert all("GiB of a node's host memory" in row.reason for row in plan.ranking)
    host = replace(wanted.cluster.host, memory=min(needed) / 2)
    none = search(replace(wanted, cluster=replace(wanted.cluster, host=host)))
    assert not none.ranking
    assert none.nearest is not None
    assert none.nearest.reason.endswith("GiB of a node's host memory")
    assert none.baselines["FSDP"].missing.endswith("GiB of a node's host memory")


def test_rows_appear_before_pipelines_are_searched() -> None:
    first, second, third, *_, last = search_rounds(toy(experts=True, seconds=0.5))
    assert {*second.baselines} - {*first.baselines} == {"expert x pipeline"}
    assert {*third.baselines} - {*second.baselines} == {"tensor x pipeline"}
    assert third.gap == inf  # no round has begun
    assert {*first.baselines} == {"DDP", "FSDP", "hybrid FSDP", "expert x FSDP", "tensor x FSDP"}
    assert first.ranking
    assert first.gap == inf
    assert not first.complete
    assert all(row.estimate.job.layout.pp == 1 for row in first.ranking)
    assert last.ranking[0].estimate.seconds <= first.ranking[0].estimate.seconds


def test_rows_with_offload_appear_once_the_search_is_widened() -> None:
    """Before, a plain layout that fits only with offload is among the plain ones alone."""
    first, *_, last = plans = [*search_rounds(toy(memory=0.17e9, seconds=0.1))]
    fsdp = first.baselines["FSDP"].fastest
    assert fsdp is not None
    assert fsdp.estimate.job.dp.offload == "cpu"
    assert last.widened
    for plan in plans:
        assert plan.widened or {row.estimate.job.dp.offload for row in plan.ranking} == {"none"}


def test_every_plain_layout_is_forbidden_or_shown_not_to_fit() -> None:
    plan = search(toy(experts=True, memory=1e7, seconds=0.5, fixed={"shard_states": (2,)}))
    reasons = {name: plain.missing for name, plain in plan.baselines.items()}
    assert reasons.pop("hybrid FSDP").startswith("none fits: dp4, micro 1, zero3 states over 2")
    plain = {"DDP", "FSDP", "expert x FSDP", "expert x pipeline", "tensor x FSDP", "tensor x pipeline"}
    assert set(reasons) == plain
    assert set(reasons.values()) == {"forbidden by --fix shard_states=2"}


def test_a_plain_layout_names_who_forbids_it() -> None:
    fixed = {"mode": ("ddp", "zero1"), "pp": (2,)}
    plan = search(toy(seconds=0.5, fixed=fixed, fixed_by={"mode": "megatron"}))
    missing = plan.baselines["FSDP"].missing
    assert missing == "forbidden by megatron mode=ddp,zero1 and --fix pp=2"
    assert plan.baselines["DDP"].missing == "forbidden by --fix pp=2"


def test_tensor_parallelism_in_a_node_is_combined_with_fsdp() -> None:
    plain = search(toy(seconds=0.5)).baselines["tensor x FSDP"]
    for row in (plain.fastest, plain.safe):
        assert row is not None
        job = row.estimate.job
        assert job.layout == Layout(tp=2, dp=2)
        assert (job.dp.mode, job.dp.shards["shard_states"]) == ("zero3", None)
        assert job.sequence_parallel
    one_node = replace(toy(), cluster=toy().cluster.sized(2))
    assert "tensor x FSDP" not in baseline_tasks(one_node)


def test_on_one_pipeline_rank_schedules_are_one_row() -> None:
    plan = search(toy(seconds=0.5, fixed={"schedule": ("1f1b", "gpipe"), "micro_batch": (1, 2)}))
    jobs = [row.estimate.job for row in plan.ranking]
    single = [(job.layout, job.micro_batch) for job in jobs if job.layout.pp == 1]
    piped = [(job.layout, job.micro_batch, job.schedule) for job in jobs if job.layout.pp > 1]
    assert single
    assert len({*single}) == len(single)
    assert {schedule for *_, schedule in piped} == {"1f1b", "gpipe"}


# ------------------------------------------------------------------ odd layouts


@pytest.mark.parametrize(
    ("layout", "odd"),
    [
        (Layout(tp=8, cp=2, dp=2, pp=4), ""),
        (Layout(tp=16, dp=8), "tp16 in nodes of 8"),
        (Layout(cp=4, dp=16), "cp4 of 8,192 tokens"),
        (Layout(cp=9, dp=8), "cp9 in nodes of 8, cp9 of 8,192 tokens"),
        (Layout(ep=24, dp=48), ""),
        (Layout(ep=40, dp=80), "ep40 in nodes of 8"),
        (Layout(tp=8, pp=5), ""),  # divides 80 blocks
        (Layout(tp=8, pp=12), ""),
        (Layout(tp=8, pp=29), "pp29"),
    ],
)
def test_what_a_cautious_engineer_would_call_odd_is_named(layout: Layout, odd: str) -> None:
    assert oddity(layout, asked("llama3-70b")) == odd


def test_many_experts_without_expert_parallelism_are_odd() -> None:
    many = asked("qwen3-235b-a22b")
    assert oddity(Layout(dp=64), many) == "128 experts without ep"
    assert not oddity(Layout(ep=8, dp=64), many)
    assert not oddity(Layout(dp=64), asked("mixtral-8x7b"))


LAYOUTS = (
    Layout(tp=8, dp=8),
    Layout(cp=2, dp=32),
    Layout(tp=16, dp=4),
    Layout(cp=4, dp=16),
    Layout(pp=8, dp=8),
)


def feasible(layout: Layout, seconds: float, memory: float) -> Feasible:
    """A candidate of 100 bytes of memory."""
    parallelism = Parallelism(
        layout=layout, expert_tp=None, micro_batch=1, sequence_parallel=False, context="ring"
    )
    size = Bytes(memory - 10, memory, memory + 10)
    fit = Fit(allocated=size, reserved=size, device=size, capacity=100.0, ranks=())
    candidate = Candidate(parallelism, ScheduleChoice("1f1b"), DataParallelSettings(), Saving())
    return Feasible(candidate, seconds, fit)


def test_the_search_counts_odd_layouts_as_slower() -> None:
    wanted = asked("llama3-70b")
    run = BranchAndBound(task=wanted, evaluator=CandidateEvaluator(wanted), wanted=1)
    run.accept([feasible(Layout(cp=4, dp=16), 1.0, 50)])
    assert run.best() == pytest.approx(1 + ODD)
    run.accept([feasible(Layout(cp=2, dp=32), 1.02, 50)])
    assert run.best() == 1.02


@given(
    st.lists(
        st.tuples(
            st.sampled_from(LAYOUTS),
            st.sampled_from([1.0, 1.005, 1.01, 1.025, 1.03, 1.035, 1.04, 1.065]),
            st.sampled_from([50.0, 75.0, 85.0, 95.0]),
        ),
        min_size=2,
        max_size=16,
    )
)
@example([(Layout(cp=4, dp=16), 1.0, 50.0), (Layout(tp=8, dp=8), 1.025, 50.0)])
def test_an_odd_row_never_comes_before_a_plain_one_that_is_little_slower(
    rows: list[tuple[Layout, float, float]],
) -> None:
    wanted, candidates = asked("llama3-70b"), [feasible(*row) for row in rows]
    order = sort_feasible(candidates, wanted)
    assert sorted(f.seconds for f in order) == sorted(f.seconds for f in candidates)
    odd = [bool(oddity(f.candidate.parallelism.layout, wanted)) for f in order]
    for at, earlier in enumerate(order):
        for place, later in enumerate(order[at + 1 :], at + 1):
            factor = later.seconds / earlier.seconds * (1 + 1e-9)
            if earlier.fit.verdict == later.fit.verdict and odd[at] > odd[place]:
                # unless it displaces a tight one that is as good as the plain one, or better
                tight = [f.seconds * (1 + TIGHT) for f in order[at:] if f.fit.verdict == "tight"]
                limits = earlier.seconds, later.seconds * (1 + TIE) * (1 + 1e-9)
                displaces = any(limits[0] <= seconds <= limits[1] for seconds in tight)
                assert factor >= 1 + ODD or (earlier.fit.verdict == "fits" and displaces)
            if earlier.fit.verdict == "tight" != later.fit.verdict:
                assert factor >= 1 + TIGHT


def test_an_odd_row_that_fits_comes_before_a_plain_one_that_may_not_and_is_little_faster() -> None:
    wanted = asked("llama3-70b")
    tight, odd = feasible(Layout(tp=8, dp=8), 1.0, 95), feasible(Layout(cp=4, dp=16), 1.029, 50)
    assert sort_feasible([tight, odd], wanted) == [odd, tight]
    slower = feasible(Layout(cp=4, dp=16), 1.031, 50)
    assert sort_feasible([tight, slower], wanted) == [tight, slower]
    plain = feasible(Layout(pp=8, dp=8), 1.045, 50)
    assert sort_feasible([plain, tight], wanted) == [tight, plain]
    assert sort_feasible([plain, tight, odd], wanted) == [odd, tight, plain]


@settings(max_examples=6, deadline=None)
@given(
    memory=st.floats(0.2e9, 0.6e9),
    schedules=st.lists(st.sampled_from(["1f1b", "zb-h1", "interleaved", "hanayo"]), min_size=1, max_size=2),
    experts=st.booleans(),
    first_round=st.floats(0.004, 0.03),
)
def test_more_work_gives_no_worse_first_or_safe_row_and_no_fewer_rows(
    memory: float, schedules: list[str], experts: bool, first_round: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.planner.search.work._FIRST_ROUND", first_round)
        fixed = {"schedule": tuple(schedules), "micro_batch": (1, 2)}
        plans = [
            search(toy(memory=memory, experts=experts, fixed=fixed, seconds=factor * first_round))
            for factor in (1, 2, 8)
        ]
    for plan in plans:
        plain = [row.fastest for row in plan.baselines.values() if row.fastest is not None]
        assert first_cost(plan) <= min(map(rank_cost, plain), default=inf) * (1 + 1e-9)
    for before, after in pairwise(plans):
        assert len(before.ranking) <= len(after.ranking)
        assert first_cost(after) <= first_cost(before) * (1 + TIE) * (1 + 1e-9)
        assert before.safe is None or after.safe is not None
        if before.safe is not None and after.safe is not None:
            costs = [
                row.estimate.seconds * cost_factor(row.estimate.job.layout, toy())
                for row in (after.safe, before.safe)
            ]
            assert costs[0] <= costs[1] * (1 + 1e-9)


def first_cost(plan: Plan) -> float:
    """What the first row is ranked by, or the tight one that it displaces; infinite if there is none."""
    return min(map(rank_cost, plan.ranking), default=inf)


def rank_cost(row: Ranked) -> float:
    estimate = row.estimate
    assert estimate.memory is not None
    tight = 1.0 if estimate.memory.verdict == "fits" else 1 + TIGHT
    return estimate.seconds * tight * cost_factor(estimate.job.layout, toy())
