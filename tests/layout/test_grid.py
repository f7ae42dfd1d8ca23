"""The stride arithmetic against the plain definition of a group."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.layout import RankGrid

NAMES = ("tp", "cp", "dp", "pp")


@st.composite
def grids(draw: st.DrawFn) -> RankGrid:
    order = draw(st.permutations(NAMES))
    return RankGrid({axis: draw(st.integers(1, 4)) for axis in order}, draw(st.integers(0, 9)))


def masks(grid: RankGrid) -> list[str]:
    return ["-".join(some) for size in range(1, 5) for some in combinations(grid.sizes, size)]


def by_definition(grid: RankGrid, axes: str) -> list[list[int]]:
    """Number all points with the first axis fastest, and put those together that agree on the other axes."""
    names = list(grid.sizes)
    groups: dict[tuple[int, ...], list[int]] = {}
    points = product(*(range(grid.sizes[name]) for name in reversed(names)))
    for rank, point in enumerate(points):
        at = dict(zip(reversed(names), point, strict=True))
        others = tuple(at[name] for name in reversed(names) if name not in axes.split("-"))
        groups.setdefault(others, []).append(grid.offset + rank)
    return [groups[key] for key in sorted(groups)]


def by_orthogonal_masks(grid: RankGrid, axes: str) -> list[list[int]]:
    """Megatron's definition: rank i of group g is the sum of i decomposed over the masked axes, dotted with
    their strides, and of g decomposed over the others, dotted with theirs."""
    names = list(grid.sizes)
    stride = {name: prod(grid.sizes[before] for before in names[:at]) for at, name in enumerate(names)}
    inside = [name for name in names if name in axes.split("-")]
    outside = [name for name in names if name not in inside]

    def dot(index: int, over: list[str]) -> int:
        total = 0
        for name in over:
            total += index % grid.sizes[name] * stride[name]
            index //= grid.sizes[name]
        return total

    count = prod(grid.sizes[name] for name in outside)
    size = prod(grid.sizes[name] for name in inside)
    return [[grid.offset + dot(i, inside) + dot(g, outside) for i in range(size)] for g in range(count)]


@given(grids())
def test_groups_agree_with_both_definitions(grid: RankGrid) -> None:
    for axes in masks(grid):
        assert grid.groups(axes) == by_definition(grid, axes)
        assert grid.groups(axes) == by_orthogonal_masks(grid, axes)


@given(grids())
def test_every_rank_is_once_in_every_group_set(grid: RankGrid) -> None:
    everyone = list(range(grid.offset, grid.offset + grid.world))
    for axes in masks(grid):
        assert sorted(rank for group in grid.groups(axes) for rank in group) == everyone


@given(grids())
def test_the_group_of_a_rank_is_the_one_that_holds_it(grid: RankGrid) -> None:
    for axes in masks(grid):
        for group in grid.groups(axes):
            assert all(grid.group(rank, axes) == group for rank in group)


@given(grids())
def test_members_of_a_group_differ_in_its_axes_only_and_keep_their_coordinates(grid: RankGrid) -> None:
    for axes in masks(grid):
        named = axes.split("-")
        for group in grid.groups(axes):
            places = [grid.coordinates(rank) for rank in group]
            assert len({tuple(place[a] for a in grid.sizes if a not in named) for place in places}) == 1
            assert len({tuple(place[a] for a in named) for place in places}) == len(group)


@given(grids())
def test_rank_inverts_coordinates(grid: RankGrid) -> None:
    for rank in range(grid.offset, grid.offset + grid.world):
        assert grid.rank(grid.coordinates(rank)) == rank


def test_an_unknown_axis_is_named() -> None:
    with pytest.raises(StrettoError, match="'xp'") as caught:
        RankGrid({"tp": 2, "dp": 2}).groups("tp-xp")
    assert caught.value.hint == "axes are tp, dp"
