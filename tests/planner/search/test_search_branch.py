"""The search against brute force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings
from stretto.job.experts import ExpertShape
from stretto.job.finetune import TrainedParameters
from stretto.job.job import Job, Recompute
from stretto.job.presets import find_shape
from stretto.job.program import stages_of
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.assumptions import Assumptions
from stretto.planner.estimate import NOISE, estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.cluster import Cluster, NetworkLink
from stretto.planner.machines.device import Device
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.branch import BranchAndBound, first_true
from stretto.planner.search.evaluator import CandidateEvaluator
from stretto.planner.search.memory_bounds import MemoryBounds
from stretto.planner.search.ranking import (
    ODD,
    TIE,
    TIGHT,
    Feasible,
    Ranked,
    best_of_family,
    cost_factor,
    is_safe,
    sort_feasible,
)
from stretto.planner.search.search import search, search_rounds
from stretto.planner.search.space import Space, depth_of
from stretto.planner.search.task import (
    RANKED,
    Candidate,
    Parallelism,
    Saving,
    ScheduleChoice,
    SearchTask,
    job_to_plan,
)
from stretto.planner.search.time_bounds import TimeBounds
from stretto.planner.search.work import rounds

SHAPE = ModelShape(family="llama", layers=6, hidden=512, heads=8, kv_heads=4, vocab=4096, sequence=512)
BATCH = 16


def cluster(
    devices: int = 4, memory: float = 80e9, inner: float = 300e9, outer: float = 25e9, node: int = 2
) -> Cluster:
    device = Device(
        name="toy",
        tflops={"bf16": 312.0, "fp32": 19.5, "fp16": 312.0, "tf32": 156.0},
        memory=memory,
        bandwidth=2.0e12,
    )
    return Cluster(
        name="toy",
        device=device,
        node=node,
        inner=NetworkLink(inner, 5e-6, "NVLink 3"),
        outer=NetworkLink(outer, 1.5e-5, "InfiniBand HDR"),
        nodes=devices // node,
        price=2.0,
    )


def task(**fields: Any) -> SearchTask:
    defaults: dict[str, Any] = {
        "cluster": cluster(),
        "assumptions": Assumptions(reserve=0.0),
        "tolerance": 0.0,
        "seconds": None,
        "top": 4,
    }
    defaults |= fields
    job = defaults.pop("job", job_to_plan(shape=SHAPE, global_batch=BATCH, sequence=512))
    return SearchTask(job=job, cluster=defaults.pop("cluster"), **defaults)


def partly_frozen(job: Job, frozen: bool) -> Job:
    return replace(job, trained=TrainedParameters(freeze=("embed.*", "blocks.[0-4].*"))) if frozen else job


def every(task: SearchTask) -> Iterator[Candidate]:
    """All candidates, with the first saving of their ladder."""
    space = Space(task)
    for layout in space.layouts():
        for parallelism in space.parallelisms_of(*layout):
            for order in space.schedules(parallelism):
                for dp in space.sharings(parallelism.layout):
                    yield Candidate(parallelism, order, dp, space.first_saving())


def all_of(wanted: SearchTask) -> list[Feasible]:
    """Every legal candidate on a ladder of savings, with exact time and memory, without bounds."""
    space, bounds, feasible = Space(wanted), TimeBounds(wanted), list[Feasible]()
    for first in every(wanted):
        if space.illegal(first.job(wanted), ""):
            continue
        blocks = max(
            sum(1 <= layer <= SHAPE.layers for layer in stage)
            for stage in stages_of(SHAPE, 512, depth_of(first.schedule, first.parallelism.layout.pp))
        )
        ladder = space.savings(space.first_saving(), blocks, first.dp)
        feasible += _climbed(first, ladder, wanted, bounds)
    return feasible


def _climbed(
    first: Candidate, ladder: list[list[Saving]], wanted: SearchTask, bounds: TimeBounds
) -> list[Feasible]:
    feasible, before = list[Feasible](), [False] * len(ladder[0])
    for at, row in enumerate(ladder):
        now = list[bool]()
        for column, saving in enumerate(row):
            reached = (at == 0 and column == 0) or (column > 0 and now[-1]) or (at > 0 and before[column])
            wants_more = False
            if reached:
                candidate = replace(first, saving=saving)
                job, sized = candidate.job(wanted), bounds.cluster(first.parallelism.layout.world)
                fit = short_step_fit(job, sized, wanted.assumptions)
                wants_more = fit.verdict != "fits"
                if fit.likely:
                    seconds = estimate(job, sized, wanted.assumptions, memory=False).seconds
                    feasible.append(Feasible(candidate, seconds, fit))
            now.append(wants_more)
        before = now
    return feasible


def best(feasible: list[Feasible], wanted: SearchTask) -> list[Feasible]:
    """The first families in the order of their times, odd ones as if they were slower."""
    families: dict[object, list[Feasible]] = {}
    for plan in sorted(feasible, key=lambda f: cost(f, wanted)):
        if plan.candidate.family(wanted) not in families and len(families) == max(RANKED, wanted.top):
            break
        families.setdefault(plan.candidate.family(wanted), []).append(plan)
    return sort_feasible([best_of_family(family) for family in families.values()], wanted)[: wanted.top]


def cost(feasible: Feasible, wanted: SearchTask) -> float:
    return feasible.seconds * cost_factor(feasible.candidate.parallelism.layout, wanted)


_AT = Parallelism(layout=Layout(pp=4), expert_tp=None, micro_batch=1, sequence_parallel=False, context="ring")
_PARTS = [
    (_AT, ScheduleChoice(name), DataParallelSettings(mode="ddp"), Saving()) for name in ("1f1b", "hanayo")
]

FIXES: list[tuple[float, dict[str, tuple[Any, ...]]]] = [
    (
        0.35e9,
        {"pp": (2,), "micro_batch": (1,), "schedule": ("1f1b", "chimera"), "sequence_parallel": (True,)},
    ),
    (
        4e9,
        {"tp": (1,), "pp": (4,), "micro_batch": (2,), "schedule": ("gpipe", "hanayo", "dualpipe", "v-min")},
    ),
    (0.35e9, {"tp": (1,), "pp": (2,), "cp": (1,), "micro_batch": (4,), "schedule": ("zb-v", "zb-h1", "bfs")}),
    (0.2e9, {"pp": (1,), "cp": (1,), "tp": (1, 2), "micro_batch": (1,)}),
    (
        0.35e9,
        {"tp": (1,), "cp": (1,), "micro_batch": (2,), "schedule": ("1f1b", "pipedream", "pipedream-2bw")},
    ),
]


@pytest.mark.parametrize("seconds", [pytest.param(None, marks=pytest.mark.slow), 300.0])
@pytest.mark.parametrize(("memory", "fixed"), FIXES)
def test_the_search_equals_brute_force(
    memory: float, fixed: dict[str, tuple[Any, ...]], seconds: float | None
) -> None:
    """With a time limit a search first looks for something good, then proves it; its result is the same."""
    wanted = task(fixed=fixed, cluster=cluster(memory=memory), allow_offload=True, seconds=seconds)
    plan, everything = search(wanted), all_of(wanted)
    expected = best(everything, wanted)
    assert [round(ranked.estimate.seconds, 9) for ranked in plan.ranking] == [
        round(plan_by_hand.seconds, 9) for plan_by_hand in expected
    ]
    if expected:
        # one that surely fits, or the simpler of two, represents a family, if the other gains little
        least = min(f.seconds for f in everything)
        most = least * (1 + TIGHT) * (1 + ODD) * (1 + TIE)
        assert least <= min(ranked.estimate.seconds for ranked in plan.ranking) <= most
        safe = [f for f in everything if is_safe(f.fit, 0.0)]
        assert (plan.safe is None) == (not safe)
        if plan.safe is not None:
            fastest = min(safe, key=lambda f: cost(f, wanted))
            assert plan.safe.estimate.seconds == pytest.approx(fastest.seconds)
        assert plan.gap == 0.0
        assert plan.complete
        assert plan.replayed <= len(everything) + len(plan.evaluated)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    inner=st.floats(1e9, 1e12),
    outer=st.floats(1e8, 1e11),
    memory=st.sampled_from([0.3e9, 0.5e9, 80e9]),
    latency=st.floats(0.0, 1e-3),
)
def test_the_best_is_found_on_any_cluster(inner: float, outer: float, memory: float, latency: float) -> None:
    toy = cluster(memory=memory, inner=inner, outer=outer)
    toy = replace(toy, outer=replace(toy.outer, latency=latency))
    fixed = {"micro_batch": (2,), "schedule": ("1f1b", "zb-v", "chimera"), "sequence_parallel": (False,)}
    wanted = task(fixed=fixed, cluster=toy, top=2)
    plan, everything = search(wanted), all_of(wanted)
    if everything:
        fastest = min(f.seconds for f in everything)
        weighed = [t.seconds for t in plan.evaluated if not t.lower_bound and t.memory <= memory]
        assert min(weighed) == pytest.approx(fastest)
        # a variant of its layout that is as fast within the noise may stand for it
        assert min(ranked.estimate.seconds for ranked in plan.ranking) <= fastest * (1 + NOISE)


@pytest.mark.parametrize(
    ("fixed", "share"),
    [
        ({}, 97),
        ({"schedule": ("1f1b", "pipedream", "pipedream-2bw"), "pp": (2, 4), "mode": ("ddp",)}, 3),
        ({"frozen": ()}, 97),
    ],
)
def test_time_bounds_are_below_exact_times(fixed: dict[str, tuple[Any, ...]], share: int) -> None:
    job = partly_frozen(job_to_plan(shape=SHAPE, global_batch=BATCH, sequence=512), "frozen" in fixed)
    choices = {name: values for name, values in fixed.items() if name != "frozen"}
    wanted = task(job=job, fixed={"micro_batch": (1, 4), **choices}, allow_offload=True)
    bounds, space, seen = TimeBounds(wanted), Space(wanted), 0
    for at, candidate in enumerate(every(wanted)):
        if at % share or space.illegal(candidate.job(wanted), ""):
            continue
        job = candidate.job(wanted)
        exact = estimate(job, wanted.cluster, wanted.assumptions, memory=False).seconds * (1 + 1e-9)
        assert bounds.parallelism(candidate.parallelism) <= exact, candidate
        assert bounds.schedule(candidate.parallelism, candidate.schedule, candidate.saving) <= exact, (
            candidate
        )
        assert bounds.candidate(candidate, job) <= exact, candidate
        seen += 1
    assert seen > 5


def test_tokens_per_dollar_may_prefer_fewer_devices() -> None:
    wanted = task(objective="tokens_per_dollar", smaller=True, top=3)
    plan = search(wanted)
    assert plan.ranking[0].estimate.job.layout.world < 4
    assert plan.ranking[0].tokens_per_dollar == pytest.approx(
        plan.ranking[0].estimate.tokens_per_s * 3600 / (2.0 * plan.ranking[0].estimate.job.layout.world)
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_memory_bounds_are_below_exact_memory(frozen: bool) -> None:
    job = partly_frozen(job_to_plan(shape=SHAPE, global_batch=BATCH, sequence=512), frozen)
    wanted = task(job=job, fixed={"micro_batch": (1, 4)}, allow_offload=True)
    least, space, seen = MemoryBounds(wanted), Space(wanted), 0
    for at, candidate in enumerate(every(wanted)):
        if at % 97 or space.illegal(candidate.job(wanted), ""):
            continue
        for again in (Recompute(), Recompute("full")):
            saving_candidate = replace(candidate, saving=Saving(again))
            exact = short_step_fit(
                saving_candidate.job(wanted), wanted.cluster, wanted.assumptions
            ).allocated.mid
            assert least.of(saving_candidate).total <= exact, saving_candidate
        seen += 1
    assert seen > 5


def test_rows_of_savings_are_bounded_as_each_alone() -> None:
    """In any order, whatever was bounded before."""
    wanted = task(fixed={"micro_batch": (1, 4)})
    space, together = Space(wanted), MemoryBounds(wanted)
    seen = 0
    for candidate in list(every(wanted))[::41]:
        row = space.savings(Saving(), 5, candidate.dp)[0]
        for savings in (row, row[:0:-2], row[::-1]):
            each = [MemoryBounds(wanted).of(replace(candidate, saving=saving)).total for saving in savings]
            bounds = together.of_rows([candidate.parallelism], candidate.schedule, [candidate.dp], savings)
            assert bounds == [each]
            seen += len({*each}) > 2
    assert seen > 10


def test_splits_are_bounded_together_as_each_alone() -> None:
    wanted, seen = task(), 0
    space, bounds = Space(wanted), TimeBounds(wanted)
    savings = [Saving(), Saving(Recompute("full", 1)), Saving(Recompute("full"))]
    groups = dict[tuple[ScheduleChoice, int], list[Parallelism]]()
    for candidate in list(every(wanted))[::7]:
        if space.exists(candidate.schedule, candidate.parallelism.layout.pp):
            key = candidate.schedule, candidate.parallelism.layout.pp
            groups.setdefault(key, []).append(candidate.parallelism)
    for (choice, _), splits in groups.items():
        chosen = [n % len(savings) for n in range(len(splits))]
        together = bounds.schedules(splits, choice, savings, chosen)
        alone = [bounds.schedule(p, choice, savings[n]) for p, n in zip(splits, chosen, strict=True)]
        assert together == pytest.approx(alone, rel=1e-12)
        seen += len(splits) > 2
    assert seen > 5


@pytest.mark.parametrize("first_round", [0.004, 0.03])
def test_a_search_that_is_cut_short_and_continues_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, first_round: float
) -> None:
    monkeypatch.setattr("stretto.planner.search.work._FIRST_ROUND", first_round)
    fixed = {"pp": (2,), "micro_batch": (1,), "schedule": ("1f1b", "chimera"), "sequence_parallel": (True,)}
    exact = search(task(cluster=cluster(memory=0.35e9), fixed=fixed, seconds=None))
    continued = search(task(cluster=cluster(memory=0.35e9), fixed=fixed, seconds=300.0))
    assert continued.complete
    assert [row.layout for row in continued.ranking] == [row.layout for row in exact.ranking]


def test_a_layout_that_surely_fits_comes_before_a_tight_one_that_is_little_faster() -> None:
    plan = search(task(cluster=cluster(memory=0.35e9), fixed={"micro_batch": (1, 2)}, top=10))
    verdicts = [(row.estimate.seconds, memory_of_row(row)) for row in plan.ranking]
    assert {verdict for _, verdict in verdicts} == {"fits", "tight"}
    for place, (seconds, verdict) in enumerate(verdicts):
        later = [s for s, v in verdicts[place + 1 :] if v == "fits"]
        assert verdict == "fits" or all(s > seconds * (1 + TIGHT) for s in later)
    layouts = [(row.estimate.job.layout, row.estimate.job.dp.mode) for row in plan.ranking]
    assert len({*layouts}) == len(layouts), "variants of a layout share one row"
    assert any(row.variants for row in plan.ranking)


def memory_of_row(row: Ranked) -> str:
    assert row.estimate.memory is not None
    return row.estimate.memory.verdict


def test_a_search_whose_plain_layouts_need_offload_considers_offload() -> None:
    plan = search(task(cluster=cluster(memory=0.12e9), seconds=60.0))
    assert any(plain.fastest is not None for plain in plan.baselines.values())
    assert plan.ranking
    assert plan.widened


def test_replays_are_reported_and_ties_go_to_the_simpler_layout() -> None:
    wanted = task(cluster=cluster(memory=80e9), fixed={"micro_batch": (1,), "tp": (1,), "pp": (2,)})
    plan = search(wanted)
    assert len(plan.evaluated) == plan.replayed > 0
    first, second = Candidate(*_PARTS[0]), Candidate(*_PARTS[1])
    assert first.complexity < second.complexity


def test_where_nothing_fits_the_nearest_layout_is_reported() -> None:
    wanted = task(cluster=cluster(memory=1e6), fixed={"micro_batch": (1,), "schedule": ("1f1b",)})
    plan = search(wanted)
    assert not plan.ranking
    assert plan.nearest is not None
    assert plan.nearest.reason.startswith("needs")
    assert plan.rejected["memory"].count


def test_what_does_not_fit_is_shown_with_the_common_schedule() -> None:
    alone = search(task(cluster=cluster(devices=1, node=1, memory=1e6), fixed={"micro_batch": (1,)}))
    assert alone.widened
    assert alone.nearest is not None
    assert alone.nearest.layout == "single, micro 1, recompute full, states on cpu"
    assert alone.rejected["memory"].example.startswith(
        "single, micro 1, recompute full, states on cpu: needs "
    )


def test_impossible_fixed_choices_are_errors() -> None:
    with pytest.raises(StrettoError, match=r"no layout of 4 devices is legal: forbidden by --fix tp=3\n"):
        search(task(fixed={"tp": (3,)}))
    wrong = [
        ({"tp": (3,)}, r"layout\.tp is 3: it must divide model\.heads, which is 8"),
        ({"tp": (1,), "cp": (6,), "context": ("ulysses",)}, r"layout\.context is ulysses: .*"),
        (
            {"dp": (6,), "micro_batch": (4,)},
            "dp6: microbatches of 4 do not divide the 2 samples of a replica",
        ),
    ]
    three = task(cluster=cluster(6), job=job_to_plan(shape=SHAPE, global_batch=12, sequence=512))
    for fixed, message in wrong:
        with pytest.raises(StrettoError, match=rf"^no layout is legal: {message}\n"):
            search(replace(three, fixed=fixed))
    with pytest.raises(StrettoError, match="no price"):
        search(task(cluster=replace(cluster(), price=None), objective="tokens_per_dollar"))


def test_memory_without_a_limit_always_fits() -> None:
    plan = search(task(cluster=cluster(memory=inf), fixed={"micro_batch": (2,), "schedule": ("1f1b",)}))
    assert plan.ranking
    assert plan.ranking[0].estimate.memory is not None
    assert plan.ranking[0].estimate.memory.verdict == "fits"


MIXED = ModelShape(
    family="llama",
    layers=6,
    hidden=512,
    heads=8,
    kv_heads=4,
    vocab=4096,
    sequence=512,
    moe=ExpertShape(experts=4, top_k=2, ffn=1024, dense_layers=2),
)


TWO_STACKS = ModelShape(
    family="t5", layers=6, encoder_layers=4, hidden=512, heads=8, vocab=4096, sequence=512
)


@pytest.mark.parametrize(("shape", "share"), [(MIXED, 89), (TWO_STACKS, 23)], ids=["experts", "encoder"])
def test_bounds_hold_where_blocks_differ(shape: ModelShape, share: int) -> None:
    job = job_to_plan(shape=shape, global_batch=BATCH, sequence=512, target_sequence=128)
    wanted = task(job=job, fixed={"micro_batch": (2,)}, allow_offload=True)
    bounds, least, space, seen = TimeBounds(wanted), MemoryBounds(wanted), Space(wanted), 0
    for at, candidate in enumerate(every(wanted)):
        if at % share or space.illegal(candidate.job(wanted), ""):
            continue
        for saving in (Saving(), Saving(Recompute("full", 1)), Saving(Recompute("full"), "cpu")):
            saving_candidate = replace(candidate, saving=saving)
            job = saving_candidate.job(wanted)
            time = estimate(job, wanted.cluster, wanted.assumptions, memory=False).seconds * (1 + 1e-9)
            memory = short_step_fit(job, wanted.cluster, wanted.assumptions).allocated.mid
            assert bounds.parallelism(saving_candidate.parallelism) <= time, saving_candidate
            assert bounds.schedule(saving_candidate.parallelism, saving_candidate.schedule, saving) <= time, (
                saving_candidate
            )
            assert bounds.candidate(saving_candidate, job) <= time, saving_candidate
            assert bounds.ideal(job.layout) <= time, saving_candidate
            assert least.of(saving_candidate).total <= memory, saving_candidate
        seen += 1
    assert seen > 10


@pytest.mark.parametrize(
    ("shape", "sequence"), [(find_shape("llama3-70b"), 4096), (MIXED, 512), (TWO_STACKS, 512)]
)
def test_the_floor_of_a_split_bounds_every_microbatch(shape: ModelShape, sequence: int) -> None:
    """Large products slow down with their operands."""
    job = job_to_plan(shape=shape, global_batch=64, sequence=sequence, target_sequence=128)
    wanted = task(job=job, cluster=find_cluster("dgx-h100", 16))
    bounds, space = TimeBounds(wanted), Space(wanted)
    ratios = [
        bounds.floor(replace(parallelism, micro_batch=64), parallelism.micro_batch)
        / bounds.parallelism(parallelism)
        for layout, expert_tp in space.layouts()
        for parallelism in space.parallelisms_of(layout, expert_tp)
    ]
    assert 0.6 < max(ratios) < 1 + 1e-9
    assert len(ratios) > 100


@pytest.mark.parametrize("shape", [MIXED, TWO_STACKS])
def test_layers_that_splits_share_are_priced_as_for_each_alone(shape: ModelShape) -> None:
    job = job_to_plan(shape=shape, global_batch=64, sequence=512, target_sequence=128)
    wanted = task(job=job, cluster=find_cluster("dgx-h100", 16))
    shared, space, seen = TimeBounds(wanted), Space(wanted), 0
    splits = [split for sized in space.layouts() for split in space.parallelisms_of(*sized)]
    for split in splits:
        shared.layers(split, "none", "both")
    for split in splits[::37]:
        for mode in ("none", "full"):
            assert shared.layers(split, mode, "both") == TimeBounds(wanted).layers(split, mode, "both")
            seen += split.layout.ep > 1
    assert seen > 5 or shape.moe is None


def test_a_pass_without_time_to_expand_a_layout_is_cut_short() -> None:
    wanted = task(fixed={"tp": (1,), "cp": (1,), "pp": (1,)}, seconds=1.0)
    exact = CandidateEvaluator(wanted)
    exact.work.begin(1e-6)
    run = BranchAndBound(task=wanted, evaluator=exact, wanted=1)
    run.run()
    assert run.cut_short
    assert not run.candidates
    assert 0 < run.unexamined_cost < inf


def test_each_round_dives_before_it_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = task(fixed={"tp": (1,), "cp": (1,), "pp": (1, 2)}, seconds=60.0)
    run = BranchAndBound(task=wanted, evaluator=CandidateEvaluator(wanted), wanted=1)
    run.evaluator.work.begin(60.0)
    dives, expand = list[bool](), vars(BranchAndBound)["_expand_layouts"]

    def recorded(this: BranchAndBound) -> None:
        dives.append(vars(this)["_dives"])
        expand(this)

    monkeypatch.setattr(BranchAndBound, "_expand_layouts", recorded)
    run.run()
    assert not run.cut_short
    assert dives[0]
    assert not dives[-1]  # proved
    dives.clear()
    run.run()
    assert dives[0]


def test_the_floor_of_a_measured_device_is_that_of_its_peak() -> None:
    """Measured rates need not fall with the size of a microbatch."""
    measured = replace(cluster().device, kernels={"passes": {"copy": [[1e6, 1e-3]]}})
    bounds = TimeBounds(task(cluster=replace(cluster(), device=measured)))
    assert bounds.floor(_AT, 1) == bounds.ideal(_AT.layout)


def test_the_bound_of_blocks_that_differ_counts_each_kind() -> None:
    dense = replace(MIXED, moe=None)
    parallelism = replace(_AT, layout=Layout(), micro_batch=2)

    def bound(shape: ModelShape) -> float:
        job = job_to_plan(shape=shape, global_batch=BATCH, sequence=512)
        return TimeBounds(task(job=job)).parallelism(parallelism)

    assert MIXED.moe is not None
    sparse = replace(MIXED, moe=replace(MIXED.moe, dense_layers=0))
    assert bound(dense) < bound(MIXED) < bound(sparse)
    assert bound(MIXED) == pytest.approx((2 * bound(dense) + 4 * bound(sparse)) / 6, rel=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved"])
def test_the_bound_of_partial_recomputation_counts_the_kinds_that_are_repeated(name: str) -> None:
    """The middle stages have experts only: their recomputation is not bounded by that of a dense block."""
    assert MIXED.moe is not None
    shape = replace(MIXED, layers=12, vocab=128, moe=replace(MIXED.moe, ffn=8192))
    job = job_to_plan(shape=shape, global_batch=4 * BATCH, sequence=512)
    wanted = task(job=job, cluster=cluster(inner=1e13, outer=1e13))
    options = (("chunks", 2),) if name == "interleaved" else ()
    schedule = ScheduleChoice(name, options)
    parallelism = replace(_AT, layout=Layout(pp=4), micro_batch=1)
    bounds = TimeBounds(wanted)
    none, one_block, every = (
        bounds.schedule(parallelism, schedule, Saving(again))
        for again in (Recompute(), Recompute("full", 1), Recompute("full"))
    )
    least = [bounds.layers(parallelism, mode, "both").blocks for mode in ("none", "full")]
    dense, experts = (again.work - once.work for once, again in zip(*least, strict=True))
    microbatches, stages = 4 * BATCH, dict(options).get("chunks", 1)
    assert one_block - none > 0.99 * microbatches * stages * experts > 2 * microbatches * stages * dense
    assert one_block < every
    for saving in (Saving(Recompute("full", 1)), Saving(Recompute("full"))):
        candidate = Candidate(parallelism, schedule, DataParallelSettings(mode="ddp"), saving)
        exact = estimate(candidate.job(wanted), wanted.cluster, wanted.assumptions, memory=False)
        assert bounds.schedule(parallelism, schedule, saving) <= exact.seconds * (1 + 1e-9)


def test_what_bounds_do_not_see_of_a_schedule_is_learnt_from_its_replays() -> None:
    wanted = task()
    exact = CandidateEvaluator(wanted)
    one_wave, two_waves = (ScheduleChoice("hanayo", (("waves", waves),)) for waves in (1, 2))
    before = exact.excess(one_wave)
    candidate = Candidate(
        replace(_AT, layout=Layout(pp=2)), one_wave, DataParallelSettings(mode="ddp"), Saving()
    )
    ratio = exact.seconds(candidate) / exact.bounds.candidate(candidate, candidate.job(wanted))
    assert exact.excess(one_wave) == exact.excess(two_waves) == pytest.approx((before + ratio) / 2) != before
    assert exact.excess(ScheduleChoice("1f1b")) == before


@pytest.mark.parametrize(
    ("memory", "fixed", "rows_in_all"),
    [
        (*FIXES[2], 5),
        (
            0.5e9,
            {"tp": (1, 2), "cp": (1,), "micro_batch": (1, 2), "schedule": ("1f1b", "zb-h1", "hanayo")},
            26,
        ),
    ],
)
def test_the_first_rows_do_not_depend_on_how_many_are_wanted(
    memory: float, fixed: dict[str, tuple[Any, ...]], rows_in_all: int
) -> None:
    plans = [search(task(fixed=fixed, cluster=cluster(memory=memory), top=top)) for top in (1, 3, 10, 40)]
    rows = [[ranked.layout for ranked in plan.ranking] for plan in plans]
    longest = rows[-1]
    assert len(longest) >= rows_in_all
    assert all(of_plan == longest[: len(of_plan)] for of_plan in rows)
    assert [len(of_plan) for of_plan in rows[:2]] == [1, 3]


def test_safe_and_plain_layouts_are_beside_the_fastest() -> None:
    plan = search(task(cluster=cluster(memory=0.9e9), fixed={"micro_batch": (1, 2)}, allow_offload=True))
    jobs = {name: plain.fastest.estimate.job for name, plain in plan.baselines.items() if plain.fastest}
    for name, mode, shards in (("DDP", "ddp", None), ("FSDP", "zero3", None), ("hybrid FSDP", "zero3", 2)):
        assert jobs[name].layout == Layout(dp=4)
        assert (jobs[name].dp.mode, jobs[name].dp.shard_states) == (mode, shards)
    assert jobs["tensor x pipeline"].layout.tp == 2  # the node
    assert plan.safe is not None
    assert plan.safe.estimate.memory is not None
    assert plan.safe.estimate.memory.verdict == "fits"
    roomy = search(
        task(
            cluster=cluster(memory=0.9e9),
            fixed={"micro_batch": (1, 2)},
            allow_offload=True,
            memory_headroom=0.5e9,
        )
    )
    assert roomy.safe is not None
    fit = roomy.safe.estimate.memory
    assert fit is not None
    assert fit.capacity - fit.device.high >= 0.5e9
    assert roomy.safe.estimate.seconds >= plan.safe.estimate.seconds


def large_task(seconds: float, **fields: Any) -> SearchTask:
    """A search that takes longer than `seconds` to prove its result."""
    job = job_to_plan(shape=find_shape("llama3-70b"), global_batch=512, sequence=8192)
    return SearchTask(job=job, cluster=find_cluster("dgx-h100", 64), seconds=seconds, **fields)


def test_a_search_that_proves_nothing_prices_the_plain_layouts() -> None:
    plan = search(large_task(0.1))
    assert not plan.complete
    assert 0 < plan.gap < inf
    for name in ("FSDP", "hybrid FSDP", "tensor x pipeline"):
        plain, safe = plan.baselines[name].fastest, plan.baselines[name].safe
        assert plain is not None
        assert safe is not None
        assert memory_of_row(safe) == "fits"
        assert safe.layout == plain.layout or memory_of_row(plain) == "tight"
        assert plain.estimate.seconds == estimate(plain.estimate.job, large_task(0.1).cluster).seconds
        assert plain.estimate.job.layout in [row.estimate.job.layout for row in plan.ranking]
    needs = plan.baselines["DDP"].missing
    assert needs.startswith("none fits: dp64, micro 1, ddp, recompute full needs at least 1233 of 79.11 GiB")
    excluded = search(large_task(0.1, fixed={"tp": (4,)})).baselines
    assert (excluded["FSDP"].fastest, excluded["FSDP"].missing) == (None, "forbidden by --fix tp=4")
    assert excluded["tensor x pipeline"].fastest is not None
    assert excluded["tensor x pipeline"].fastest.estimate.job.layout.tp == 4
    too_large = search(replace(large_task(0.1), cluster=find_cluster("dgx-v100", 8)))
    assert too_large.baselines["FSDP"].missing.startswith("none fits: dp8, micro 1, zero3")
    uneven = search(replace(large_task(0.1), cluster=find_cluster("dgx-h100", 24)))
    assert uneven.baselines["FSDP"].missing == "not legal: dp24: 24 replicas do not divide a batch of 512"


def test_more_work_finds_nothing_worse_and_a_busy_machine_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [search(large_task(seconds)) for seconds in (0.25, 0.5)]
    for before, after in pairwise(plans):
        assert len(before.ranking) <= len(after.ranking)
        assert after.ranking[0].estimate.seconds <= before.ranking[0].estimate.seconds * (1 + TIE)
        assert after.safe is not None
        assert before.safe is None or after.safe.estimate.seconds <= before.safe.estimate.seconds
        assert after.replayed >= before.replayed
    assert [*rounds(1.9)] == [*rounds(1.0)] == [0.0625, 0.4375, 0.5]
    first, *_, last = search_rounds(large_task(0.25))
    assert first.ranking
    assert first.candidates < last.candidates
    assert [(row.layout, row.estimate.seconds) for row in last.ranking] == [
        (row.layout, row.estimate.seconds) for row in plans[0].ranking
    ]
    clock = count(0, 1000)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("stretto.planner.search.search.perf_counter", lambda: float(next(clock)))
    again = search(large_task(0.5))
    assert [(row.layout, row.estimate.seconds) for row in again.ranking] == [
        (row.layout, row.estimate.seconds) for row in plans[1].ranking
    ]
    assert again.evaluated == plans[1].evaluated


def test_a_batch_that_no_replicas_can_share_is_an_error() -> None:
    job = job_to_plan(shape=SHAPE, global_batch=15, sequence=512)
    with pytest.raises(
        StrettoError, match="batch is 15, which has no common divisor with the 4 devices"
    ) as error:
        search(task(job=job))
    assert error.value.hint == "nearest is 16; or fix dp=1"
    assert search(task(job=job, fixed={"dp": (1,), "schedule": ("1f1b",)})).ranking


def test_the_first_index_is_found_from_any_guess() -> None:
    for end in range(9):
        for first in range(end + 1):
            for start in range(first + 1):
                for guess in range(start, end + 1):
                    assert first_true(lambda at, first=first: at >= first, start, guess, end) == first


def test_a_fixed_mode_leaves_out_layouts_that_have_none_of_it() -> None:
    plan = search(task(fixed={"mode": ("zero3",), "micro_batch": (2,), "schedule": ("1f1b",)}))
    assert plan.ranking
    assert {ranked.estimate.job.dp.mode for ranked in plan.ranking} == {"zero3"}


@pytest.mark.parametrize("memory", [0.312e9, pytest.param(0.323e9, marks=pytest.mark.slow)])
def test_a_search_goes_on_until_a_layout_with_the_wanted_room_is_found(memory: float) -> None:
    fixed: dict[str, tuple[Any, ...]] = {"tp": (1, 2), "cp": (1,), "micro_batch": (1, 2, 4)}
    fixed["schedule"] = ("1f1b", "zb-h1", "hanayo", "interleaved")
    plan = search(task(fixed=fixed, cluster=cluster(memory=memory), top=14, memory_headroom=0.05e9))
    assert len(plan.ranking) == 14
    fits = [ranked.estimate.memory for ranked in plan.ranking]
    assert not any(fit is not None and is_safe(fit, 0.05e9) for fit in fits[:10])
    assert plan.safe is not None
    assert plan.safe.estimate.memory is not None
    assert is_safe(plan.safe.estimate.memory, 0.05e9)
