"""Chooses an option and ranks for every table: longest processing time first (LPT), then local search.

Greedy placements in several table orders are improved one move at a time: another option or other ranks for a
table on the busiest rank, a swap of two tables, or a move of any table. With few tables, pairs of tables also
change their options together, since splitting a table over fewer ranks may pay off only after another table
has left those ranks. Every candidate respects the memory limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

from stretto.recommender.planner.job import TableJob
from stretto.recommender.planner.load_balance import LoadBalance
from stretto.recommender.planner.options import Option

_Mode = Callable[[Sequence[Option]], list[Option]]
Choice = tuple[Option, tuple[int, ...]]
_EVEN = 0.02  # weight of load imbalance in the score, to escape plateaus of the step time
_FEW = 8  # maximum number of tables for changing pairs together
_CRITICAL = 16  # maximum number of tables of the busiest rank that are tried first
_IDLE = 4  # number of least loaded ranks considered for swaps
_MANY = 16_384  # tables x ranks above which only one table order is tried
_TRIES = 250_000  # evaluation budget, reduced as the number of ranks grows


@dataclass
class PlacementSolution:
    """The choice for each table, and the step time in seconds."""

    choices: list[Choice]
    seconds: float


class Search:
    """A search over the options of all tables."""

    def __init__(self, job: TableJob, options: Sequence[Sequence[Option]]) -> None:
        self.job, self.options = job, options
        self.balance = job.balance()
        self.chosen: list[Choice | None] = [None] * len(options)
        self.left = _TRIES * 30 // (30 + job.work.ranks)
        self.stuck: int | None = None
        self.score, self.best = float("inf"), PlacementSolution([], float("inf"))

    def run(self) -> PlacementSolution | None:
        """Return the best solution, or None if nothing fits; `stuck` is then the index of the table that did
        not fit in the last attempt."""
        best: PlacementSolution | None = None
        orders = (self._by_time, self._by_density, self._by_size)
        if len(self.options) * self.job.work.ranks > _MANY:
            orders = orders[:1]
        starts = [(order, mode) for mode in (_unsplit, _any) for order in orders]
        share = self.left // (len(starts) + 1)
        for order, mode in [*starts, (self._by_size, _spread)]:
            if mode is _spread and best is not None and len(orders) == 1:
                continue
            for i in range(len(self.chosen)):
                self._remove(i)
            self.balance = self.job.balance()
            if self._place_greedily(sorted(range(len(self.options)), key=order), mode):
                improved = self._improve(share)
                if best is None or improved.seconds < best.seconds * (1 - 1e-9):
                    best = improved
        return best

    # Table orders: by seconds, bytes, or seconds per byte, largest first.

    def _by_time(self, i: int) -> tuple[float, int]:
        return -_least_busy(self.balance, self.options[i]), i

    def _by_size(self, i: int) -> tuple[float, int]:
        return -_bytes(self.options[i][0]), i

    def _by_density(self, i: int) -> tuple[float, int]:
        return -_least_busy(self.balance, self.options[i]) / max(_bytes(self.options[i][0]), 1.0), i

    # Moves.

    def _remove(self, i: int) -> Choice | None:
        choice = self.chosen[i]
        if choice is not None:
            self.balance.add(*choice, -1.0)
            self.chosen[i] = None
        return choice

    def _add(self, i: int, choice: Choice) -> None:
        self.balance.add(*choice)
        self.chosen[i] = choice

    def _score(self, squares: float | None = None) -> float:
        """Step time plus a small imbalance penalty.

        Args:
            squares: the sum of the squared rank loads, if it was computed before.
        """
        if squares is None:
            squares = sum(load * load for load in self.balance.loads())
        self.left -= 1
        return self.balance.seconds() + _EVEN * (max(0.0, squares) / self.job.work.ranks) ** 0.5

    def _best_for(self, i: int, options: Sequence[Option]) -> tuple[float, Choice] | None:
        """The best of these options for an unplaced table, with its score."""
        balance, loads = self.balance, self.balance.loads()
        order = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
        total, squares = sum(loads), sum(load * load for load in loads)
        best: tuple[float, Choice] | None = None
        for option in options:
            ranks = ranks_for(balance, option, loads, order)
            if ranks is None:
                continue
            balance.add(option, ranks)
            if option.alike:
                busy = balance.busy_seconds(option.parts[-1])
                added = 2 * busy * total + busy * busy * len(loads)
            else:
                seconds = [balance.busy_seconds(part) for part in option.parts]
                added = sum((2 * loads[r] + s) * s for r, s in zip(ranks, seconds, strict=True))
            score = self._score(squares + added)
            balance.add(option, ranks, -1.0)
            if best is None or score < best[0]:
                best = score, (option, ranks)
        return best

    def _place_greedily(self, order: Sequence[int], mode: _Mode) -> bool:
        """Place all tables in this order, with options of `mode` if they fit and else with any option."""
        for i in order:
            preferred = mode(self.options[i])
            best = (self._best_for(i, preferred) if preferred else None) or self._best_for(i, self.options[i])
            if best is None:
                self.stuck = i
                return False
            self._add(i, best[1])
        return True

    # Local search.

    def _improve(self, tries: int) -> PlacementSolution:
        """Apply improving moves until none is left or `tries` evaluations are spent."""
        until = self.left - tries
        self.score, self.best = self._score(), self._solution()
        while self.left > until:
            # tables with a part on the busiest rank, heaviest first
            loads = self.balance.loads()
            rank = max(range(len(loads)), key=lambda r: loads[r])
            critical = [
                (self.balance.busy_seconds(option.parts[ranks.index(rank)]), i)
                for i, choice in enumerate(self.chosen)
                if choice is not None and rank in (ranks := choice[1]) and (option := choice[0])
            ]
            critical.sort(key=lambda pair: (-pair[0], pair[1]))
            if not (
                self._improve_tables([i for _, i in critical[:_CRITICAL]], until, swaps=True)
                or self._improve_tables(range(len(self.chosen)), until)
                or self._improve_pair(until)
            ):
                break
        return self.best

    def _improve_tables(self, tables: Iterable[int], until: int, swaps: bool = False) -> bool:
        """Improve tables one by one; with `swaps`, stop at the first change. Returns True if any changed."""
        changed = False
        for i in tables:
            if self.left <= until:
                break
            # move the table to a better option or better ranks
            old = self._remove(i)
            assert old is not None
            best = self._best_for(i, self.options[i])
            new: float | None = None
            if best is not None and best[0] < self.score * (1 - 1e-9):
                self._add(i, best[1])
                new = best[0]
            else:
                self._add(i, old)
                if swaps:
                    new = self._swap(i)
            if new is None:
                continue
            self._accept(new)
            changed = True
            if swaps:
                break
        return changed

    def _improve_pair(self, until: int) -> bool:
        """Change two tables together: each option of one with the best matching option of the other. Returns
        True if a pair improved the score."""
        if len(self.chosen) > _FEW:
            return False
        for i, j in permutations(range(len(self.chosen)), 2):
            if self.left <= until:
                break
            old = self._remove(i), self._remove(j)
            assert old[0] is not None
            assert old[1] is not None
            best, score = (old[0], old[1]), self.score * (1 - 1e-9)
            improved = False
            for option in self.options[i]:
                choice = self._best_for(i, [option])
                if choice is None:
                    continue
                self._add(i, choice[1])
                match = self._best_for(j, self.options[j])
                if match is not None and match[0] < score:
                    improved, score = True, match[0]
                    best = choice[1], match[1]
                self._remove(i)
            self._add(i, best[0])
            self._add(j, best[1])
            if improved:
                self._accept(score)
                return True
        return False

    def _accept(self, score: float) -> None:
        self.score = score
        if self.balance.seconds() < self.best.seconds:
            self.best = self._solution()

    def _solution(self) -> PlacementSolution:
        choices = [choice for choice in self.chosen if choice is not None]
        return PlacementSolution(choices, self.balance.seconds())

    def _swap(self, i: int) -> float | None:
        """Swap an unsplit table with one on a lightly loaded rank; returns the improved score or None."""
        choice = self.chosen[i]
        if choice is None or len(choice[1]) != 1:
            return None
        loads = self.balance.loads()
        idle = set(sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))[:_IDLE]) - {choice[1][0]}
        for j, other in enumerate(self.chosen):
            if other is None or len(other[1]) != 1 or other[1][0] not in idle:
                continue
            self._remove(i)
            self._remove(j)
            self._add(i, (choice[0], other[1]))
            self._add(j, (other[0], choice[1]))
            new = self._score() if self.balance.fits() else float("inf")
            if new < self.score * (1 - 1e-9):
                return new
            self._remove(i)
            self._remove(j)
            self._add(i, choice)
            self._add(j, other)
        return None


def ranks_for(
    balance: LoadBalance, option: Option, loads: Sequence[float], order: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the least loaded ranks on which the parts of an option fit.

    The heaviest part is on the least loaded rank. () for a replicated table; None if the option does not fit.

    Args:
        order: the ranks, least loaded first.
    """
    world, first = balance.work.ranks, option.parts[0]
    if option.scope == "any":
        free = list[int]()
        for rank in order:
            if balance.fits_rank(rank, first):
                free.append(rank)
                if len(free) == len(option.parts):
                    return tuple(free)
        return None
    if option.scope == "all" and not balance.fits_everywhere(first):
        return None
    if option.split == "data":
        return ()
    local = world if option.scope == "all" else balance.work.local
    nodes = [range(start, start + local) for start in range(0, world - local + 1, local)]
    if option.scope == "node":
        nodes = [node for node in nodes if all(balance.fits_rank(rank, first) for rank in node)]
    if not nodes:
        return None
    node = min(nodes, key=lambda ranks: (max(loads[r] for r in ranks), ranks[0]))
    if first == option.parts[-1]:
        return tuple(node)
    start = min(node, key=lambda rank: (loads[rank], rank))
    return (*range(start, node.stop), *range(node.start, start))


def _unsplit(options: Sequence[Option]) -> list[Option]:
    return [option for option in options if option.split == "table"]


def _any(options: Sequence[Option]) -> list[Option]:
    return list(options)


def _spread(options: Sequence[Option]) -> list[Option]:
    """Options with the smallest parts, which are easiest to pack."""
    sizes = [max(part.stored for part in option.parts) for option in options]
    return [option for option, size in zip(options, sizes, strict=True) if size <= 1.01 * min(sizes)]


def _least_busy(balance: LoadBalance, options: Sequence[Option]) -> float:
    return min(sum(balance.busy_seconds(part) for part in option.parts) for option in options)


def _bytes(option: Option) -> float:
    return sum(part.stored for part in option.parts)
