"""Branch and bound over the candidates of one task: the fastest that fit, in the order of their times.

Choices are made in four steps: how layers are split and how large a microbatch is, the schedule, how states
are sharded, and what is recomputed or offloaded where memory does not suffice. Each partial choice has a
lower bound on its time (`planner.search.time_bounds`) and on its memory (`planner.search.memory_bounds`).
What cannot fit is dropped at once, and what fits only with recomputation is bounded with that. The smallest
bound is examined first. When a candidate's bound comes up, it is replayed and comes back with its exact time;
when that comes up, nothing left can be faster, and its exact memory is computed. So candidates are accepted
in the order of their times, the best of all is never missed, and the search ends when as many layouts fit as
are wanted, one of them safely.

With a time limit a pass dives before it proves: it follows the choices with the least expected time down to
whole candidates. The expected time is the bound times the ratio by which replays of the same schedule have
exceeded theirs. What a dive reaches excludes most of what a proof would have to examine. When most of the
time is over without a proof, the pass dives again.

What saves memory at the cost of time (recomputation, offload) is a ladder (`planner.search.savings`): of each
row of a ladder the first saving that fits is examined, and the first that fits safely.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from stretto.layout.layout import Layout
from stretto.planner.memory.fits import Fit
from stretto.planner.search.deadline import Deadline
from stretto.planner.search.exact import Exact
from stretto.planner.search.ranking import (
    TIE,
    Feasible,
    Refusals,
    best_of_family,
    cannot_win,
    is_safe,
    sort_feasible,
)
from stretto.planner.search.savings import SavingLadder
from stretto.planner.search.space import Space
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, Task
from stretto.program import entry as entry_of

# Shares of a pass's time by which layouts are estimated, listed with their microbatches, searched for
# something better than what is known, and searched for a proof; after that the pass dives again.
_ESTIMATING = 0.25
_LISTING = 0.4
_SEEKING = 0.75
_PROVING = 0.85
_NEAR = 1.3  # layouts whose estimate exceeds the best known time by more are listed last
# While a pass dives: how much longer than its bound a candidate is expected to take of which a schedule with
# its saving, a schedule, or a parallelism is known; and the delays of what is not tried at once.
_OPEN = (1.01, 1.06, 1.25)
_EXPENSIVE = 1.08  # programs that are expensive to make
_DOUBTFUL = 0.16  # what may not fit, times the share of such candidates that turned out not to
_KNOWN = 1.15  # variants of what is accepted
_PROMISING = 1.05  # expected times over that of the best up to which a dive goes on
_LATER = 1.001  # a key is renewed when it has grown by more
_CERTAIN = 0.93  # share of the memory budget; bounds below it seldom turn out not to fit

Progress = Callable[[int, int, int], None]  # candidates replayed, memories computed, layouts that fit


@dataclass(frozen=True)
class _Timed:
    """A candidate whose exact time is known."""

    candidate: Candidate


@dataclass(frozen=True)
class _Scheduled:
    """A parallelism with a schedule; `saved`: its bound includes the saving that it needs at least."""

    parallelism: Parallelism
    schedule: ScheduleChoice
    saved: bool = False


_Node = Parallelism | _Scheduled | Candidate | _Timed


@dataclass(kw_only=True)
class BranchAndBound:
    """One pass of a search: the heap of partial choices, and the candidates that fit, by family.

    Attributes:
        task: what is searched; see `Task.narrowed`.
        exact: times and memory, shared by all passes.
        until: the share of the time limit at which this pass ends.
        wanted: families that it looks for.
        only_dives: follow the most promising choice down to a whole candidate before its alternatives, and
            put off what may turn out not to fit, so that something is accepted soon, though not in the order
            of times.
    """

    task: Task
    exact: Exact
    deadline: Deadline
    until: float = 1.0
    wanted: int
    only_dives: bool = False
    progress: Progress | None = None
    families: dict[tuple[object, ...], list[Feasible]] = field(
        default_factory=dict[tuple[object, ...], list[Feasible]]
    )
    refusals: Refusals = field(default_factory=Refusals)
    candidates: int = 0
    cut_short: bool = False  # something that might be better was not examined, for lack of time
    left: float = inf  # lower bound on the cost of every candidate that was not examined

    def __post_init__(self) -> None:
        self.space, self.bounds = Space(self.task), self.exact.bounds
        self.savings = SavingLadder(self.task, self.space)
        self._heap: list[tuple[float, int, float, _Node]] = []  # key, number, bound on the cost, node
        # what is unlimited need not hurry, and proves as it goes
        self._dives = self.only_dives or self.task.seconds is not None
        self._number = count()
        self._unlisted: list[tuple[float, Layout, int | None]] = []  # estimate of the cost, layout, expert_tp
        self._legal: dict[object, bool] = {}
        self._added: set[Candidate] = set()
        self._accepted: set[Candidate] = set()
        self._costs: list[float] = []  # of the best of each family
        self._doubted = 8, 1  # candidates that might not fit, and how many did not: at first a guess
        self._safe = inf  # the least cost of what fits safely

    def go(self) -> None:
        """Search until the wanted families are proved, every candidate is examined, or time runs out."""
        self._begin = self.deadline.spent
        self._estimate_layouts()
        self._list_layouts(until=_LISTING, limit=_NEAR * self._best_guess())
        while self._heap or self._unlisted:
            if not self._heap or (self._unlisted and not self._dives and self._settled()):
                self._list_layouts(until=1.0, limit=inf)
                if not self._heap:
                    break
            spent = self._spent()
            if spent > 1.0 or (self.only_dives and not self._is_promising()):
                self.cut_short = True
                break
            self._turn(spent)
            if not self._dives and self._settled():
                break
            key, number, bound, node = heapq.heappop(self._heap)
            later = bound * self._delay(node)
            if later > key * _LATER:  # of its schedule or its family more is known by now
                heapq.heappush(self._heap, (later, number, bound, node))
            else:
                self._step(bound, node)
        for _, layout, _ in self._unlisted:
            self._leave(layout)
        self.left = min([self.left, *(bound for _, _, bound, _ in self._heap)])
        self.left /= 1 + self.task.tolerance

    def chosen(self) -> list[Feasible]:
        """The best of each family, the best first."""
        return sort_feasible([best_of_family(family) for family in self.families.values()], self.task)

    def accept(self, feasible: Sequence[Feasible]) -> None:
        """Take what fits, as this or an earlier pass has established."""
        for one in feasible:
            if one.candidate not in self._accepted:
                self._accepted.add(one.candidate)
                self.families.setdefault(one.candidate.family, []).append(one)
                if is_safe(one.fit, self.task.room):
                    self._safe = min(self._safe, self._cost(one.seconds, one.candidate))
        self._costs = sorted(
            min(self._cost(one.seconds, one.candidate) for one in family) for family in self.families.values()
        )

    def cost_of(self, one: Feasible) -> float:
        """What is minimised, of one that fits."""
        return self._cost(one.seconds, one.candidate)

    def best(self) -> float:
        """The least cost (time, or device time) of what fits."""
        return self._costs[0] if self._costs else inf

    def _spent(self) -> float:
        """The share of this pass's time that is over."""
        whole = self.until - self._begin
        return (self.deadline.spent - self._begin) / whole if whole > 0 else 2.0

    def _is_promising(self) -> bool:
        """Whether a dive may soon accept something better, or has not accepted as many families as are
        wanted.
        """
        return len(self.families) < self.wanted or self._heap[0][0] < _PROMISING * self.best()

    def _turn(self, spent: float) -> None:
        """Dive at first, prove then, and dive again when most of the time is over."""
        dives = self.only_dives or spent > _PROVING
        dives = dives or (self._dives and spent < _SEEKING and self._is_promising())
        if dives != self._dives:
            self._dives = dives
            # sort what is open as this part of the search wants it
            self._heap = [(bound * self._delay(node), n, bound, node) for _, n, bound, node in self._heap]
            heapq.heapify(self._heap)

    def _settled(self) -> bool:
        """Whether as many families are known as are wanted, one of them safe, that nothing left can beat."""
        bound = self._heap[0][0]
        return self._safe <= bound and bisect_right(self._costs, bound) >= self.wanted

    def _step(self, bound: float, node: _Node) -> None:
        if isinstance(node, Parallelism):
            self._schedules(bound, node)
        elif isinstance(node, _Scheduled):
            if node.saved:
                self._shardings(bound, node.parallelism, node.schedule)
            else:
                self._with_saving(bound, node)
        elif isinstance(node, Candidate):
            self._replay(bound, node)
        else:
            self._compute_memory(node.candidate)

    def _delay(self, node: _Node) -> float:
        """A factor on the key. To prove the best it is 1; a dive sorts by expected times, and puts off what
        may not fit, schedules whose programs are expensive to make, and variants of what is accepted.
        """
        if isinstance(node, _Timed) or not self._dives:
            return 1.0
        if isinstance(node, Parallelism):
            return _OPEN[2]
        delay = self.exact.excess(node.schedule)
        if not entry_of(node.schedule.name).early:
            delay *= _EXPENSIVE
        if isinstance(node, _Scheduled):
            return delay * _OPEN[1 - node.saved]
        if self._is_doubtful(node):
            doubted, refused = self._doubted
            delay *= 1.0 + _DOUBTFUL * refused / doubted
        return delay * (_KNOWN if node.family in self.families else 1.0)

    def _is_doubtful(self, candidate: Candidate) -> bool:
        """Whether a candidate that may fit by its bound may well turn out not to."""
        known = self.exact.fits.get(candidate)
        if known is not None:
            return not known.likely
        return self.savings.bounds.of(candidate).total > _CERTAIN * self.savings.budget

    def _cost(self, seconds: float, candidate: Candidate) -> float:
        """What is minimised: seconds of the step, or seconds times devices."""
        return seconds * self._price(candidate.parallelism.layout)

    def _price(self, layout: Layout) -> int:
        return layout.world if self.task.objective == "tokens_per_dollar" else 1

    def _push(self, seconds: float, layout: Layout, node: _Node, least: float = 0.0) -> None:
        """Put a node on the heap, unless it cannot be among the best: a partial choice by its bound plus the
        tolerance, a timed one by its exact time.

        Args:
            least: the bound of the choice from which it comes.
        """
        bound = seconds * self._price(layout)
        if not isinstance(node, _Timed):
            bound = max(bound * (1 + self.task.tolerance), least)
        if self._safe < inf and len(self._costs) >= self.wanted and bound > self._limit:
            return
        heapq.heappush(self._heap, (bound * self._delay(node), next(self._number), bound, node))

    @property
    def _limit(self) -> float:
        """The cost above which nothing more is wanted: that of the last of the wanted families and of the
        fastest safe one, and what is tied with it.
        """
        return max(self._costs[self.wanted - 1], self._safe) * (1 + TIE)

    # ------------------------------------------------------------------ the steps

    def _estimate_layouts(self) -> None:
        """Drop layouts whose states do not fit, and sort the others by estimates of their times."""
        usual_first = sorted(self.space.layouts(), key=lambda one: self._unusual(one[0]))
        for layout, expert_tp in usual_first:
            if not self.space.sharings(layout):
                continue  # none is among the fixed ones
            if self._spent() > _ESTIMATING:
                self._unlisted.append((inf, layout, expert_tp))
                continue
            fit = self.savings.states_cannot_fit(layout, expert_tp)
            if fit is None:
                estimate = self.bounds.typical(layout, expert_tp) * self._price(layout)
                self._unlisted.append((estimate, layout, expert_tp))
            else:
                self._refuse_layout(layout, expert_tp, fit)
        self._unlisted.sort(key=lambda entry: entry[0])

    def _refuse_layout(self, layout: Layout, expert_tp: int | None, fit: Fit) -> None:
        parallelism = next(self.space.parallelisms_of(layout, expert_tp), None)
        if parallelism is not None and self.space.schedules(parallelism):
            self.candidates += 1
            dp, saving = self.savings.least_memory(layout, expert_tp)
            example = Candidate(parallelism, self.space.schedules(parallelism)[0], dp, saving)
            self.refusals.add(example, fit, least=True)

    def _best_guess(self) -> float:
        """The best cost that is known, or else about twice what may be reached."""
        return self.best() if self._costs else 2 * min((one[0] for one in self._unlisted), default=inf)

    def _list_layouts(self, until: float, limit: float) -> None:
        """Bound layouts with every microbatch, the most promising first.

        Args:
            until: share of the pass's time at which it ends.
            limit: of the estimates.
        """
        rest = list[tuple[float, Layout, int | None]]()
        for estimate, layout, expert_tp in self._unlisted:
            if estimate > limit or self._spent() > until:
                rest.append((estimate, layout, expert_tp))
                continue
            for parallelism in self.space.parallelisms_of(layout, expert_tp):
                self._add_parallelism(parallelism)
        self._unlisted = rest

    def _unusual(self, layout: Layout) -> tuple[bool, int]:
        """A sort key, smaller for what is more often fast: tensor-parallel ranks within a node, and little
        context parallelism.
        """
        return layout.tp > self.task.cluster.node, layout.cp

    def _leave(self, layout: Layout) -> None:
        """Leave a layout unexamined, for lack of time."""
        self.left = min(self.left, self.bounds.ideal(layout) * self._price(layout))
        self.cut_short = True

    def _add_parallelism(self, parallelism: Parallelism) -> None:
        each = len(self.space.sharings(parallelism.layout)) * len(self.space.schedules(parallelism))
        self.candidates += each
        if each:
            self._push(self.bounds.parallelism(parallelism), parallelism.layout, parallelism)

    def _schedules(self, least: float, parallelism: Parallelism) -> None:
        fit = self.savings.cannot_fit(parallelism)
        if fit is not None:
            dp, saving = self.savings.least_memory(parallelism.layout, parallelism.expert_tp)
            example = Candidate(parallelism, self.space.schedules(parallelism)[0], dp, saving)
            each = len(self.space.sharings(parallelism.layout)) * len(self.space.schedules(parallelism))
            self.refusals.add(example, fit, least=True, count=each)
            return
        for choice in self.space.schedules(parallelism):
            if self.space.is_made(choice, parallelism.layout.pp):
                bound = self.bounds.schedule(parallelism, choice, self.space.first_saving())
                self._push(bound, parallelism.layout, _Scheduled(parallelism, choice), least)

    def _with_saving(self, least: float, node: _Scheduled) -> None:
        """Bound a schedule once more with the saving that it needs at least; only now its program is made."""
        parallelism, choice = node.parallelism, node.schedule
        saving, may_fit = self.savings.required_saving(parallelism, choice)
        if may_fit:
            bound = self.bounds.schedule(parallelism, choice, saving)
            self._push(bound, parallelism.layout, replace(node, saved=True), least)
        else:
            dp = self.savings.least_memory(parallelism.layout, parallelism.expert_tp)[0]
            last = Candidate(parallelism, choice, dp, saving)
            each = len(self.space.sharings(parallelism.layout))
            self.refusals.add(last, self.savings.fit(last), least=True, count=each)

    def _shardings(self, least: float, parallelism: Parallelism, choice: ScheduleChoice) -> None:
        first = self.space.first_saving()
        for dp in self.space.sharings(parallelism.layout):
            candidate = Candidate(parallelism, choice, dp, first)
            rows = self.savings.rows(parallelism, choice, dp, first)
            made = self.savings.climb(candidate, rows)
            if not made:
                last = replace(candidate, saving=rows[-1][-1])
                self.refusals.add(last, self.savings.fit(last), least=True)
            for one in made:
                self._add(one, least)

    def _add(self, candidate: Candidate, least: float) -> None:
        if candidate in self._added:
            return
        self._added.add(candidate)
        bound = self.bounds.candidate(candidate, candidate.job(self.task))
        if self._beaten(candidate, bound):
            return
        known = self.exact.fits.get(candidate)
        if self._dives and known is not None and known.likely:
            self._replay(max(least, self._cost(bound, candidate)), candidate)
        else:
            self._push(bound, candidate.parallelism.layout, candidate, least)

    def _beaten(self, candidate: Candidate, seconds: float) -> bool:
        """Whether a candidate that takes at least so long adds nothing to its family."""
        family = self.families.get(candidate.family)
        return family is not None and cannot_win(candidate, seconds, family, self.task.room)

    def _replay(self, least: float, candidate: Candidate) -> None:
        """Replay a candidate, unless a tighter bound is known by now, or its memory fails first."""
        layout = candidate.parallelism.layout
        bound = least / self._price(layout) / (1 + self.task.tolerance)
        if self._beaten(candidate, bound) or not self._is_legal(candidate):
            return
        if candidate not in self.exact.times:
            bound = self.exact.bound(candidate, candidate.job(self.task))
            if not self._dives and self._cost(bound, candidate) * (1 + self.task.tolerance) > least * (
                1 + 1e-9
            ):
                self._push(bound, layout, candidate, least)
                return
        if self.exact.expected_seconds(candidate) > self.deadline.left(self.until):
            self.left = min(self.left, least)
            self.cut_short = True
            return
        if self._is_doubtful(candidate):
            likely = self.exact.fit(candidate).likely
            doubted, refused = self._doubted
            self._doubted = doubted + 1, refused + (not likely)
            if not likely:
                self._refuse(candidate, least)
                return
        if self.progress and len(self.exact.times) % 20 == 0:
            self.progress(len(self.exact.times), len(self.exact.fits), len(self.families))
        seconds = self.exact.seconds(candidate)
        if self._dives:
            self._compute_memory(candidate)
        else:
            self._push(seconds, layout, _Timed(candidate), least)

    def _compute_memory(self, candidate: Candidate) -> None:
        """Nothing left is faster than this candidate: if it fits, it is one of the best."""
        seconds = self.exact.times[candidate].seconds
        if self._beaten(candidate, seconds) or candidate in self._accepted:
            return
        fit = self.exact.fit(candidate)
        if not fit.likely:
            self._refuse(candidate, self._cost(seconds, candidate))
            return
        self.accept([Feasible(candidate, seconds, fit)])
        if not is_safe(fit, self.task.room):
            self._add_savings(candidate, self._cost(seconds, candidate))

    def _refuse(self, candidate: Candidate, least: float) -> None:
        self.refusals.add(candidate, self.exact.fit(candidate))
        self._add_savings(candidate, least)

    def _add_savings(self, candidate: Candidate, least: float) -> None:
        """Add what saves more than a candidate that does not surely fit: of each row the first saving that
        fits, and the first that fits safely. Memory decreases along a row.
        """
        ladder = self.savings.rows(candidate.parallelism, candidate.schedule, candidate.dp, candidate.saving)
        for row in filter(None, (ladder[0][1:], *ladder[1:])):
            at = 0
            for enough in (_is_likely, self._is_safe):
                at = self._first(candidate, row, at, enough)
                if at == len(row):
                    break
                self._add(replace(candidate, saving=row[at]), least)

    def _first(
        self, candidate: Candidate, row: Sequence[Saving], start: int, enough: Callable[[Fit], bool]
    ) -> int:
        """Index of the first saving in a row, from `start` on, with which memory is enough; `len(row)`: none,
        or there is no time to tell.
        """

        def fits(at: int) -> bool:
            return enough(self.exact.fit(replace(candidate, saving=row[at])))

        start = max(start, self.savings.first_that_may_fit(candidate, row))
        last = len(row) - 1
        if start > last or self.exact.expected_seconds(candidate) > self.deadline.left(self.until):
            return len(row)
        if not fits(last):
            end = replace(candidate, saving=row[last])
            self.refusals.add(end, self.exact.fit(end))
            return len(row)
        # bounds and memory mostly differ by as much as they do at the end of the row
        end = replace(candidate, saving=row[last])
        excess = self.exact.fit(end).allocated.mid - self.savings.bounds.of(end).total
        guess = min(last, max(start, self.savings.first_that_may_fit(candidate, row, excess)))
        return first_true(fits, start, guess, last)

    def _is_safe(self, fit: Fit) -> bool:
        return is_safe(fit, self.task.room)

    def _is_legal(self, candidate: Candidate) -> bool:
        """By the rules, checked once for each parallelism, schedule and way to share states; by what a
        framework has, for each saving too.
        """
        parts = candidate.parallelism, candidate.schedule, candidate.dp
        key = parts if self.task.refusals is None else candidate
        if key not in self._legal:
            self._legal[key] = not self.space.illegal(candidate.job(self.task), str(candidate))
        return self._legal[key]


def first_true(holds: Callable[[int], bool], start: int, guess: int, end: int) -> int:
    """The first index from `start` to `end` for which a monotone condition holds, which it does at `end`:
    steps of doubling length from a guess, then bisection between the last two.
    """
    step = 1
    if guess == end or holds(guess):
        low = high = guess
        while high > start:
            low = max(start, high - step)
            if not holds(low):
                low += 1
                break
            high, step = low, 2 * step
    else:
        low, high = guess + 1, min(end, guess + step)
        while high < end and not holds(high):
            step *= 2
            low, high = high + 1, min(end, high + step)
    return low + bisect_left(range(low, high), True, key=holds)


def _is_likely(fit: Fit) -> bool:
    return fit.likely
