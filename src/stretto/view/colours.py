"""Colours that remain distinct in print and for colour-blind readers, and legible text colours for them.

Stages have a ramp from dark blue to yellow, monotone in lightness. Every kind of action has a separate band
of lightness, so that kinds also differ in grey, and a hue that remains distinct under protanopia and
deuteranopia. The chunks of a rank divide their kind's band, the first darkest.
"""

from __future__ import annotations

Rgb = tuple[int, int, int]

OTHER: Rgb = (118, 118, 118)

# lines and marks: contrast of at least 3 to 1 on a light and on a dark background (WCAG 2, graphical objects)
SERIES: tuple[Rgb, ...] = ((38, 120, 190), (196, 98, 16), (28, 138, 116), (158, 90, 190))

# colours of adjacent outlines, each with a contrast of at least 3 to 1 on a light and on a dark background
GROUPS: tuple[Rgb, ...] = (
    *SERIES,
    (206, 72, 112),
    (110, 122, 30),
    (96, 112, 208),
    (122, 118, 112),
)

_RAMP: tuple[Rgb, ...] = ((55, 32, 105), (52, 96, 141), (38, 142, 136), (110, 197, 98), (250, 226, 60))

# by kind of action (`ActionKind`): the colours of a rank's first and last chunk
KINDS: dict[str, tuple[Rgb, Rgb]] = {
    "F": ((0, 52, 112), (30, 90, 152)),
    "RECOMPUTE": ((132, 92, 182), (146, 106, 197)),
    "I": ((214, 96, 62), (232, 120, 86)),
    "B": ((235, 163, 44), (250, 185, 88)),
    "W": ((140, 222, 200), (186, 238, 222)),
    "U": ((38, 38, 46), (38, 38, 46)),
}


def of_stage(stage: int, stages: int) -> Rgb:
    """Return the colour of a stage along the ramp."""
    position = stage / max(1, stages - 1) * (len(_RAMP) - 1)
    low = min(int(position), len(_RAMP) - 2)
    return mix(_RAMP[low], _RAMP[low + 1], position - low)


def of_kind(kind: str, chunk: int = 0, chunks: int = 1) -> Rgb:
    """Return the colour of a block: that of its kind, lighter for later chunks of the rank."""
    dark, light = KINDS.get(kind, (OTHER, OTHER))
    return mix(dark, light, chunk / max(1, chunks - 1))


def mix(colour: Rgb, other: Rgb, share: float) -> Rgb:
    """Return the mixture of (1 - share) of `colour` and share of `other`."""
    r, g, b = (round(a + (c - a) * share) for a, c in zip(colour, other, strict=True))
    return r, g, b


def hexed(colour: Rgb) -> str:
    """Return the colour as `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def text_on(colour: Rgb) -> str:
    """Return black or white, whichever has the higher contrast on `colour` (WCAG 2 relative luminance)."""
    light = luminance(colour)
    return "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#ffffff"


def luminance(colour: Rgb) -> float:
    """Return the relative luminance, 0 to 1, as defined by WCAG 2."""
    shares = (part / 255 for part in colour)
    r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
