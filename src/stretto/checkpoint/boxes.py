"""Boxes in a tensor: do they tile it, each element exactly once?"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from math import prod

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


def untiled(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong with `boxes` as a tiling of a tensor of `shape`; None when they tile it.

    Inside, pairwise disjoint and of the right volume means that every element is covered exactly once.
    Disjointness is found by a sweep along the dimension with the most cuts, so that regular shardings cost
    O(n log n).
    """
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"piece {_text(offsets, sizes)} has another number of dimensions"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(offsets, sizes, shape, strict=True)):
            return f"piece {_text(offsets, sizes)} lies outside"
    volume = sum(prod(sizes) for _, sizes in boxes)
    if volume != prod(shape):
        return f"pieces hold {volume} elements of {prod(shape)}"
    return _overlap(len(shape), boxes)


def _overlap(dimensions: int, boxes: Sequence[Box]) -> str | None:
    filled = [box for box in boxes if prod(box[1])]
    if len(filled) < 2 or not dimensions:
        return None if len(filled) < 2 else "there is more than one piece"
    axis = max(range(dimensions), key=lambda d: len({offsets[d] for offsets, _ in filled}))
    active: list[tuple[int, int]] = []  # (end along axis, box)
    order = sorted(range(len(filled)), key=lambda i: filled[i][0][axis])
    for here in order:
        offsets, sizes = filled[here]
        del active[: bisect_right(active, (offsets[axis], len(filled)))]
        for _, other in active:
            if _meet(filled[here], filled[other]):
                return f"pieces {_text(*filled[other])} and {_text(offsets, sizes)} overlap"
        insort(active, (offsets[axis] + sizes[axis], here))
    return None


def _meet(a: Box, b: Box) -> bool:
    return all(o < p + m and p < o + n for o, n, p, m in zip(a[0], a[1], b[0], b[1], strict=True))


def box_text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The box as a slice: "0:4,8:16"; empty for a scalar."""
    return ",".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes, strict=True))


def _text(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    return f"[{','.join(f'{o}+{n}' for o, n in zip(offsets, sizes, strict=False))}]"
