"""Grids of ranks, their groups, and layouts of a job.

A grid has a size for every axis and an order of the axes, the first varying fastest over ranks. A group over
some axes is a set of ranks with the same coordinates on all other axes. The stride arithmetic is that of
Megatron-LM's RankGenerator (masked orthogonal groups).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod

from stretto.display import render
from stretto.errors import StrettoError, nearest


def offsets(axes: Iterable[tuple[int, int]]) -> list[int]:
    """Return every sum of i * stride, i < size, over (size, stride) axes; the first axis varies fastest."""
    sums = [0]
    for size, stride in axes:
        if size > 1:
            sums = [s + i for i in range(0, size * stride, stride) for s in sums]
    return sums


@dataclass(frozen=True)
class RankGrid:
    """Sizes of the axes in order, fastest first; `offset` is the grid's first rank."""

    sizes: Mapping[str, int]
    offset: int = 0

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        strides, stride = {}, 1
        for axis, size in self.sizes.items():
            strides[axis] = stride
            stride *= size
        return strides

    def _split(self, axes: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (size, stride) of the named axes, and of all others; `axes` as in "tp-dp"."""
        names = axes.split("-")
        for name in names:
            if name not in self.sizes:
                raise StrettoError(
                    f"group {axes!r} names axis {name!r}", hint=f"axes are {', '.join(self.sizes)}"
                )
        pairs = {axis: (size, self.strides[axis]) for axis, size in self.sizes.items()}
        return [pairs[a] for a in pairs if a in names], [pairs[a] for a in pairs if a not in names]

    def groups(self, axes: str) -> list[list[int]]:
        """Return all groups over `axes` ("tp", "tp-dp", ...); every rank is in exactly one."""
        masked, unmasked = self._split(axes)
        inner = offsets(masked)
        return [[start + i for i in inner] for start in (self.offset + o for o in offsets(unmasked))]

    def group(self, rank: int, axes: str) -> list[int]:
        """Return the group over `axes` that contains `rank`."""
        masked, _ = self._split(axes)
        index = rank - self.offset
        start = index - sum(index // stride % size * stride for size, stride in masked)
        return [self.offset + start + i for i in offsets(masked)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on every axis."""
        index = rank - self.offset
        return {axis: index // self.strides[axis] % size for axis, size in self.sizes.items()}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at the given coordinates; axes left out are 0."""
        return self.offset + sum(self.strides[axis] * at for axis, at in coordinates.items())


AXES = ("tp", "cp", "ep", "dp", "pp")
EXPERT_AXES = {"expert_tp": "tp", "ep": "ep", "expert_dp": "dp"}  # name to the name in the expert grid
_GROUP_AXES = {*AXES, *EXPERT_AXES}
ORDER = "-".join(AXES)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of every axis and their order over ranks, the fastest varying first.

    For dense layers the ranks form a grid tp x cp x dp x pp; for expert layers the same ranks form expert_tp
    x ep x expert_dp x pp, like in Megatron-core ("MoE parallel folding"). `expert_tp` defaults to tp.
    `offset` is the layout's first rank.

    Raises:
        StrettoError: a degree is below 1, the order does not name every axis once, or the expert axes do not
            fit the ranks.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = ORDER
    expert_tp: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        for axis in AXES:
            _at_least(axis, getattr(self, axis), 1)
        if self.expert_tp is not None:
            _at_least("expert_tp", self.expert_tp, 1)
        _at_least("offset", self.offset, 0)
        # append the axes of size 1 that `order` leaves out
        names = self.order.split("-")
        for name in names:
            if name not in AXES:
                suggestion = nearest(name, AXES)
                raise StrettoError(
                    f"order {self.order!r} names unknown axis {name!r}",
                    hint=f"did you mean {suggestion!r}? " * bool(suggestion) + f"axes are {', '.join(AXES)}",
                )
            if names.count(name) > 1:
                raise StrettoError(
                    f"order {self.order!r} names {name} twice", hint=f"name every axis once, as in {ORDER}"
                )
        missing = [axis for axis in AXES if axis not in names]
        for axis in missing:
            if self.sizes[axis] > 1:
                raise StrettoError(
                    f"order {self.order!r} leaves out {axis}, which is {self.sizes[axis]}",
                    hint=f"add it, as in {self.order}-{axis}",
                )
        object.__setattr__(self, "order", "-".join([*names, *missing]))
        if self.ep > 1 or self.expert_tp is not None:
            _ = self.expert_grid

    @property
    def sizes(self) -> dict[str, int]:
        """Degree of every axis, including ep."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world(self) -> int:
        """Number of ranks: tp x cp x dp x pp; ep divides the ranks of tp, cp and dp."""
        return self.tp * self.cp * self.dp * self.pp

    @cached_property
    def grid(self) -> RankGrid:
        """Grid of dense layers: tp, cp, dp and pp in the layout's order."""
        return RankGrid(
            {axis: getattr(self, axis) for axis in self.order.split("-") if axis != "ep"}, self.offset
        )

    @cached_property
    def expert_grid(self) -> RankGrid:
        """Grid of expert layers: expert tp (named tp), ep, expert dp (named dp) and pp in the layout's order.

        Raises:
            StrettoError: expert dp is not an integer, or the pipelines of expert and dense layers differ.
        """
        tp = self.tp if self.expert_tp is None else self.expert_tp
        ranks, divisor = self.world // self.pp, tp * self.ep
        if ranks % divisor:
            legal = [n for n in range(1, ranks // tp + 1) if ranks % (tp * n) == 0]
            nearest_ep = (
                str(min(legal, key=lambda n: abs(n - self.ep)))
                if legal
                else f"none: expert_tp={tp} must divide {ranks}"
            )
            raise StrettoError(
                f"ep={self.ep} with expert_tp={tp} does not divide the {ranks} ranks of a pipeline stage",
                hint=f"expert_tp x ep must divide tp x cp x dp; the nearest ep is {nearest_ep}",
            )
        sizes = {"tp": tp, "ep": self.ep, "dp": ranks // divisor, "pp": self.pp}
        grid = RankGrid({axis: sizes[axis] for axis in self.order.split("-") if axis != "cp"}, self.offset)
        if self.pp > 1 and self.order != ORDER and _starts(grid) != _starts(self.grid):
            raise StrettoError(
                f"order {self.order!r} puts the pipelines of expert and dense layers on different ranks",
                hint=f"put pp last, as in {ORDER}, or make expert_tp x ep equal to tp x cp",
            )
        return grid

    def grid_of(self, axes: str) -> tuple[RankGrid, str]:
        """Return the grid of `axes` and their names in it; no names if every group is a single rank.

        Raises:
            StrettoError: a name is no axis, is given twice, or cp is combined with axes of experts.
        """
        names = axes.split("-")
        if len(names) != len(_GROUP_AXES & set(names)):
            raise _wrong_group(axes, names)
        if not EXPERT_AXES.keys() & set(names):
            return self.grid, axes
        if self.ep == 1 and self.expert_tp is None:  # experts have the layout of dense layers, for any order
            dense_names = {"expert_tp": "tp", "expert_dp": "cp-dp", "ep": ""}
            return self.grid, "-".join(filter(None, (dense_names.get(name, name) for name in names)))
        if "cp" in names:
            raise StrettoError(
                f"group {axes!r} names cp and an axis of experts",
                hint="the axes of experts are expert_tp, ep, expert_dp and pp, which include the ranks of cp",
            )
        return self.expert_grid, "-".join(EXPERT_AXES.get(name, name) for name in names)

    def groups(self, axes: str) -> list[list[int]]:
        """Return all groups over `axes` ("tp", "tp-dp", ...), of the expert grid if they include ep,
        expert_tp or expert_dp.
        """
        grid, names = self.grid_of(axes)
        return grid.groups(names) if names else [[self.offset + rank] for rank in range(self.world)]

    def group(self, rank: int, axes: str) -> list[int]:
        """Return the group over `axes` that contains `rank`."""
        grid, names = self.grid_of(axes)
        return grid.group(self._inside(rank), names) if names else [self._inside(rank)]

    def size(self, axes: str) -> int:
        """Return the number of ranks of a group over `axes`."""
        grid, names = self.grid_of(axes)
        return prod(grid.sizes[name] for name in filter(None, names.split("-")))

    def index(self, rank: int, axes: str) -> int:
        """Return the index of `rank` along `axes`, the first named varying fastest, whatever the layout's
        order.
        """
        at, stride = 0, 1
        for axis in axes.split("-"):
            group = self.group(rank, axis)
            at, stride = at + stride * group.index(rank), stride * len(group)
        return at

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of `rank` on tp, cp, dp and pp."""
        return self.grid.coordinates(self._inside(rank))

    def rank(self, **coordinates: int) -> int:
        """Return the rank at the given coordinates, `rank(tp=1, pp=2)`; axes left out are 0."""
        for axis, at in coordinates.items():
            if axis not in self.grid.sizes:
                raise StrettoError(f"unknown axis {axis!r}", hint=f"axes are {', '.join(self.grid.sizes)}")
            size = self.grid.sizes[axis]
            if not 0 <= at < size:
                raise StrettoError(
                    f"{axis}={at} is outside the layout", hint=f"{axis} runs from 0 to {size - 1}"
                )
        return self.grid.rank(coordinates)

    def _inside(self, rank: int) -> int:
        if not 0 <= rank - self.offset < self.world:
            last = self.offset + self.world - 1
            raise StrettoError(
                f"rank {rank} is outside the layout", hint=f"ranks are {self.offset} to {last}"
            )
        return rank

    def describe(self) -> str:
        """Return a short text that `parse` reads, such as "tp2 dp2 pp4"; "single" for one rank."""
        parts = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        if self.expert_tp is not None:
            parts.append(f"expert_tp{self.expert_tp}")
        if self.order != ORDER:
            parts.append(f"order={self.order}")
        if self.offset:
            parts.append(f"offset={self.offset}")
        return " ".join(parts) or "single"

    __str__ = describe

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults."""
        values = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Layout({', '.join(f'{name}={value!r}' for name, value in values)})"

    def _repr_html_(self) -> str | None:
        return render("layout_html", self)

    def _repr_svg_(self) -> str | None:
        return render("layout_svg", self)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout of a text such as "tp2 dp2 pp4" or "tp2-dp2-pp4".

        Raises:
            StrettoError: a word names no axis, or an axis is named twice.
        """
        values: dict[str, int | str] = {}
        # `-` also separates words, except within `order=`
        parts: list[str] = []
        for word in text.replace(",", " ").split():
            parts += [word] if "=" in word and word.startswith("order") else [w for w in word.split("-") if w]
        for word in [] if parts == ["single"] else parts:
            name, value = _field(word, text)
            if name in values:
                raise StrettoError(f"layout {text!r} names {name} twice", hint="name every axis at most once")
            values[name] = value
        return cls(**values)  # pyright: ignore[reportArgumentType]

    @classmethod
    def fill(
        cls,
        world: int,
        *,
        tp: int | None = None,
        cp: int | None = None,
        ep: int | None = None,
        dp: int | None = None,
        pp: int | None = None,
        order: str = ORDER,
        expert_tp: int | None = None,
    ) -> Layout:
        """Return the layout of `world` ranks with the given degrees; dp defaults to `world` divided by the
        others.

        Raises:
            StrettoError: the product of the degrees is not `world`.
        """
        _at_least("world", world, 1)
        layout = cls(tp=tp or 1, cp=cp or 1, ep=1, dp=dp or 1, pp=pp or 1, order=order)
        for name, size in (("tp", tp), ("cp", cp), ("ep", ep), ("dp", dp), ("pp", pp)):
            if size is not None:
                _at_least(name, size, 1)
        if dp is None:
            # dp is `world` divided by the other degrees
            if world % layout.world:
                below = world // layout.world * layout.world
                worlds = [n for n in (below, below + layout.world) if n]
                raise StrettoError(
                    f"world={world} is not a multiple of {layout._product()} = {layout.world}",
                    hint=f"the nearest legal world is {min(worlds, key=lambda n: abs(n - world))}",
                )
            layout = replace(layout, dp=world // layout.world)
        layout.check_world(world)
        return replace(layout, ep=ep or 1, expert_tp=expert_tp)

    def check_world(self, world: int) -> None:
        """Raise a StrettoError with the nearest fix unless the layout has `world` ranks."""
        if self.world == world:
            return
        other = self.world // self.dp
        fix = f", or dp={world // other}" if world % other == 0 else ""
        raise StrettoError(
            f"layout {self._product()} has {self.world} ranks, world is {world}",
            hint=f"use {self.world} ranks{fix}",
        )

    def _product(self) -> str:
        axes = (axis for axis in AXES if axis != "ep" and self.sizes[axis] > 1)
        return " x ".join(f"{axis}={self.sizes[axis]}" for axis in axes) or "single"


def _at_least(field: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise StrettoError(
            f"{field}={value!r} is not allowed", hint=f"{field} is an integer of at least {minimum}"
        )


def _wrong_group(axes: str, names: list[str]) -> StrettoError:
    axis_names = (*AXES, *(name for name in EXPERT_AXES if name not in AXES))
    for name in names:
        if name not in axis_names:
            suggestion = nearest(name, axis_names)
            return StrettoError(
                f"group {axes!r} names unknown axis {name!r}",
                hint=f"did you mean {suggestion!r}? " * bool(suggestion)
                + f"axes are {', '.join(axis_names)}, as in tp-pp",
            )
    twice = next(name for name in names if names.count(name) > 1)
    once = "-".join(dict.fromkeys(names))
    return StrettoError(f"group {axes!r} names {twice} twice", hint=f"name every axis once, as in {once}")


def _starts(grid: RankGrid) -> tuple[int, int]:
    """Return the stride of pp and the grid's first rank, which determine the pipeline groups."""
    return grid.strides["pp"], grid.offset


def _field(word: str, text: str) -> tuple[str, int | str]:
    name, equals, value = word.partition("=")
    if name == "order" and equals:
        return name, value
    match = re.fullmatch(r"([a-z_]+)=?(\d+)", word)
    names = (*AXES, "expert_tp", "offset")
    if match and match[1] in names:
        return match[1], int(match[2])
    suggestion = nearest(match[1] if match else word, names)
    hint = f"did you mean {suggestion!r}? " * bool(suggestion) + 'write it as in "tp2-dp2-pp4"'
    raise StrettoError(f"layout {text!r} has {word!r}, which is no axis with its degree", hint=hint)


_DENSE = ("tp", "cp", "dp", "pp")


def axes_of(layout: Layout, ranks: Iterable[int]) -> str:
    """Return the axes of the dense grid along which these ranks differ, "tp" or "cp-dp"; "single" for one
    rank.

    Groups of the expert grid are also named by dense axes, so that a set of ranks has only one name.
    """
    return _axes_of(layout, tuple(ranks))


@lru_cache(maxsize=4096)
def _axes_of(layout: Layout, ranks: tuple[int, ...]) -> str:
    places = [layout.coordinates(rank) for rank in ranks]
    differ = [axis for axis in _DENSE if len({place[axis] for place in places}) > 1]
    return "-".join(differ) or "single"
