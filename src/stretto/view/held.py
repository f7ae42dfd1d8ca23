"""What every rank holds over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stretto.schedule.action import Action, Kind
from stretto.schedule.program import Program

if TYPE_CHECKING:
    from stretto.simulate import Timeline

Curve = tuple[tuple[float, float], ...]  # (time, held from then on), in ascending times

_LOSES = (Kind.B, Kind.W, Kind.OFFLOAD)  # I alone frees nothing
_GAINS = (Kind.F, Kind.RECOMPUTE, Kind.RELOAD)


def held(timeline: Timeline) -> list[Curve]:
    """Per rank, the activations held over time in rank units: a microbatch through all its stages is 1.

    They are held from the start of their F to the end of their B or W; those of a forward that is recomputed,
    from RECOMPUTE on; offloaded ones are away from the end of OFFLOAD to the start of RELOAD. In a program
    that does not train a forward holds them until its end.
    """
    return held_by(
        timeline.program, ((e.rank, e.action, e.start, e.end) for e in timeline.events), timeline.makespan
    )


def held_by(program: Program, events: Iterable[tuple[int, Action, float, float]], end: float) -> list[Curve]:
    """The same of any events (rank, action, start, end) of the program; curves go on to `end`."""
    repeated = {a[::2] for order in program.orders for a in order if a.kind is Kind.RECOMPUTE}
    # a microbatch goes through one copy of the weights only
    share = [program.copies / max(1, program.placement.count(rank)) for rank in range(program.ranks)]
    # frees come before what begins at the same moment
    changes: list[list[tuple[float, int]]] = [[] for _ in range(program.ranks)]
    for rank, action, start, done in events:
        if action.kind is Kind.F and action[::2] in repeated:
            continue  # it keeps no more than its input
        if action.kind in _GAINS:
            changes[rank].append((start, 1))
        if action.kind in _LOSES or (action.kind is Kind.F and not program.trains):
            changes[rank].append((done, -1))
    return [_curve(steps, share[rank], end) for rank, steps in enumerate(changes)]


def peak(curve: Curve) -> float:
    """The most that is held."""
    return max((value for _, value in curve), default=0.0)


def _curve(steps: list[tuple[float, int]], unit: float, end: float) -> Curve:
    at: dict[float, int] = defaultdict(int)
    number = top = 0
    for time, step in sorted(steps):
        number += step
        at[time] = number
        top = max(top, number)
    points = [(0.0, 0.0), *((time, value * unit) for time, value in at.items())]
    if len(points) > 1 and points[1][0] <= 0.0:
        del points[0]
    if points[-1][0] < end:
        points.append((end, points[-1][1]))
    return tuple(points)
