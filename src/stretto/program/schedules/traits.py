"""What a schedule is like, read from its own small programs and from the options it takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import groupby

from stretto.errors import StrettoError
from stretto.program.program import Program
from stretto.program.schedules.registry import entry

_MOST_RANKS = 8  # of a sample


def is_searched(name: str) -> bool:
    """True if its programs are searched for, for given costs of stages, and none is made without them."""
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
    """True if a rank alone has several stages, and does all of one before it turns to the next: parameters
    that are gathered stage by stage are gathered once for all microbatches.
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
    """A small program, or None if it is searched or not defined for so few ranks."""
    return None if is_searched(name) else _sample(entry(name).build)


@lru_cache(maxsize=256)
def _sample(build: Callable[..., Program]) -> Program | None:
    """A program of the fewest ranks from two on."""
    for ranks in range(2, _MOST_RANKS + 1):
        try:
            return build(ranks, 2 * ranks)
        except StrettoError:
            continue
    return None
