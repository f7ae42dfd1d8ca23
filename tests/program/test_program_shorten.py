"""Short steps: steady periods cut out of programs."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.program import check, lower, names, options, schedule
from stretto.program.memory import peak_held
from stretto.program.schedules.traits import is_searched, sweeps, trains, updates_within
from stretto.program.transforms.shorten import shorten

STEADY = [name for name in names() if trains(name) and not is_searched(name) and not updates_within(name)]
HOLDS_ALL = ("gpipe", "bfs")


def ways(name: str, pp: int) -> list[dict[str, Any]]:
    """Options to look at with each schedule."""
    taken = options(name)
    choices: list[dict[str, Any]] = [{}]
    if "chunks" in taken:
        choices.append({"chunks": 3})
    if "waves" in taken:
        choices += [{"waves": 2}, {"waves": 3}]
    if "group" in taken:
        choices.append({"group": 2 * pp})
    return choices


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("pp", [2, 4, 6])
def test_a_short_step_is_a_program_that_holds_as_much(name: str, pp: int) -> None:
    for choice in ways(name, pp):
        for microbatches in (24 * pp, 24 * pp + 1):
            full = schedule(name, pp, microbatches, **choice)
            short = shorten(full)
            assert peak_held(short) == peak_held(full)
            if name in HOLDS_ALL:
                assert short is full
                continue
            if microbatches == 24 * pp:  # a short last group may change an order far into the step
                assert short.microbatches <= 14 * pp
            check(lower(short))
            gone = microbatches - short.microbatches
            assert len(full.pairs) - len(short.pairs) == (full.depth * gone if full.pairs else 0)


@pytest.mark.parametrize("name", STEADY)
def test_a_short_step_is_left_as_it_is(name: str) -> None:
    for microbatches in (1, 2, 5):
        full = schedule(name, 4, microbatches)
        assert shorten(full) is full


def test_traits_of_programs_are_those_of_the_papers() -> None:
    assert {name for name in names() if updates_within(name)} == {"pipedream", "pipedream-2bw"}
    assert {name for name in names() if not trains(name)} == {"forward-only"}
    assert {name for name in names() if is_searched(name)} == {"auto"}
    assert {name for name in names() if sweeps(name) and trains(name)} == {"bfs"}


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw", "forward-only"])
def test_programs_that_are_no_synchronous_step_stay_whole(name: str) -> None:
    full = schedule(name, 2, 40)
    assert shorten(full) is full
