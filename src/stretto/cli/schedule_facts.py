"""What `stretto schedule --json` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.schedule import Action
    from stretto.simulate import Timeline


def facts(timeline: Timeline) -> dict[str, Any]:
    """Of one replayed program."""
    program, bubble = timeline.program, timeline.bubble
    return {
        "name": program.name,
        "ranks": program.ranks,
        "stages": program.stages,
        "copies": program.copies,
        "microbatches": program.microbatches,
        "parameters": dict(program.parameters),
        "placement": list(program.placement),
        "makespan": timeline.makespan,
        "ideal": timeline.ideal,
        "bubble": {"barrier": bubble.barrier, "span": bubble.span, "rate": bubble.rate},
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(timeline.weight_versions),
        "transfers": timeline.transfers,
        "orders": [[str(a) for a in order if program.lowered or _ordered(a)] for order in program.orders],
    }


def compared(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Of several: the table's figures, and all facts of each."""
    from stretto.view.figures import figures

    return {
        "compared": [figures(timeline) for timeline in timelines],
        "schedules": [facts(timeline) for timeline in timelines],
    }


def _ordered(action: Action) -> bool:
    """Whether an action stands in a schedule's own order."""
    kind = action.kind
    return kind == "U" or (kind.has_microbatch and not kind.is_transfer)
