"""The colours of a timeline's blocks.

Every kind of action has its own band of lightness, so that kinds differ in grey too, and a hue that remains
distinct under protanopia and deuteranopia. The chunks of a rank go through their kind's band, the first
darkest.
"""

from __future__ import annotations

from stretto.program.action import ActionKind
from stretto.view.colours import OTHER, Rgb, mix

# the colour of a rank's first chunk and of its last
KINDS: dict[ActionKind, tuple[Rgb, Rgb]] = {
    ActionKind.F: ((0, 52, 112), (30, 90, 152)),
    ActionKind.RECOMPUTE: ((132, 92, 182), (146, 106, 197)),
    ActionKind.I: ((214, 96, 62), (232, 120, 86)),
    ActionKind.B: ((235, 163, 44), (250, 185, 88)),
    ActionKind.W: ((140, 222, 200), (186, 238, 222)),
    ActionKind.UPDATE: ((38, 38, 46), (38, 38, 46)),
}


def of_kind(kind: ActionKind, chunk: int = 0, chunks: int = 1) -> Rgb:
    """The colour of a block: its kind's, lighter for later chunks of the rank."""
    first, last = KINDS.get(kind, (OTHER, OTHER))
    return mix(first, last, chunk / max(1, chunks - 1))
