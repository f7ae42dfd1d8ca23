"""Properties of every schedule, for all ranks, microbatches and options."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counted_calls import counted_calls
from stretto.errors import StrettoError
from stretto.program import ActionKind, Program, check, lower, names, options, schedule

FIXED = [name for name in names() if name != "auto"]
EVEN = ("dualpipe", "chimera")
ASYNCHRONOUS = ("pipedream", "pipedream-2bw")


@st.composite
def job(draw: st.DrawFn, name: str) -> tuple[int, int, dict[str, Any]]:
    """Ranks, microbatches and options that the schedule is defined for."""
    p = draw(st.integers(1, 4)) * 2 if name in EVEN else draw(st.integers(1, 8))
    m = draw(st.integers(1, 20))
    chosen: dict[str, Any] = {}
    if "chunks" in options(name):
        chosen["chunks"] = draw(st.integers(1, 4))
    if "waves" in options(name):
        chosen["waves"] = draw(st.integers(1, 4))
    if "vertical_sync" in options(name):
        chosen["vertical_sync"] = draw(st.booleans())
    if "steps" in options(name):
        chosen["steps"] = draw(st.integers(1, 4))
    if "group" in options(name):
        low, high = (1, m) if name == "pipedream-2bw" else sorted((p, m))
        chosen["group"] = draw(st.none() | st.integers(low, high))
    return p, m, chosen


def crossings(program: Program) -> int:
    """Messages between ranks: hops of the placement, there and back, for each microbatch of each copy."""
    there_and_back = 2 if program.trains else 1
    hops = [
        sum(
            program.placement[s] != program.placement[s + 1]
            for s in range(copy * program.depth, (copy + 1) * program.depth - 1)
        )
        for copy in range(program.copies)
    ]
    return there_and_back * sum(hops[copy] for copy in program.copy_of)


@pytest.mark.parametrize("name", FIXED)
@settings(max_examples=12)
@given(data=st.data())
def test_completes_before_and_after_lowering(name: str, data: st.DataObject):
    p, m, options = data.draw(job(name))
    program = schedule(name, p, m, **options)
    steps = options.pop("steps", 1)
    assert (program.name, program.ranks, program.microbatches) == (name, p, m * steps)
    assert (program.steps, program.step_microbatches) == (steps, m)
    assert check(program).transfers == crossings(program)
    assert check(lower(program)).transfers == crossings(program)
    recorded = {
        key: min(value, m) if key == "group" else value for key, value in options.items() if value is not None
    }
    assert recorded.items() <= program.parameters.items()
    assert bool(program.versions) == (name in ASYNCHRONOUS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
def test_completes_for_all_ranks_and_microbatches(name: str):
    for p in range(1, 9):
        for m in range(1, 21):
            if name not in EVEN or p % 2 == 0:
                check(lower(schedule(name, p, m)))


@pytest.mark.parametrize("name", FIXED)
def test_pairs_are_neighbours_in_the_order(name: str):
    for m in (3, 9, 17):
        program = schedule(name, 4, m)
        neighbours = {pair for order in program.orders for pair in pairwise(order)}
        assert program.pairs <= neighbours
        assert all(f.kind is ActionKind.F and b.kind is ActionKind.B for f, b in program.pairs)
        assert all(f.microbatch != b.microbatch for f, b in program.pairs)


def test_options_out_of_range_name_the_nearest():
    with pytest.raises(StrettoError, match=r"ranks is 5, must be even.*(?s:.*)ranks=6 or ranks=4"):
        schedule("dualpipe", 5, 8)
    with pytest.raises(StrettoError, match=r"ranks is 1, must be even.*(?s:.*)nearest is ranks=2$"):
        schedule("chimera", 1, 8)
    with pytest.raises(StrettoError, match=r"group is 9, must be 1 to 8(?s:.*)group=8"):
        schedule("pipedream-2bw", 4, 8, group=9)
    with pytest.raises(StrettoError, match=r"group is 2, must be 4 to 8(?s:.*)group=4"):
        schedule("interleaved-zb", 4, 8, group=2)
    with pytest.raises(StrettoError, match="vertical_sync is 1, must be true or false"):
        schedule("pipedream", 4, 8, vertical_sync=1)
    with pytest.raises(StrettoError, match="waves is 0"):
        schedule("hanayo", 4, 8, waves=0)
    with pytest.raises(StrettoError, match="chunks is 3, but schedule 'zb-v'"):
        schedule("zb-v", 4, 8, chunks=3)


@pytest.mark.parametrize("name", ["v-half", "interleaved", "hanayo"])
def test_work_grows_with_the_number_of_microbatches(name: str):
    """Of the list-scheduled ones: not with its square. Calls are counted, as time depends on the machine."""
    schedule(name, 8, 129)  # whose actions the others share
    few, many = (counted_calls(lambda m=m: schedule(name, 8, m)) for m in (33, 129))
    assert many < 5 * few
