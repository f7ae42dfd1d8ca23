"""Colours differ in grey and under colour blindness, and text on them is legible."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from stretto.program import ActionKind
from stretto.view import colours
from stretto.view.colours import Rgb

Matrix = tuple[tuple[float, float, float], ...]

# Machado, Oliveira & Fernandes 2009, "A physiologically-based model for simulation of color vision
# deficiency", table 1, severity 1.0: on linear RGB
SEEN: dict[str, Matrix] = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
DRAWN = [kind for kind in colours.KINDS if kind != ActionKind.UPDATE]


def lab(colour: Rgb, seen: str = "normal") -> tuple[float, float, float]:
    """CIE L*a*b* (D65) of an sRGB colour, as an eye of that kind sees it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (p / 255 for p in colour)]
    r, g, b = (min(1, max(0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in SEEN[seen])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(colour: Rgb, other: Rgb, seen: str) -> float:
    """Colour difference (CIE 1976); 2.3 is just noticeable."""
    return sum((a - b) ** 2 for a, b in zip(lab(colour, seen), lab(other, seen), strict=True)) ** 0.5


def shades(kind: ActionKind, chunks: int = 5) -> list[Rgb]:
    return [colours.of_kind(kind, chunk, chunks) for chunk in range(chunks)]


def test_the_colour_distance_of_the_test_is_sound() -> None:
    """Red and green of one lightness: far apart, and close without either cone; grey stays grey."""
    red, green = (200, 60, 60), (60, 130, 60)
    assert distance(red, green, "normal") > 3 * distance(red, green, "deuteranopia")
    for seen in SEEN:
        assert distance((128, 128, 128), (128, 128, 128), seen) == 0
        assert lab((128, 128, 128), seen)[1:] == pytest.approx((0, 0), abs=1)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize(("kind", "other"), list(combinations(colours.KINDS, 2)))
def test_kinds_part_for_every_eye(kind: ActionKind, other: ActionKind, seen: str) -> None:
    assert min(distance(a, b, seen) for a in shades(kind) for b in shades(other)) >= 9


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (ActionKind.F, ActionKind.B),
        (ActionKind.F, ActionKind.I),
        (ActionKind.F, ActionKind.W),
        (ActionKind.I, ActionKind.W),
    ],
)
def test_kinds_of_one_schedule_part_widely(kind: ActionKind, other: ActionKind) -> None:
    for seen in SEEN:
        assert min(distance(a, b, seen) for a in shades(kind) for b in shades(other)) >= 30


def test_kinds_have_bands_of_lightness_of_their_own() -> None:
    """In grey no shade of one kind is as light as any of another."""
    bands = sorted((lab(first)[0], lab(last)[0]) for first, last in colours.KINDS.values())
    assert all(dark <= light for dark, light in bands)
    for (_, below), (above, _) in pairwise(bands):
        assert above - below >= 2
    # those that stand side by side most are furthest apart
    f, b, i, w = (
        lab(colours.of_kind(kind))[0] for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
    )
    assert b - f > 40
    assert w - i > 20


@pytest.mark.parametrize("kind", DRAWN)
def test_chunks_go_from_dark_to_light_and_can_be_told_apart(kind: ActionKind) -> None:
    lights = [lab(colour)[0] for colour in shades(kind)]
    assert lights == sorted(lights)
    for seen in SEEN:
        assert distance(*colours.KINDS[kind], seen) >= 4


@pytest.mark.parametrize("kind", colours.KINDS)
def test_numbers_read_on_every_shade(kind: ActionKind) -> None:
    """Contrast of at least 4.5 (WCAG 2, level AA)."""
    for shade in shades(kind):
        light = colours.luminance(shade)
        ink = 0.0 if colours.text_on(shade) == "#000000" else 1.0
        assert (max(light, ink) + 0.05) / (min(light, ink) + 0.05) >= 4.5
