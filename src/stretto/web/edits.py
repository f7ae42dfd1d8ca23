"""Answers while an action is moved: the checker's verdict, times and figures; and the memory of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stretto.program.checks.versions import live_versions
from stretto.program.replay import Timeline
from stretto.program.replay.timeline import live_bytes
from stretto.view.panel import activation_curves
from stretto.web.schedules import Question, figures_of, replay_program

Points = Iterable[tuple[float, float]]  # (time, value from then on)


def edit(question: Question) -> dict[str, Any]:
    """Replay an edited program: the checker's verdict, the times of actions, and the figures if it runs."""
    timeline, verdict = replay_program(question["program"], question.get("costs", {}))
    answer = {
        **verdict,
        "starts": timeline.starts,
        "ends": timeline.ends,
        "held": activation_curves(timeline),
    }
    if verdict["legal"]:
        answer["figures"] = figures_of(timeline)
    return answer


def memory(question: Question) -> dict[str, Any]:
    """Answer what each rank holds over time, by kind, and how many versions of its weights.

    Sizes are in the unit of the cost `activations`; without it, a microbatch in all stages of a rank is 1.
    """
    cost_fields = question.get("costs", {})
    timeline, verdict = replay_program(question["program"], cost_fields)
    if not verdict["legal"]:
        return {"kinds": [], "ranks": [], "versions": []}
    if "activations" not in cost_fields:
        program = timeline.program
        shares = [program.copies / program.placement.count(rank) for rank in program.placement]
        timeline = replace(timeline, costs=replace(timeline.costs, activations=shares))
    total = _curves(timeline)
    until_input_gradient = _curves(timeline, kept_for_w=0.0, inputs=0.0)
    inputs = _curves(timeline, activations=0.0)
    for_weight_gradient = [
        _combined([(a, 1), (b, -1), (c, -1)])
        for a, b, c in zip(total, until_input_gradient, inputs, strict=True)
    ]
    curves = {
        "activations": until_input_gradient,
        "kept for the weight gradient": for_weight_gradient,
        "inputs kept for recomputation": inputs,
    }
    present = {kind: rows for kind, rows in curves.items() if any(value for row in rows for _, value in row)}
    return {
        "kinds": [*present],
        "ranks": [[rows[rank] for rows in present.values()] for rank in range(timeline.program.ranks)],
        "peaks": [max((value for _, value in row), default=0.0) for row in total],
        "versions": _version_curves(timeline),
    }


def _curves(timeline: Timeline, **costs: Any) -> list[list[tuple[float, float]]]:
    """Return what each rank holds over time, with some costs replaced."""
    changed = replace(timeline.costs, **costs)
    curves = live_bytes(timeline.program, changed, timeline.starts, timeline.ends)
    return [_combined([(curve, 1)]) for curve in curves]


def _combined(curves: Sequence[tuple[Points, int]]) -> list[tuple[float, float]]:
    """Return the sum of step curves, each with a sign, with one value at a time and none repeated."""
    changes: dict[float, float] = {0.0: 0.0}
    for curve, sign in curves:
        before = 0.0
        for time, value in curve:
            changes[time] = changes.get(time, 0.0) + sign * (value - before)
            before = value
    points, value = list[tuple[float, float]](), 0.0
    for time in sorted(changes):
        value += changes[time]
        rounded = round(value, 9) + 0.0
        if not points or rounded != points[-1][1]:
            points.append((time, rounded))
    return points


def _version_curves(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Return how many versions of a stage's weights each rank holds over time, summed over its stages."""
    program = timeline.program
    if not program.versions:
        return []
    ends: Mapping[Any, float] = {event.action: event.end for event in timeline.events}
    return [
        _combined(
            [
                ([(0.0, 1.0), *((ends[action], count) for action, count in live_versions(program, stage))], 1)
                for stage in program.stages_of(rank)
            ]
        )
        for rank in range(program.ranks)
    ]
