"""The best cut by descent and by branch and bound, where sums over stages bound unfinished cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from stretto.planner.cutting.rows import Cut, Row

_CLOSE = 1 - 1e-9  # a cut must be better by more than this factor to be looked for
_MOST_ROWS = 48  # each row prunes more and makes each step slower


@dataclass(kw_only=True)
class CutSearch:
    """Looks for the cut of least value.

    Attributes:
        layers, depth: numbers of layers, and of stages.
        value: of a whole cut, inf if it is not allowed; and a row that is a lower bound for every cut and
            exact for this one, if there is such a row.
        rows: lower bounds on the value of every cut.
        limits: rows, with the largest value that an allowed cut may have.
        budget: steps of `prove`.
        open: least bound among the cuts that the budget left unexamined.
    """

    layers: int
    depth: int
    value: Callable[[Cut], tuple[float, Callable[[], Row] | None]]
    rows: list[Row]
    limits: Sequence[tuple[Row, float]] = ()
    budget: int = 100_000
    best: float = inf
    cut: Cut | None = None
    open: float = inf
    _spent: int = 0
    _offered: set[Cut] = field(default_factory=set[Cut])

    def offer(self, cut: Cut) -> bool:
        """Evaluate a cut; return True if it is better than all before."""
        if cut in self._offered or not self._may_be_better(cut):
            return False
        self._offered.add(cut)
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
            better = any(self.offer(cut) for cut in _neighbours(self.cut))

    def prove(self) -> bool:
        """Examine all cuts that may be better; return True if the budget sufficed."""
        self._extend((0,), [], [])
        return self.open == inf

    @property
    def bound(self) -> float:
        """A lower bound for all allowed cuts; after `prove`."""
        return min(self.best, self.open)

    def _extend(self, marks: Cut, sums: Sequence[float], limit_values: Sequence[float]) -> None:
        """Go through all cuts that begin with `marks`.

        Args:
            sums: the value of `marks` by row, for the rows known when it was computed.
            limit_values: the value of `marks` by limit.
        """
        s, i = len(marks) - 1, marks[-1]
        if s == self.depth:
            self.offer(marks)
            return
        rows, limits = list(self.rows), self.limits
        sums = [*sums, *(_prefix_sum(row, marks) for row in rows[len(sums) :])]
        limit_values = limit_values or [_prefix_sum(row, marks) for row, _ in limits]
        if (
            max((a + row.suffix[s][i] for a, row in zip(sums, rows, strict=True)), default=0.0)
            >= self.best * _CLOSE
        ):
            return
        children = list[tuple[float, int]]()
        for j in (
            range(i + 1, self.layers - (self.depth - s - 1) + 1) if s + 1 < self.depth else (self.layers,)
        ):
            self._spent += 1
            if any(
                a + row.stage(s, i, j) + row.suffix[s + 1][j] > limit
                for a, (row, limit) in zip(limit_values, limits, strict=True)
            ):
                continue
            bound = max(
                (a + row.stage(s, i, j) + row.suffix[s + 1][j] for a, row in zip(sums, rows, strict=True)),
                default=0.0,
            )
            children.append((bound, j))
        for bound, j in sorted(children):
            if self.best < inf and bound >= self.best * _CLOSE:
                return
            if self._spent > self.budget:
                self.open = min(self.open, bound)
                return
            self._extend(
                (*marks, j),
                [a + row.stage(s, i, j) for a, row in zip(sums, rows, strict=True)],
                [a + row.stage(s, i, j) for a, (row, _) in zip(limit_values, limits, strict=True)],
            )


def _prefix_sum(row: Row, marks: Cut) -> float:
    return sum(row.stage(s, i, j) for s, (i, j) in enumerate(pairwise(marks)))


def _neighbours(cut: Cut) -> Iterator[Cut]:
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
