"""Schedules registered by a user: their memory and time are those of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import pytest

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job
from stretto.job.presets import preset
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.layout.placement import linear
from stretto.planner.estimate import estimate
from stretto.planner.machines.catalogue import find_cluster
from stretto.planner.machines.device import Device
from stretto.planner.memory.fits import fit
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory
from stretto.planner.memory.short_step import short_program, short_step_memory
from stretto.planner.run_scores import short_step_estimate
from stretto.planner.search.fixed import fixed
from stretto.planner.search.memory_bounds import MemoryBounds, peak_states
from stretto.planner.search.search import search
from stretto.planner.search.task import (
    Candidate,
    Parallelism,
    Saving,
    ScheduleChoice,
    SearchTask,
    job_to_plan,
)
from stretto.program import check, lower, schedule
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program
from stretto.program.schedules import registry
from stretto.program.schedules.one_f_one_b import alternate

SHAPE = ModelShape(family="llama", layers=10, hidden=512, heads=8, vocab=3000, sequence=512)
Orders = Callable[[int, int, int], tuple[Action, ...]]  # of (rank, ranks, microbatches)


def forwards(rank: int, microbatches: int) -> list[Action]:
    return [Action(rank, ActionKind.F, i) for i in range(microbatches)]


def backwards(rank: int, microbatches: int) -> list[Action]:
    return [Action(rank, ActionKind.B, i) for i in range(microbatches)]


def newest_first(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards, the newest first."""
    return (*forwards(rank, microbatches), *reversed(backwards(rank, microbatches)))


def hoards(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Holds min(m, 3p)."""
    return alternate(forwards(rank, microbatches), backwards(rank, microbatches), 3 * ranks - 1)


def half(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Two forwards for each backward, so that the first rank holds about m / 2."""
    order, started = list[Action](), 0
    for i in range(microbatches):
        target = min(microbatches, ranks - 1 - rank + 2 * (i + 1))
        order += [Action(rank, ActionKind.F, j) for j in range(started, target)]
        started = max(started, target)
        order.append(Action(rank, ActionKind.B, i))
    return tuple(order)


def threes(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """1f1b of groups of three, whatever the number of ranks."""
    groups = [range(at, min(at + 3, microbatches)) for at in range(0, microbatches, 3)]
    order, done = list[Action](), min(ranks - 1 - rank, len(groups))
    order += [Action(rank, ActionKind.F, i) for group in groups[:done] for i in group]
    for at, group in enumerate(groups):
        if done + at < len(groups):
            order += [Action(rank, ActionKind.F, i) for i in groups[done + at]]
        order += [Action(rank, ActionKind.B, i) for i in group]
    return tuple(order)


def rises(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """1f1b for two thirds of the step, then p more in flight: no shorter step of this schedule shows it."""
    order, started = list[Action](), 0
    for i in range(microbatches):
        more = ranks if 3 * i >= 2 * microbatches else 0
        target = min(microbatches, ranks - rank + i + more)
        order += [Action(rank, ActionKind.F, j) for j in range(started, target)]
        started = max(started, target)
        order.append(Action(rank, ActionKind.B, i))
    return tuple(order)


def all_by_two(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """Two ranks hold the whole batch, more ranks hold what 1f1b holds."""
    return newest_first(rank, 2, microbatches) if ranks < 3 else threes(rank, ranks, microbatches)


UNLISTED: dict[str, Orders] = {
    "test-newest-first": newest_first,
    "test-hoards": hoards,
    "test-half": half,
    "test-threes": threes,
    "test-rises": rises,
    "test-all-by-two": all_by_two,
}


def build(name: str, orders: Orders) -> Callable[[int, int], Program]:
    def program(ranks: int, microbatches: int) -> Program:
        each = tuple(orders(rank, ranks, microbatches) for rank in range(ranks))
        return Program(
            name=name,
            placement=linear(ranks),
            microbatches=microbatches,
            orders=each,
            parameters={"chunks": 1},
        )

    return program


@pytest.fixture(autouse=True)
def unlisted() -> Iterator[None]:
    for name, orders in UNLISTED.items():
        registry.register(name, "of a test")(build(name, orders))
    yield
    for name in UNLISTED:
        del registry._ENTRIES[name]


def job(name: str, shape: ModelShape, pp: int, microbatches: int) -> Job:
    layout = Layout(pp=pp)
    return Job(
        shape=shape,
        layout=layout,
        global_batch=microbatches,
        micro_batch=1,
        sequence=shape.sequence,
        schedule=name,
        precision=Precision(dtype="bfloat16"),
    )


@pytest.mark.parametrize("name", UNLISTED)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 50), (4, 64), (4, 97), (5, 121)])
def test_short_step_memory_of_unlisted_schedules_is_exact(name: str, pp: int, microbatches: int) -> None:
    check(lower(schedule(name, pp, microbatches)))
    full_job = job(name, SHAPE, pp, microbatches)
    totals = [rank.total for rank in rank_memory(memory_of(full_job))]
    assert [rank.total for rank in short_step_memory(full_job)] == totals
    assert max(rank.total for rank in short_step_memory(full_job)) == max(totals)


def test_steps_are_shortened_where_they_are_periodic() -> None:
    count = {name: short_program(job(name, SHAPE, 4, 300)).microbatches for name in UNLISTED}
    assert count["test-newest-first"] == count["test-half"] == 300
    assert count["test-hoards"] < 60
    assert count["test-threes"] < 60
    assert count["test-rises"] < 300


def test_the_newest_first_of_llama_holds_hundreds_of_gib() -> None:
    """4 ranks with 64 microbatches each, all of them in flight."""
    full_job, device = (
        job("test-newest-first", preset("llama3-8b"), 4, 64),
        Device(name="toy", tflops={"bf16": 312.0}, memory=inf, bandwidth=2e12),
    )
    exact = fit(rank_memory(memory_of(full_job)), device).allocated.mid
    assert fit(short_step_memory(full_job), device).allocated.mid == exact > 500 * 2**30


@pytest.mark.parametrize("name", UNLISTED)
def test_the_memory_bound_of_an_unlisted_schedule_is_below_the_whole_step(name: str) -> None:
    task = SearchTask(
        job=job_to_plan(shape=SHAPE, global_batch=64, sequence=SHAPE.sequence),
        cluster=find_cluster("dgx-a100-80gb", 4),
    )
    candidate = Candidate(
        Parallelism(
            layout=Layout(pp=4), expert_tp=None, micro_batch=1, sequence_parallel=False, context="ring"
        ),
        ScheduleChoice(name),
        DataParallelSettings(mode="ddp"),
        Saving(),
    )
    exact = max(rank.total for rank in rank_memory(memory_of(candidate.job(task))))
    assert MemoryBounds(task).of(candidate).total <= exact


def test_the_bound_counts_a_batch_that_is_held_whole() -> None:
    ranks = peak_states(ScheduleChoice("test-newest-first"), 4, 500)
    assert {states[0].in_flight for states in ranks.values()} == {(500,)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (at % 2)) for at, name in enumerate(UNLISTED)]
)
def test_a_plan_says_what_the_whole_step_holds_and_takes(name: str) -> None:
    cluster = find_cluster("dgx-a100-80gb", 8)
    choices = fixed([f"schedule={name}", "pp=4", "micro=1,2"])
    task = SearchTask(
        job=job_to_plan(shape=SHAPE, global_batch=192, sequence=SHAPE.sequence),
        cluster=cluster,
        fixed=choices,
        seconds=None,
    )
    plan = search(task)
    assert plan.ranking
    for ranked in (ranked.estimate for ranked in plan.ranking):
        full_step = estimate(ranked.job, cluster, task.assumptions)
        short = short_step_estimate(ranked.job, cluster, task.assumptions)
        assert ranked.memory is not None
        assert full_step.memory is not None
        assert short.memory is not None
        assert ranked.seconds == short.seconds == full_step.seconds
        assert ranked.memory.allocated == short.memory.allocated == full_step.memory.allocated
        assert ranked.memory.device == short.memory.device == full_step.memory.device


def test_a_schedule_that_refuses_these_ranks_is_left_out_of_the_plan() -> None:
    def refuses(ranks: int, microbatches: int) -> Program:
        raise StrettoError("ranks must be 1000")

    registry.register("test-refuses", "of a test")(refuses)
    try:
        task = SearchTask(
            job=job_to_plan(shape=SHAPE, global_batch=32, sequence=512),
            cluster=find_cluster("dgx-a100-80gb", 4),
            fixed=fixed(["pp=4"]),
            seconds=None,
        )
        assert search(task).ranking
    finally:
        del registry._ENTRIES["test-refuses"]


def test_a_plan_includes_registered_schedules() -> None:
    cluster = find_cluster("dgx-a100-80gb", 4)
    plan = search(
        SearchTask(
            job=job_to_plan(shape=SHAPE, global_batch=32, sequence=512),
            cluster=cluster,
            fixed=fixed(["pp=4"]),
            seconds=None,
            top=1000,
        )
    )
    assert {*UNLISTED} & {ranked.estimate.job.schedule for ranked in plan.ranking}
