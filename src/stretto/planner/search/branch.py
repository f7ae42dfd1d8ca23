"""Branch and bound over the candidates of one task: the fastest that fit, in the order of their times.

Choices are made in four steps: how layers are split and how large a microbatch is, the schedule, how states
are sharded, and what is recomputed or offloaded if memory does not suffice. Each partial choice has a lower
bound on its time (`planner.search.time_bounds`) and on its memory (`planner.search.memory_bounds`); those of
all splits with one schedule are computed at once, as arrays. Choices that cannot fit are dropped; those that
fit only with recomputation are bounded with it. The smallest bound is expanded first. When a candidate's
bound comes up, it is replayed and pushed back with its exact time; when that comes up, nothing left can be
faster, and its exact memory is computed. So candidates are accepted in the order of their times, the best is
never missed, and the search ends when as many layouts fit as are wanted, one of them safely.

With a time limit a pass dives before it proves: it follows the choices with the least expected time down to
complete candidates. The expected time is the bound times the mean ratio by which replays of the same schedule
exceeded theirs. What a dive finds excludes most of what a proof would have to examine. When most of the time
is over without a proof, the pass dives again.

Options that save memory and cost time (recomputation, offload) are tried in order (`MemorySavingOptions`):
in each row, the first that fits and the first that fits safely.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf, lcm
from operator import attrgetter
from typing import NamedTuple

from stretto.job.chain import blocks_among
from stretto.job.data_parallel import MODES, DataParallelSettings
from stretto.layout.layout import Layout
from stretto.planner.memory.fits import Fit
from stretto.planner.search.evaluator import CandidateEvaluator
from stretto.planner.search.memory_bounds import (
    MemoryBound,
    MemoryBounds,
    filling_microbatches,
    memory_budget,
)
from stretto.planner.search.ranking import (
    TIE,
    Feasible,
    RejectionCounts,
    best_of_family,
    cannot_win,
    cost_factor,
    is_safe,
    sort_feasible,
)
from stretto.planner.search.space import Space, depth_of
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, SearchTask
from stretto.program import entry

# The constants below order the search and divide its time; none changes a bound, so without a time limit the
# result does not depend on them. They were chosen on the eight cases of `benchmarks/plan_search.py`, which
# re-tunes them: run it with `--long 120` for each value and compare the column `distance`.

# Share of a pass's time after which bounding layouts ends. Longer: fewer layouts are left without a bound;
# shorter: more time to replay those that look fast.
_LAYOUTS_END = 0.25
# Layouts with bounds below this multiple of the least are bounded with each microbatch and schedule together.
# Larger: larger arrays; smaller: less is bounded in vain.
_CHUNK_RANGE = 1.05
# Share after which the first dive gives way to the proof. Later: better layouts; earlier: smaller gaps.
_FIRST_DIVE_END = 0.75
# Share after which an unfinished proof gives way to the last dive, which fills the ranking.
_PROOF_END = 0.85
# Expected time over the bound of a layout during a dive. Smaller: more layouts are open at the start of the
# dive; larger: the dive starts sooner.
_LAYOUT_EXCESS = 1.4
# Expected time over the bound during a dive, for nodes with and without the savings that they need. Smaller:
# breadth first; larger: depth first.
_EXPECTED_EXCESS = (1.01, 1.06)
# Parallelisms of a group whose bounds are below this multiple of its least one get the savings that they
# need. Larger: more are bounded at once; smaller: less is bounded in vain.
_GROUP_RANGE = 1.1
# Factor on the expected time of schedules whose programs are expensive to make. Larger: more candidates in
# the same time; smaller: no prejudice against these schedules.
_EXPENSIVE_PROGRAM_PENALTY = 1.08
# Penalty of candidates that may not fit, times the share of such candidates that did not. Larger: fewer
# replays are wasted; smaller: tight layouts, often the fastest, are found sooner.
_OOM_RISK_PENALTY = 0.16
# Factor on the expected time of variants of accepted families. Larger: more families; smaller: each family
# is represented by a better variant.
_ACCEPTED_FAMILY_PENALTY = 1.15
# A dive continues while the next expected time is below this multiple of the best time. Larger: longer dives
# and a later proof.
_DIVE_MARGIN = 1.05
# A node is pushed back if its key has grown by more since it was pushed. Larger: fewer updates of the heap;
# smaller: an order closer to the current expectations.
_REKEY_TOLERANCE = 1.001
# Share of the memory budget above which a bound counts as tight. Smaller: more candidates have their memory
# computed before their replay.
_TIGHT_SHARE = 0.93

Progress = Callable[[int, int, int], None]  # candidates replayed, memories computed, families that fit


class _Timed(NamedTuple):
    """A candidate whose exact time is known."""

    candidate: Candidate


class _Scheduled(NamedTuple):
    """A parallelism with a schedule, and the saving of memory that it needs at least."""

    parallelism: Parallelism
    schedule: ScheduleChoice


@dataclass(eq=False, kw_only=True)
class _Group:
    """Parallelisms with one schedule, whose pipeline ranks hold equally many microbatches: they are bounded
    together.

    Attributes:
        parallelisms: ascending by their bounds.
        bounds: lower bounds on their costs.
        saved: the bounds include the savings that they need at least.
        position: index of the next to be expanded.
    """

    schedule: ScheduleChoice
    parallelisms: Sequence[Parallelism]
    bounds: Sequence[float]
    saved: bool = False
    position: int = 0


class _Unsaved(NamedTuple):
    """A candidate whose further savings were put off for lack of time; see `_add_savings`."""

    candidate: Candidate
    fits: bool


_Node = _Group | _Scheduled | Candidate | _Timed | _Unsaved

_SizedLayout = tuple[Layout, int | None]  # a layout and its expert_tp


@dataclass(kw_only=True)
class BranchAndBound:
    """One pass of a search: the heap of partial choices, and the candidates that fit, by family.

    Attributes:
        task: the search space; see `Task.narrowed`.
        evaluator: exact times and memory, shared by all passes.
        until: share of the round (`SearchWork`) at which this pass ends.
        wanted: number of families to find.
        only_dives: follow the most promising choice down to a complete candidate before its alternatives, and
            put off what may not fit, so that something is accepted soon, though not in the order of times.
        safe_margin: a dive continues while the next expected time is below this multiple of the best time and
            nothing fits safely. Larger: safe layouts that are slower; smaller: an earlier proof.
        cut_short: candidates that might be better were not examined, for lack of time.
        unexamined_cost: lower bound on the cost of every candidate that was not examined.
    """

    task: SearchTask
    evaluator: CandidateEvaluator
    until: float = 1.0
    wanted: int
    only_dives: bool = False
    safe_margin: float = 1.25
    progress: Progress | None = None
    families: dict[tuple[object, ...], list[Feasible]] = field(
        default_factory=dict[tuple[object, ...], list[Feasible]]
    )
    rejections: RejectionCounts = field(default_factory=RejectionCounts)
    candidates: int = 0
    cut_short: bool = True
    unexamined_cost: float = 0.0

    def __post_init__(self) -> None:
        self.space, self.bounds = Space(self.task), self.evaluator.bounds
        self.savings = MemorySavingOptions(self.task, self.space, self.evaluator.memory)
        self._heap: list[tuple[float, int, float, _Node]] = []  # key, tie breaker, bound on the cost, node
        # without a time limit, search best-first from the start
        self._dives = self.only_dives or self.task.seconds is not None
        self._tie_breaker = count()
        self._largest = lcm(*self.space.micro_batches(0))  # a microbatch that all others divide
        self._unbounded: list[_SizedLayout] | None = None  # None: not listed yet
        self._unexpanded: list[tuple[float, int, _SizedLayout | Parallelism]] = []  # a heap like the other
        self._postponed: list[tuple[float, _Node]] = []
        self._legal: dict[object, bool] = {}
        self._prices: dict[Layout, float] = {}
        self._added: set[Candidate] = set()
        self._accepted: set[Candidate] = set()
        self._costs: list[float] = []  # of the best of each family, ascending
        self._tight_candidates = 8, 1  # candidates that might not fit, and how many did not: a first guess
        self._safe = inf  # least cost of what fits safely

    def run(self) -> None:
        """Search until the wanted families are proved, every candidate is examined, or time runs out. A pass
        that was cut short continues when it is run again.
        """
        self._start = self.evaluator.work.share
        self.cut_short, self.unexamined_cost = False, inf
        for bound, node in self._postponed:
            self._push_bound(bound, node)
        self._postponed.clear()
        self._sort_for(dives=self.only_dives or self.task.seconds is not None)
        self._bound_layouts()
        while True:
            self._expand_layouts()
            if not self._heap:
                self.cut_short |= bool(self._unexpanded) and self._unexpanded[0][0] <= self._worst_wanted()
                break
            spent = self._spent()
            if spent > 1.0 or (self.only_dives and not self._is_promising()):
                self.cut_short = True
                break
            # dive first, then prove, and dive again when most of the time is over
            dives = self.only_dives or spent > _PROOF_END
            dives = dives or (self._dives and spent < _FIRST_DIVE_END and self._is_promising())
            self._sort_for(dives=dives)
            if not self._dives and self._is_proved():
                break
            key, tie_breaker, bound, node = heapq.heappop(self._heap)
            new_key = bound * self._key_factor(node)
            if new_key > key * _REKEY_TOLERANCE:  # its schedule or its family is known better by now
                heapq.heappush(self._heap, (new_key, tie_breaker, bound, node))
            elif isinstance(node, _Group):
                (self._next_of if node.saved else self._bound_with_saving)(node)
            elif isinstance(node, _Scheduled):
                self._expand_shardings(bound, node)
            elif isinstance(node, Candidate):
                self._replay(bound, node)
            elif isinstance(node, _Timed):
                self._accept_if_it_fits(node.candidate)
            else:
                self._add_savings(node.candidate, bound, fits=node.fits)
        bounds = [bound for bound, *_ in self._unexpanded[:1] + self._postponed]
        bounds += [bound for _, _, bound, _ in self._heap]
        self.unexamined_cost = min([self.unexamined_cost, *bounds]) / (1 + self.task.tolerance)
        for layout, _ in self._unbounded or ():
            self.unexamined_cost = min(self.unexamined_cost, self.bounds.ideal(layout) * self._price(layout))
            self.cut_short = True

    def chosen(self) -> list[Feasible]:
        """The best of each family, the best first."""
        return sort_feasible([best_of_family(family) for family in self.families.values()], self.task)

    def accept(self, candidates: Sequence[Feasible]) -> None:
        """Add candidates that fit, as this or an earlier pass has established."""
        for feasible in candidates:
            if feasible.candidate not in self._accepted:
                self._accepted.add(feasible.candidate)
                self.families.setdefault(feasible.candidate.family(self.task), []).append(feasible)
                if is_safe(feasible.fit, self.task.memory_headroom):
                    self._safe = min(self._safe, self.cost_of(feasible))
        self._costs = sorted(min(map(self.cost_of, family)) for family in self.families.values())

    @property
    def slower_layouts(self) -> int:
        """Number of layouts that are too slow to be among the best, whatever else is chosen."""
        slower = [choice for bound, _, choice in self._unexpanded if bound > self._worst_wanted()]
        return sum(not isinstance(choice, Parallelism) for choice in slower)

    def cost_of(self, feasible: Feasible) -> float:
        """The objective: seconds of the step, or seconds times devices; more for an odd layout."""
        return self._cost(feasible.seconds, feasible.candidate)

    def best(self) -> float:
        """The least cost of what fits."""
        return self._costs[0] if self._costs else inf

    def _spent(self) -> float:
        """The share of this pass's time that is over."""
        duration = self.until - self._start
        return (self.evaluator.work.share - self._start) / duration if duration > 0 else 2.0

    def _is_promising(self) -> bool:
        """True if a dive may soon accept a better candidate, or too few families are accepted, or none that
        fits safely.
        """
        margin = _DIVE_MARGIN if self._safe < inf else self.safe_margin
        return len(self.families) < self.wanted or self._heap[0][0] < margin * self.best()

    def _is_proved(self) -> bool:
        """True once `wanted` families, one of them safe, beat the lower bound of everything left."""
        bound = self._heap[0][0]
        return self._safe <= bound and bisect_right(self._costs, bound) >= self.wanted

    def _sort_for(self, *, dives: bool) -> None:
        """Begin a dive or a proof, which sort the heap by other keys."""
        if dives != self._dives:
            self._dives = dives
            self._heap = [
                (bound * self._key_factor(node), n, bound, node) for _, n, bound, node in self._heap
            ]
            heapq.heapify(self._heap)

    def _key_factor(self, node: _Node) -> float:
        """The key of a node over its bound: 1 in a proof. A dive sorts by expected times, and puts off what
        may not fit, schedules whose programs are expensive to make, and variants of accepted families.
        """
        if isinstance(node, _Timed | _Unsaved) or not self._dives:
            return 1.0
        factor = self.evaluator.excess(node.schedule)
        if not entry(node.schedule.name).early:
            factor *= _EXPENSIVE_PROGRAM_PENALTY
        if isinstance(node, _Group):
            return factor * _EXPECTED_EXCESS[1 - node.saved]
        if isinstance(node, _Scheduled):
            return factor * _EXPECTED_EXCESS[0]
        if self._is_tight(node):
            examined, rejected = self._tight_candidates
            factor *= 1.0 + _OOM_RISK_PENALTY * rejected / examined
        return factor * (_ACCEPTED_FAMILY_PENALTY if node.family(self.task) in self.families else 1.0)

    def _is_tight(self, candidate: Candidate) -> bool:
        """True if a candidate whose bound fits may turn out not to fit."""
        fit = self.evaluator.fits.get(candidate)
        if fit is not None:
            return not fit.likely
        return self.savings.bounds.of(candidate).total > _TIGHT_SHARE * self.savings.budget

    def _cost(self, seconds: float, candidate: Candidate) -> float:
        return seconds * self._price(candidate.parallelism.layout)

    def _price(self, layout: Layout) -> float:
        if layout not in self._prices:
            self._prices[layout] = cost_factor(layout, self.task)
        return self._prices[layout]

    def _cost_bound(self, seconds: float, layout: Layout) -> float:
        return seconds * self._price(layout) * (1 + self.task.tolerance)

    def _push(self, seconds: float, layout: Layout, node: _Node, parent_bound: float = 0.0) -> None:
        """Put a node on the heap, unless it cannot be among the best: a partial choice by its bound plus the
        tolerance, a timed candidate by its exact time.
        """
        bound = seconds * self._price(layout)
        if not isinstance(node, _Timed):
            bound = max(bound * (1 + self.task.tolerance), parent_bound)
        if bound <= self._worst_wanted():
            self._push_bound(bound, node)

    def _push_bound(self, bound: float, node: _Node) -> None:
        heapq.heappush(self._heap, (bound * self._key_factor(node), next(self._tie_breaker), bound, node))

    def _worst_wanted(self) -> float:
        """The cost above which nothing can be among the best."""
        if self._safe == inf or len(self._costs) < self.wanted:
            return inf
        return max(self._costs[self.wanted - 1], self._safe) * (1 + TIE)

    # ------------------------------------------------------------------ expanding nodes

    def _bound_layouts(self) -> None:
        """Drop layouts whose states do not fit, and sort the others by their bounds."""

        def rarity(sized: _SizedLayout) -> tuple[bool, int]:
            # often fast: tensor-parallel ranks within a node, and little context parallelism
            return sized[0].tp > self.task.cluster.node, sized[0].cp

        if self._unbounded is None:
            layouts = sorted(self.space.layouts(), key=rarity, reverse=True)
            self._unbounded = [sized for sized in layouts if self.space.sharings(sized[0])]
        while self._unbounded and self._spent() <= _LAYOUTS_END:
            layout, expert_tp = self._unbounded.pop()
            fit = self.savings.states_cannot_fit(layout, expert_tp)
            if fit is None:
                if splits := self.space.splits(layout, expert_tp):
                    smallest = min(self.space.micro_batches(self.task.global_batch // layout.dp), default=1)
                    bound = min(self._floor(split, smallest) for split in splits)
                    heapq.heappush(self._unexpanded, (bound, next(self._tie_breaker), (layout, expert_tp)))
                continue
            parallelism = next(self.space.parallelisms_of(layout, expert_tp), None)
            if parallelism is not None and self.space.schedules(parallelism):
                self.candidates += 1
                smallest = self.savings.least_memory(layout, expert_tp)
                example = Candidate(parallelism, self.space.schedules(parallelism)[0], *smallest)
                self.rejections.add(example, fit, lower_bound=True)

    def _floor(self, parallelism: Parallelism, smallest: int) -> float:
        """The bound on the cost of a split with microbatches of this size or larger ones."""
        seconds = self.bounds.floor(replace(parallelism, micro_batch=self._largest), smallest)
        return self._cost_bound(seconds, parallelism.layout)

    def _candidates_of(self, parallelism: Parallelism) -> int:
        return len(self.space.sharings(parallelism.layout)) * len(self.space.schedules(parallelism))

    def _expand_layouts(self) -> None:
        """Bound layouts with every microbatch and schedule, many at once, while one may be better than the
        first node on the heap.
        """
        excess = _LAYOUT_EXCESS if self._dives else 1.0
        while self._unexpanded and self._spent() <= 1.0:
            lowest = self._unexpanded[0][0]
            if lowest > self._worst_wanted() or (self._heap and lowest * excess > self._heap[0][0]):
                break
            parallelisms, floors = list[Parallelism](), list[float]()
            while self._unexpanded and self._unexpanded[0][0] <= _CHUNK_RANGE * lowest:
                bound, _, choice = heapq.heappop(self._unexpanded)
                if isinstance(choice, Parallelism):
                    parallelisms.append(choice)
                    floors.append(bound)
                else:
                    self._expand_layout(*choice)
            self._group(parallelisms, floors)

    def _expand_layout(self, layout: Layout, expert_tp: int | None) -> None:
        """Bound a layout with each microbatch."""
        for parallelism in self.space.parallelisms_of(layout, expert_tp):
            candidates = self._candidates_of(parallelism)
            self.candidates += candidates
            if candidates and self._floor(parallelism, parallelism.micro_batch) <= self._worst_wanted():
                bound = self._cost_bound(self.bounds.parallelism(parallelism), layout)
                if bound <= self._worst_wanted():
                    heapq.heappush(self._unexpanded, (bound, next(self._tie_breaker), parallelism))

    def _group(self, parallelisms: Sequence[Parallelism], floors: Sequence[float]) -> None:
        """Bound parallelisms with every schedule, in groups.

        Args:
            floors: bounds on the cost of each with any schedule.
        """
        groups = dict[tuple[ScheduleChoice, int, int], list[int]]()
        groups_of = dict[tuple[int, int], list[list[int]]]()  # by pipeline ranks and microbatches
        for index, parallelism in enumerate(parallelisms):
            pp, microbatches = parallelism.layout.pp, self.task.microbatches(parallelism)
            if (pp, microbatches) not in groups_of:
                choices = [c for c in self.space.schedules(parallelism) if self.space.exists(c, pp)]
                keys = [(choice, pp, filling_microbatches(choice, pp, microbatches)) for choice in choices]
                groups_of[pp, microbatches] = [groups.setdefault(key, []) for key in keys]
            for group in groups_of[pp, microbatches]:
                group.append(index)
        savings = [self.space.first_saving()]
        for (choice, _, _), group in groups.items():
            members = [parallelisms[n] for n in group]
            seconds = self.bounds.schedules(members, choice, savings, [0] * len(group))
            costs = self._costs_of(members, seconds, [floors[n] for n in group])
            self._push_group(choice, members, costs)

    def _costs_of(
        self, parallelisms: Sequence[Parallelism], seconds: Sequence[float], floors: Sequence[float]
    ) -> list[float]:
        layouts = (parallelism.layout for parallelism in parallelisms)
        return list(map(max, floors, map(self._cost_bound, seconds, layouts)))

    def _push_group(
        self,
        choice: ScheduleChoice,
        parallelisms: Sequence[Parallelism],
        costs: Sequence[float],
        saved: bool = False,
    ) -> None:
        worst = self._worst_wanted()
        order = sorted((n for n, cost in enumerate(costs) if cost <= worst), key=costs.__getitem__)
        if order:
            bounds = [costs[n] for n in order]
            ordered = [parallelisms[n] for n in order]
            group = _Group(schedule=choice, parallelisms=ordered, bounds=bounds, saved=saved)
            self._push_bound(bounds[0], group)

    def _next_of(self, group: _Group) -> None:
        """Take the next parallelism of a group."""
        node = _Scheduled(group.parallelisms[group.position], group.schedule)
        self._push_bound(group.bounds[group.position], node)
        group.position += 1
        if group.position < len(group.bounds):
            self._push_bound(group.bounds[group.position], group)

    def _bound_with_saving(self, group: _Group) -> None:
        """Bound the first of a group again with the savings that they need at least; only now the program of
        their schedule is made.
        """
        choice, costs = group.schedule, group.bounds
        end = bisect_right(group.bounds, min(_GROUP_RANGE * group.bounds[0], self._worst_wanted()))
        if end < len(group.bounds):
            self._push_group(choice, group.parallelisms[end:], costs[end:])
        alike = dict[int, tuple[list[Saving], list[int]]]()  # those with the same savings
        sharings = list[DataParallelSettings]()
        for index, parallelism in enumerate(group.parallelisms[:end]):
            dp, _ = self.savings.least_memory(parallelism.layout, parallelism.expert_tp)
            sharings.append(dp)
            row = self.savings.rows(Candidate(parallelism, choice, dp, self.space.first_saving()))[-1]
            alike.setdefault(id(row), (row, []))[1].append(index)
        for row, indices in alike.values():
            parallelisms = [group.parallelisms[index] for index in indices]
            needed = self.savings.required_savings(parallelisms, choice, [sharings[n] for n in indices], row)
            for index, saving in zip(indices, needed, strict=True):
                if saving == len(row):
                    parallelism = group.parallelisms[index]
                    example = Candidate(parallelism, choice, sharings[index], row[-1])
                    count = len(self.space.sharings(parallelism.layout))
                    self.rejections.add(example, self.savings.fit(example), lower_bound=True, count=count)
            fits = [n for n, saving in enumerate(needed) if saving < len(row)]
            if not fits:
                continue
            fitting = [parallelisms[n] for n in fits]
            seconds = self.bounds.schedules(fitting, choice, row, [needed[n] for n in fits])
            bounds = self._costs_of(fitting, seconds, [costs[indices[n]] for n in fits])
            self._push_group(choice, fitting, bounds, saved=True)

    def _expand_shardings(self, parent_bound: float, node: _Scheduled) -> None:
        first_saving = self.space.first_saving()
        for dp in self.space.sharings(node.parallelism.layout):
            candidate = Candidate(node.parallelism, node.schedule, dp, first_saving)
            rows = self.savings.rows(candidate)
            candidates = self.savings.apply_savings(candidate, rows)
            if not candidates:
                smallest = replace(candidate, saving=rows[-1][-1])
                self.rejections.add(smallest, self.savings.fit(smallest), lower_bound=True)
            for candidate in candidates:
                self._add(candidate, parent_bound)

    def _add(self, candidate: Candidate, parent_bound: float) -> None:
        if candidate in self._added:
            return
        self._added.add(candidate)
        bound = self.bounds.candidate(candidate, candidate.job(self.task))
        if self._is_beaten(candidate, bound):
            return
        fit = self.evaluator.fits.get(candidate)
        if self._dives and fit is not None and fit.likely:
            self._replay(max(parent_bound, self._cost(bound, candidate)), candidate)
        else:
            self._push(bound, candidate.parallelism.layout, candidate, parent_bound)

    def _is_beaten(self, candidate: Candidate, seconds: float) -> bool:
        """True if a candidate that takes at least this long adds nothing to its family."""
        family = self.families.get(candidate.family(self.task))
        return family is not None and cannot_win(candidate, seconds, family, self.task.memory_headroom)

    def _replay(self, cost_bound: float, candidate: Candidate) -> None:
        """Replay a candidate, unless a tighter bound is known by now, or its memory does not fit."""
        layout = candidate.parallelism.layout
        bound = cost_bound / self._price(layout) / (1 + self.task.tolerance)
        if self._is_beaten(candidate, bound) or not self._is_legal(candidate):
            return
        if candidate not in self.evaluator.times:
            bound = self.evaluator.bound(candidate, candidate.job(self.task))
            grown = self._cost(bound, candidate) * (1 + self.task.tolerance) > cost_bound * (1 + 1e-9)
            if grown and not self._dives:
                self._push(bound, layout, candidate, cost_bound)
                return
        if self._is_postponed(candidate, cost_bound, candidate):
            return
        if self._is_tight(candidate):
            fits = self.evaluator.fit(candidate).likely
            examined, rejected = self._tight_candidates
            self._tight_candidates = examined + 1, rejected + (not fits)
            if not fits:
                self._reject(candidate, cost_bound)
                return
        replayed = len(self.evaluator.times)
        if self.progress and replayed % 20 == 0:
            self.progress(replayed, len(self.evaluator.fits), len(self.families))
        seconds = self.evaluator.seconds(candidate)
        if self._dives:
            self._accept_if_it_fits(candidate)
        else:
            self._push(seconds, layout, _Timed(candidate), cost_bound)

    def _is_postponed(self, candidate: Candidate, cost_bound: float, node: _Node) -> bool:
        """True if no time is left to examine a candidate; its node is examined when the pass continues."""
        if self.evaluator.expected_seconds(candidate) <= self.evaluator.work.remaining(self.until):
            return False
        self._postponed.append((cost_bound, node))
        self.cut_short = True
        return True

    def _accept_if_it_fits(self, candidate: Candidate) -> None:
        """Accept a candidate that nothing left can beat."""
        seconds = self.evaluator.times[candidate].seconds
        if self._is_beaten(candidate, seconds) or candidate in self._accepted:
            return
        fit = self.evaluator.fit(candidate)
        if not fit.likely:
            self._reject(candidate, self._cost(seconds, candidate))
            return
        self.accept([Feasible(candidate, seconds, fit)])
        if not is_safe(fit, self.task.memory_headroom):
            self._add_savings(candidate, self._cost(seconds, candidate), fits=True)

    def _reject(self, candidate: Candidate, cost: float) -> None:
        self.rejections.add(candidate, self.evaluator.fit(candidate))
        self._add_savings(candidate, cost)

    def _add_savings(self, candidate: Candidate, parent_bound: float, *, fits: bool = False) -> None:
        """Add options that save more than a candidate that may not fit: of each row the first that fits, and
        the first that fits safely. Memory decreases along a row.

        Args:
            fits: the candidate fits, so that only the first that fits safely is added.
        """
        rows = self.savings.rows(candidate)
        conditions: list[Callable[[Fit], bool]] = [lambda fit: is_safe(fit, self.task.memory_headroom)]
        if not fits:
            conditions.insert(0, attrgetter("likely"))
        for row in filter(None, (rows[0][1:], *rows[1:])):
            index = 0
            for condition in conditions:
                node = _Unsaved(candidate, fits)
                if self._is_postponed(replace(candidate, saving=row[0]), parent_bound, node):
                    return
                index = self._first_saving(candidate, row, index, condition)
                if index == len(row):
                    break
                self._add(replace(candidate, saving=row[index]), parent_bound)

    def _first_saving(
        self, candidate: Candidate, row: Sequence[Saving], start: int, condition: Callable[[Fit], bool]
    ) -> int:
        """Index of the first saving in a row, from `start` on, whose memory meets the condition;
        `len(row)` if none does.
        """

        def holds(index: int) -> bool:
            return condition(self.evaluator.fit(replace(candidate, saving=row[index])))

        start = max(start, self.savings.first_that_may_fit(candidate, row))
        last = len(row) - 1
        if start > last:
            return len(row)
        smallest = replace(candidate, saving=row[last])
        if not holds(last):
            self.rejections.add(smallest, self.evaluator.fit(smallest))
            return len(row)
        # bounds and memory mostly differ by as much as at the end of the row
        excess = self.evaluator.fit(smallest).allocated.mid - self.savings.bounds.of(smallest).total
        guess = min(last, max(start, self.savings.first_that_may_fit(candidate, row, excess)))
        return first_true(holds, start, guess, last)

    def _is_legal(self, candidate: Candidate) -> bool:
        """Check the rules, once for each parallelism, schedule and sharing of states; for a framework, which
        may lack some savings, for each saving too.
        """
        parts = candidate.parallelism, candidate.schedule, candidate.dp
        key = parts if self.task.refusals is None else candidate
        if key not in self._legal:
            self._legal[key] = not self.space.illegal(candidate.job(self.task), str(candidate))
        return self._legal[key]


def first_true(holds: Callable[[int], bool], start: int, guess: int, end: int) -> int:
    """The first index from `start` to `end` for which a monotone condition holds, given that it holds at
    `end`: steps of doubling length from a guess, then bisection between the last two.
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


class MemorySavingOptions:
    """The options of a task that save memory, in rows, and the bounds on memory that choose among them."""

    def __init__(self, task: SearchTask, space: Space, bounds: MemoryBounds) -> None:
        self.task = task
        self.space = space
        self.bounds = bounds
        self.budget = memory_budget(task.cluster.device, task.assumptions.reserve)
        self._least_memory = dict[object, tuple[DataParallelSettings, Saving]]()
        self._most_blocks = dict[int, int]()  # of a stage, by the number of stages

    def fit(self, candidate: Candidate) -> Fit:
        """Fit of the candidate's memory bound on the device."""
        return self.bounds.of(candidate).fit(self.task.cluster.device, self.task.assumptions.reserve)

    def least_memory(self, layout: Layout, expert_tp: int | None) -> tuple[DataParallelSettings, Saving]:
        """The sharing of states with the least memory on a rank, with every saving applied."""
        key = layout, expert_tp
        if key not in self._least_memory:
            sharings = self.space.sharings(layout)
            # least is sharded over all copies, in the highest mode
            sharings = [dp for dp in sharings if not any(dp.shards.values())] or sharings
            if self.task.refusals is None:  # a framework may offload only what is sharded less
                mode = max((dp.mode for dp in sharings), key=MODES.index)
                sharings = [dp for dp in sharings if dp.mode == mode]
            choices = [(dp, self.space.savings(self.space.first_saving(), 1, dp)[-1][-1]) for dp in sharings]
            self._least_memory[key] = (
                min(choices, key=lambda choice: self.bounds.states(layout, expert_tp, *choice))
                if len(choices) > 1
                else choices[0]
            )
        return self._least_memory[key]

    def states_cannot_fit(self, layout: Layout, expert_tp: int | None) -> Fit | None:
        """The bound on memory if the states of a layout alone do not fit; else None."""
        return self._excess_of(self.bounds.states(layout, expert_tp, *self.least_memory(layout, expert_tp)))

    def _excess_of(self, size: int) -> Fit | None:
        if size <= self.budget:
            return None
        return MemoryBound(size, 0).fit(self.task.cluster.device, self.task.assumptions.reserve)

    def required_savings(
        self,
        parallelisms: Sequence[Parallelism],
        choice: ScheduleChoice,
        dp: Sequence[DataParallelSettings],
        row: Sequence[Saving],
    ) -> list[int]:
        """For each parallelism the index of the first saving in a row with which its schedule may fit; the
        row's length if there is none. See `MemoryBounds.of_rows`.
        """
        return [self._first_within(sizes) for sizes in self.bounds.of_rows(parallelisms, choice, dp, row)]

    def _first_within(self, sizes: Sequence[int], excess: float = 0.0) -> int:
        """Index of the first size within the budget; their number if there is none."""
        return next((n for n, size in enumerate(sizes) if size + excess <= self.budget), len(sizes))

    def apply_savings(self, candidate: Candidate, rows: Sequence[Sequence[Saving]]) -> list[Candidate]:
        """The candidate with the first saving of each row that may fit. Rows after one whose first saving may
        fit are skipped.
        """
        feasible = list[Candidate]()
        for row in rows:
            index = self.first_that_may_fit(candidate, row)
            if index < len(row):
                feasible.append(replace(candidate, saving=row[index]))
            if index == 0:
                break
        return feasible

    def rows(self, candidate: Candidate) -> list[list[Saving]]:
        """Rows of savings from the candidate's own on."""
        depth = depth_of(candidate.schedule, candidate.parallelism.layout.pp)
        if depth not in self._most_blocks:
            stages = self.task.stages(depth)
            self._most_blocks[depth] = max(len(blocks_among(self.task.shape, stage)) for stage in stages)
        return self.space.savings(candidate.saving, self._most_blocks[depth], candidate.dp)

    def first_that_may_fit(self, candidate: Candidate, row: Sequence[Saving], excess: float = 0.0) -> int:
        """Index of the first saving in a row that may fit, by its bound; memory decreases along a row.

        Args:
            excess: bytes that memory is above its bound.
        """

        bounds = self.bounds.of_rows([candidate.parallelism], candidate.schedule, [candidate.dp], row)
        return self._first_within(bounds[0], excess)
