"""Colours that survive print and colour blindness, and the text colour that reads on them.

Stages take a ramp from dark blue to yellow, which is monotone in lightness.
"""

from __future__ import annotations

Rgb = tuple[int, int, int]

OTHER: Rgb = (118, 118, 118)

# lines and marks on a light or a dark ground: at least 3 to 1 on both (WCAG 2, graphical objects)
SERIES: tuple[Rgb, ...] = ((38, 120, 190), (196, 98, 16), (28, 138, 116), (158, 90, 190))

# eight outlines beside one another, each at least 3 to 1 on a light and on a dark ground
GROUPS: tuple[Rgb, ...] = (
    *SERIES,
    (206, 72, 112),
    (110, 122, 30),
    (96, 112, 208),
    (122, 118, 112),
)

_RAMP: tuple[Rgb, ...] = ((55, 32, 105), (52, 96, 141), (38, 142, 136), (110, 197, 98), (250, 226, 60))


def of_stage(stage: int, stages: int) -> Rgb:
    """The colour of a stage along the ramp."""
    place = stage / max(1, stages - 1) * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    return mix(_RAMP[low], _RAMP[low + 1], place - low)


def mix(first: Rgb, second: Rgb, share: float) -> Rgb:
    """`share` of the second colour, the rest of the first."""
    r, g, b = (round(a + (c - a) * share) for a, c in zip(first, second, strict=True))
    return r, g, b


def hexed(colour: Rgb) -> str:
    """As `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def text_on(colour: Rgb) -> str:
    """Black or white, whichever has the higher contrast on `colour` (WCAG 2 relative luminance)."""
    light = luminance(colour)
    return "#000000" if (light + 0.05) / 0.05 > 1.05 / (light + 0.05) else "#ffffff"


def luminance(colour: Rgb) -> float:
    """Relative luminance in 0..1, as WCAG 2 defines it."""
    r, g, b = (_linear(part / 255) for part in colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
