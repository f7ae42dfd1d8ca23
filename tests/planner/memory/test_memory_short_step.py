"""Memory of long steps from short ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.job.data_parallel import DataParallelSettings, Precision
from stretto.job.job import Job, Recompute
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import rank_memory
from stretto.planner.memory.short_step import short_program, short_step_memory
from stretto.program import names, options
from stretto.program.schedules.traits import is_searched, trains

STEADY = [name for name in names() if trains(name) and not is_searched(name)]


def job(schedule: str, pp: int, microbatches: int, layers: int, mode: str, **options: Any) -> Job:
    shape = ModelShape(family="llama", layers=layers, hidden=64, heads=4, vocab=500, sequence=128)
    dp = DataParallelSettings(mode=mode)  # pyright: ignore[reportArgumentType]
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
    st.integers(1, 6),
    st.integers(2, 90),
    st.integers(12, 20),
    st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_short_step_has_the_peak_of_longer_ones(
    schedule: str, pp: int, microbatches: int, layers: int, mode: str, size: int, every_block: bool
) -> None:
    """Every rank of the short step holds as much as in the whole one, to the byte, however it is cut."""
    sizes = {"chunks": size, "waves": size, "group": size * pp}
    chosen = {name: sizes[name] for name in options(schedule) if name in sizes}
    long_job = job(schedule, pp, microbatches, layers, mode, **chosen)
    long_job = replace(long_job, recompute=Recompute("full" if every_block else "none"))
    try:
        full = rank_memory(memory_of(long_job))
    except StrettoError:
        return  # no such program
    peaks = [(r.total, r.between_actions) for r in short_step_memory(long_job)]
    assert peaks == [(r.total, r.between_actions) for r in full]


def test_long_steps_are_shortened() -> None:
    interleaved = short_program(job("interleaved", 4, 103, 8, "ddp", chunks=2)).microbatches
    assert interleaved < 40
    assert interleaved % 4 == 103 % 4  # the rest of a period is kept
    assert short_program(job("1f1b", 1, 100, 8, "ddp")).microbatches < 8
    assert short_program(job("1f1b", 4, 5, 8, "ddp")).microbatches == 5
    assert short_program(job("1f1b", 16, 1000, 30, "ddp")).microbatches < 40


@pytest.mark.parametrize("schedule", ["gpipe", "bfs"])
def test_schedules_that_hold_the_whole_batch_are_not_shortened(schedule: str) -> None:
    assert short_program(job(schedule, 2, 64, 8, "ddp")).microbatches == 64


def test_automatic_recomputation_uses_the_whole_step() -> None:
    chosen = replace(job("1f1b", 2, 64, 8, "ddp"), recompute=Recompute("auto", memory_gib=1.0))
    assert short_program(chosen).microbatches == 64


@pytest.mark.parametrize(
    ("name", "more"), [("pipedream", {}), ("pipedream", {"vertical_sync": True}), ("pipedream-2bw", {})]
)
def test_a_rank_holds_no_more_in_a_longer_window(name: str, more: dict[str, Any]) -> None:
    """Whatever the microbatches of a step, an asynchronous pipeline fills over the steps."""
    for pp, microbatches in ((2, 1), (2, 6), (4, 1), (4, 2), (4, 6), (4, 24)):
        windowed = job(name, pp, microbatches, 12, "ddp", **more)
        assert windowed.window is not None
        windowed_memory = rank_memory(memory_of(windowed))
        assert [rank.total for rank in windowed_memory] == [
            r.total for r in rank_memory(memory_of(windowed, windowed.window(24)))
        ]
        assert [rank.total for rank in windowed_memory] == [
            rank.total for rank in short_step_memory(windowed)
        ]
        assert max(rank.versions for rank in windowed_memory) > 0
