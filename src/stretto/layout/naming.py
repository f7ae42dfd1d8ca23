"""What a group of ranks is called: the axes along which its ranks differ."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from stretto.layout.layout import Layout

_DENSE = ("tp", "cp", "dp", "pp")


def axes_of(layout: Layout, ranks: Iterable[int]) -> str:
    """The axes of the dense grid along which these ranks differ, "tp" or "cp-dp"; "single" for one rank.

    The same ranks have one name, whatever they are a group of: experts' groups go by the axes of the ranks
    that they are made of.
    """
    return _axes_of(layout, tuple(ranks))


@lru_cache(maxsize=4096)
def _axes_of(layout: Layout, ranks: tuple[int, ...]) -> str:
    places = [layout.coordinates(rank) for rank in ranks]
    differ = [axis for axis in _DENSE if len({place[axis] for place in places}) > 1]
    return "-".join(differ) or "single"
