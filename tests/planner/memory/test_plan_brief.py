"""Memory of long steps from short ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.planner.memory.brief import brief, brief_memory
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory
from stretto.spec.data_parallel import DataParallel, Precision
from stretto.spec.job import Job
from stretto.spec.shape import ModelShape

STEADY = ("1f1b", "1f1b-eager", "interleaved", "interleaved-zb", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")


def job(schedule: str, pp: int, microbatches: int, layers: int, mode: str, **options: Any) -> Job:
    shape = ModelShape(family="llama", layers=layers, hidden=64, heads=4, vocab=500, sequence=128)
    dp = DataParallel(mode=mode)  # pyright: ignore[reportArgumentType]
    layout = Layout(dp=2, pp=pp)
    return Job(
        shape=shape,
        layout=layout,
        global_batch=2 * microbatches,
        micro_batch=1,
        sequence=128,
        schedule=schedule,
        options=options,
        dp=dp,
        precision=Precision(dtype="bfloat16"),
    )


@given(
    st.sampled_from(STEADY),
    st.integers(1, 4),
    st.integers(2, 7),
    st.integers(6, 10),
    st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
)
@settings(max_examples=15, deadline=None)
def test_more_microbatches_hold_no_more(schedule: str, pp: int, groups: int, layers: int, mode: str) -> None:
    """The whole step's fullest rank is found in the short one, to the byte, for any cut into stages."""
    options = {"chunks": 2} if schedule.startswith("interleaved") else {}
    given_job = job(schedule, pp, groups * pp, layers, mode, **options)
    try:
        whole = rank_memory(memory_of(given_job))
    except StrettoError:
        return  # no such program
    assert max(r.total for r in brief_memory(given_job)) == max(r.total for r in whole)
    every = brief_memory(given_job, every=True)
    assert [r.total for r in every] == [r.total for r in whole]


def test_long_steps_are_cut_short() -> None:
    assert (
        brief(job("interleaved", 4, 103, 8, "ddp", chunks=2)).microbatches == 19
    )  # the rest of a period is kept
    assert brief(job("1f1b", 1, 100, 8, "ddp")).microbatches == 4
    assert brief(job("1f1b", 4, 5, 8, "ddp")).microbatches == 5


@pytest.mark.parametrize("schedule", ["gpipe", "bfs"])
def test_schedules_that_hold_all_are_left(schedule: str) -> None:
    assert brief(job(schedule, 2, 64, 8, "ddp")).microbatches == 64
