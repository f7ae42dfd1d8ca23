"""Bubbles by each of the field's definitions, and their closed formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from stretto.program import Program
from stretto.program.replay import Timeline

# Bubble over ideal time of a schedule with equal stages and messages that take no time: p - 1 over this, in m
# microbatches of a step, v chunks, k steps. Huang et al. 2019, section 2.3; Narayanan et al. 2021
# (Megatron-LM), sections 2.2.1 and 2.2.2; Qi et al. 2024, section 2.3.
FORMULAS = {
    "naive": "1",
    "gpipe": "m",
    "1f1b": "m",
    "1f1b-eager": "m",
    "bfs": "v m",
    "interleaved": "v m",
    "pipedream": "k m",
    "pipedream-2bw": "k m",
    "zb-h1": "3 m",
}
_GROUPED = frozenset({"bfs", "interleaved", "pipedream-2bw", "zb-h1"})
_CLOSED = "the same in closed form, for equal stages and free messages"


def bubble_table(timelines: Sequence[Timeline], schedules: Sequence[str]) -> list[list[str]]:
    """Return a header and a row for each definition, with a column for each timeline.

    Args:
        schedules: the schedule of each timeline; "" for an order of one's own, which has no formula.
    """
    definitions: list[tuple[str, Callable[[Timeline, str], str]]] = [
        ("share of the step: bubble / makespan", lambda t, _: f"{t.bubble.rate:.1%}"),
        (_CLOSED, lambda t, name: closed_form(t.program, name, of_step=True)),
        (
            "share of the work: bubble / ideal, as in Megatron-LM's papers",
            lambda t, _: f"{t.bubble.over_ideal:.1%}",
        ),
        (f"{_CLOSED} ", lambda t, name: closed_form(t.program, name, of_step=False)),
        (
            "share of the longest rank's span, without a barrier (Qi et al. 2024)",
            lambda t, _: f"{t.span_rate:.1%}",
        ),
        ("idle share of all ranks' time", lambda t, _: f"{t.idle:.1%}"),
        ("idle share of the steady state", lambda t, _: f"{t.steady_rate:.1%}"),
        ("longest idle time within a rank's span", lambda t, _: f"{t.bubble.span:g}"),
    ]
    rows = [
        [definition, *(value(*pair) for pair in zip(timelines, schedules, strict=True))]
        for definition, value in definitions
    ]
    return [["bubble", *(t.program.name for t in timelines)], *(row for row in rows if any(row[1:]))]


def closed_form(program: Program, name: str, *, of_step: bool) -> str:
    """Return the formula of a schedule's bubble with its value, or "" if there is none.

    Args:
        of_step: as a share of the step, otherwise of the ideal time.
    """
    if name not in FORMULAS:
        return ""
    ideal = FORMULAS[name]
    sizes = {"m": program.step_microbatches, "v": program.depth // program.ranks, "k": program.steps}
    idle, work = program.ranks - 1, prod(sizes.get(part) or int(part) for part in ideal.split())
    text, total = (f"{ideal} + p - 1", work + idle) if of_step else (ideal, work)
    formula = f"(p - 1) / {text if text == 'm' else f'({text})'}" + " at F = I = W" * (name == "zb-h1")
    group = max(program.ranks, program.parameters.get("group", 0))
    if name in _GROUPED and program.step_microbatches % group:
        return f"{formula} if p or the group divides m"
    return f"{formula} = {idle}/{total} = {idle / total:.1%}"
