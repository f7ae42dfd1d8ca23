"""Properties of a schedule, derived from small programs of it and from its options."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby

from stretto.errors import StrettoError
from stretto.program.program import Program
from stretto.program.schedules.registry import entry

_MOST_RANKS = 8  # of a sample program


def is_searched(name: str) -> bool:
    """True if its programs are found by search for given costs of stages."""
    return "costs" in entry(name).options


def trains(name: str) -> bool:
    """True if it has backwards."""
    program = _sample_of(name)
    return program is None or program.trains


def updates_within(name: str) -> bool:
    """True if it updates weights in the middle of the step, as asynchronous schedules do."""
    program = _sample_of(name)
    return program is not None and bool(program.versions)


def sweeps(name: str) -> bool:
    """True if a single rank has several stages and completes all microbatches of one before the next, so that
    parameters gathered stage by stage are gathered once for all microbatches.
    """
    if is_searched(name):
        return False
    try:
        program = entry(name).build(1, 4)
    except StrettoError:
        return False
    runs = sum(1 for _ in groupby(action.stage for action in program.orders[0]))
    return program.stages > 1 and runs < 2 * program.stages


def _sample_of(name: str) -> Program | None:
    """Return a small program, or None if the schedule is searched or not defined for few ranks; the only one
    of a file with a program.
    """
    user = entry(name).user
    if user is not None and user.program is not None:
        return user.program
    return None if is_searched(name) else _sample(entry(name).build)


@lru_cache(maxsize=256)
def _sample(build: Callable[..., Program]) -> Program | None:
    """Return a program of the smallest number of ranks from two on that the schedule accepts."""
    for ranks in range(2, _MOST_RANKS + 1):
        try:
            return build(ranks, 2 * ranks)
        except StrettoError:
            continue
    return None
