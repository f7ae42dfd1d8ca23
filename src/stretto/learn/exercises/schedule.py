"""Grades `schedule`: a program that beats 1F1B at equal memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import getfile
from random import Random
from typing import Any

from stretto.errors import StrettoError
from stretto.learn.checks import Check, at_most
from stretto.program import schedule
from stretto.program.replay import Costs, simulate

RANKS = 1
TEMPLATE = '''def program(ranks: int, microbatches: int) -> list[list[str]]:
    """Return the actions of every rank in order, such as [["0F0", "0I0", "0W0"]] for one rank.

    Args:
        ranks: pipeline ranks p, at least 2.
        microbatches: m, at least p.
    """
    raise NotImplementedError
'''
TIMES = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 0.9, 0.9))  # of F, I and W


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Replay the program beside 1F1B's."""
    cases = [(2, 2), (4, 8), *((p, p + random.randint(0, 9)) for p in random.sample(range(3, 9), 2))]
    for ranks, microbatches in cases:
        case = f"p={ranks}, m={microbatches}"
        reader["program"](ranks, microbatches)  # an exception of its own is reported with its line
        try:
            program = schedule(f"{getfile(reader['program'])}:program", ranks, microbatches)
        except StrettoError as error:
            yield Check(f"{case}: it runs", str(error))
            return
        yield Check(f"{case}: it runs")
        yield at_most(
            f"{case}: memory",
            max(simulate(program).peak_activations),
            min(ranks, microbatches),
            "the fullest rank holds {actual} microbatches, 1F1B at most {limit}: run a W before that F",
        )
        for forward, backward, weight in TIMES:
            costs = Costs(F=forward, I=backward, W=weight)
            timeline, other = simulate(program, costs), simulate(schedule("1f1b", ranks, microbatches), costs)
            yield at_most(
                f"{case}: time at F={forward:g}, I={backward:g}, W={weight:g}",
                timeline.makespan,
                other.makespan * (1 - 1e-7),  # less
                f"it takes {{actual}}, 1F1B {{limit}}: ranks are idle for {timeline.bubble.barrier:g}",
            )
