"""What every rank holds over time."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.program.replay import Costs, Timeline
from stretto.program.replay.activation_bytes import live_bytes

Curve = tuple[tuple[float, float], ...]  # (time, held from then on), in ascending times


def held(timeline: Timeline) -> list[Curve]:
    """Per rank, the activations held over time in rank units: a microbatch through all its stages is 1.

    They are held from the start of their F to the end of their B or W; those of a forward that is recomputed,
    from RECOMPUTE on; offloaded ones are away from the end of OFFLOAD to the start of RELOAD. In a program
    that does not train a forward holds them until its end.
    """
    program = timeline.program
    # a microbatch goes through one copy of the weights only
    share = [program.copies / max(1, program.placement.count(rank)) for rank in range(program.ranks)]
    found = live_bytes(program, Costs(), timeline.starts, timeline.ends)
    return [_whole(curve, unit, timeline.makespan) for curve, unit in zip(found, share, strict=True)]


def peak(curve: Curve) -> float:
    """The most that is held."""
    return max((value for _, value in curve), default=0.0)


def _whole(curve: Iterable[tuple[float, float]], unit: float, end: float) -> Curve:
    """One value for each moment, the last of several, from 0 to `end`."""
    points = {0.0: 0.0} | {time: value * unit for time, value in curve}
    return (*points.items(), *(((end, points[last]),) if (last := max(points)) < end else ()))
