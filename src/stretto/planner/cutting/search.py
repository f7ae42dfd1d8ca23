"""The best cut by descent and by branch and bound, where sums over stages bound what is not cut yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from stretto.planner.cutting.rows import Cut, Row

_CLOSE = 1 - 1e-9  # cuts nearer than this to the best are not looked for
_MOST_ROWS = 48  # each makes the search smaller and each of its steps slower


@dataclass(kw_only=True)
class CutSearch:
    """Looks for the cut of least value.

    Attributes:
        layers, depth: how many layers, and stages.
        value: of a whole cut, inf where it is not allowed; and a row that is never above any cut's value, and
            is that of this cut, if there is one.
        rows: that no cut's value is below.
        limits: rows, and what an allowed cut's must not be above.
        budget: steps of `prove`.
    """

    layers: int
    depth: int
    value: Callable[[Cut], tuple[float, Callable[[], Row] | None]]
    rows: list[Row]
    limits: Sequence[tuple[Row, float]] = ()
    budget: int = 100_000
    best: float = inf
    cut: Cut | None = None
    open: float = inf  # least bound of what the budget was too small for
    _spent: int = 0
    _seen: set[Cut] = field(default_factory=set[Cut])

    def offer(self, cut: Cut) -> bool:
        """Look at a whole cut; whether it is better than all before."""
        if cut in self._seen or not self._may_be_better(cut):
            return False
        self._seen.add(cut)
        value, row = self.value(cut)
        if row is not None and len(self.rows) < _MOST_ROWS:
            self.rows.append(row())
        if value >= self.best:
            return False
        self.best, self.cut = value, cut
        return True

    def _may_be_better(self, cut: Cut) -> bool:
        return all(row.of(cut) <= limit for row, limit in self.limits) and (
            self.best == inf or all(row.of(cut) < self.best * _CLOSE for row in self.rows)
        )

    def descend(self) -> None:
        """Move boundaries, alone and neighbours together, as long as that helps."""
        better = self.cut is not None
        while better:
            assert self.cut is not None
            better = any(self.offer(cut) for cut in _near(self.cut))

    def prove(self) -> bool:
        """Go through all cuts that may be better; whether the budget was enough."""
        self._down((0,), [], [])
        return self.open == inf

    @property
    def bound(self) -> float:
        """What no allowed cut is below; after `prove`."""
        return min(self.best, self.open)

    def _down(self, marks: Cut, sums: Sequence[float], held: Sequence[float]) -> None:
        """All cuts that begin with `marks`; the first layers' sums by row, as far as they were known."""
        s, i = len(marks) - 1, marks[-1]
        if s == self.depth:
            self.offer(marks)
            return
        rows, limits = list(self.rows), self.limits
        sums = [*sums, *(_begun(row, marks) for row in rows[len(sums) :])]
        held = held or [_begun(row, marks) for row, _ in limits]
        if (
            max((a + row.rest[s][i] for a, row in zip(sums, rows, strict=True)), default=0.0)
            >= self.best * _CLOSE
        ):
            return
        children = list[tuple[float, int]]()
        for j in (
            range(i + 1, self.layers - (self.depth - s - 1) + 1) if s + 1 < self.depth else (self.layers,)
        ):
            self._spent += 1
            if any(
                a + row.stage(s, i, j) + row.rest[s + 1][j] > limit
                for a, (row, limit) in zip(held, limits, strict=True)
            ):
                continue
            bound = max(
                (a + row.stage(s, i, j) + row.rest[s + 1][j] for a, row in zip(sums, rows, strict=True)),
                default=0.0,
            )
            children.append((bound, j))
        for bound, j in sorted(children):
            if self.best < inf and bound >= self.best * _CLOSE:
                return
            if self._spent > self.budget:
                self.open = min(self.open, bound)
                return
            self._down(
                (*marks, j),
                [a + row.stage(s, i, j) for a, row in zip(sums, rows, strict=True)],
                [a + row.stage(s, i, j) for a, (row, _) in zip(held, limits, strict=True)],
            )


def _begun(row: Row, marks: Cut) -> float:
    return sum(row.stage(s, i, j) for s, (i, j) in enumerate(pairwise(marks)))


def _near(cut: Cut) -> Iterator[Cut]:
    """The cut with some boundaries, one or several in a row, moved by one or two layers."""
    inner = range(1, len(cut) - 1)
    for length in range(1, len(inner) + 1):
        for first in range(1, len(inner) - length + 2):
            for step in (1, -1, 2, -2) if length == 1 else (1, -1):
                moved = (
                    *cut[:first],
                    *(at + step for at in cut[first : first + length]),
                    *cut[first + length :],
                )
                if moved[first - 1] < moved[first] and moved[first + length - 1] < moved[first + length]:
                    yield moved
