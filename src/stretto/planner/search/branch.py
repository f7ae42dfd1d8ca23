"""The best layouts of a model on a cluster: branch and bound over all legal candidates.

Choices are made in four steps: how layers are split and how large a microbatch is, the schedule, how states
are sharded, and what is recomputed or offloaded where memory does not suffice. Each partial choice has a
lower bound on its time (`planner.search.time_bounds`) and on its memory (`planner.search.memory_bounds`).
What cannot fit is dropped at once, and what fits only with recomputation is bounded with that. The smallest
bound is examined first. When a candidate's bound comes up, it is replayed and comes back with its exact time;
when that comes up, nothing left can be faster, and its exact memory is computed. So candidates are accepted
in the order of their times, the best of all is never missed, and the search ends when as many layouts fit as
are wanted.

What saves memory at the cost of time (recomputation, offload) is a ladder (`planner.search.savings`): a rung
is tried only where the one before it does not surely fit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from time import perf_counter, process_time

from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.planner.estimate import NOISE, precision_of
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.ranking import (
    Feasible,
    Plan,
    Refusals,
    Tried,
    best_of_family,
    cannot_win,
    gap,
    nearest_to_fitting,
    ranked,
    sort_feasible,
)
from stretto.planner.search.savings import SavingLadder
from stretto.planner.search.space import Space, depth_of
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, Task
from stretto.planner.search.time_bounds import TimeBounds
from stretto.planner.time.step import step_time
from stretto.program import entry as entry_of
from stretto.program.program import Program
from stretto.spec.flops import Recompute as Mode
from stretto.spec.job import Job
from stretto.spec.program import stages_of
from stretto.spec.reduction import reduction
from stretto.spec.rules import problems

# Deadlines as multiples of the time limit: for proving the best, for filling the ranking with the candidates
# known by then, and, as long as nothing fits, for finding any layout.
_PROVING = 0.55
_FILLING = 1.0
_SEEKING = 2.0
_CERTAIN = 0.93  # share of the memory budget; bounds below it seldom turn out not to fit

Progress = Callable[[int, int, int], None]  # candidates replayed, memories computed, layouts that fit


@dataclass(frozen=True)
class _Timed:
    """A candidate and its exact time."""

    candidate: Candidate
    job: Job
    seconds: float


@dataclass(frozen=True)
class _Scheduled:
    """A parallelism with a schedule; `saved`: its bound includes the saving that it needs at least."""

    parallelism: Parallelism
    schedule: ScheduleChoice
    saved: bool = False


_Node = Parallelism | _Scheduled | Candidate | _Timed


def search(task: Task, progress: Progress | None = None) -> Plan:
    """The best layouts of the task, the best first.

    Where nothing fits, a second search shards and offloads states and parameters in every way (`Task.wide`),
    and the plan says so.

    Args:
        progress: called now and then.

    Raises:
        StrettoError: the task itself is illegal, or no layout is legal with the fixed choices.
    """
    _check(task)
    plan = _search(task, progress)
    if plan.ranking or task.wide:
        return plan
    wider = _search(replace(task, wide=True), progress)
    return replace(
        wider, seconds=plan.seconds + wider.seconds, replayed=plan.replayed + wider.replayed, widened=True
    )


def _search(task: Task, progress: Progress | None) -> Plan:
    started = perf_counter()
    run = _Search(task=task, progress=progress)
    run.go()
    chosen = sort_feasible([best_of_family(family) for family in run.families.values()], task)
    ranking = ranked(chosen, task, run.bounds.cluster)
    return Plan(
        ranking=ranking,
        tried=tuple(run.tried()),
        rejected=run.refusals.reasons(run.space.rejected, run.candidates, run.replays.count),
        candidates=run.candidates,
        feasible=run.feasible,
        replayed=run.replays.count,
        seconds=perf_counter() - started,
        objective=task.objective,
        assumptions=task.assumptions,
        gap=gap(run.best(), run.left),
        nearest=None if ranking else nearest_to_fitting(run.refusals.closest, task, run.bounds.cluster),
    )


@dataclass(kw_only=True)
class _Search:
    """One search: the heap of partial choices, and the candidates that fit, by family."""

    task: Task
    progress: Progress | None = None
    families: dict[tuple[object, ...], list[Feasible]] = field(
        default_factory=dict[tuple[object, ...], list[Feasible]]
    )
    refusals: Refusals = field(default_factory=Refusals)
    candidates: int = 0
    feasible: int = 0
    left: float = inf  # lower bound on the cost of every candidate that was not examined

    def __post_init__(self) -> None:
        self.space, self.bounds = Space(self.task), TimeBounds(self.task)
        self.savings, self.replays = SavingLadder(self.task, self.space), Replays(self.task, self.bounds)
        self._heap: list[tuple[float, int, _Node]] = []
        self._number = count()
        self._legal: dict[tuple[Parallelism, ScheduleChoice], bool] = {}
        self._seen: set[Candidate] = set()
        self._ends: dict[Candidate, bool] = {}
        self._fits: dict[Candidate, Tried] = {}

    def go(self) -> None:
        """Search until as many families fit as are wanted, or nothing is left."""
        started = process_time()
        out_of_time = False
        limit = self.task.seconds
        for parallelism in self.space.parallelisms():
            self._add_parallelism(parallelism)
        if not self.candidates:
            raise _nothing_legal(self.task, self.space)
        while self._heap and len(self.families) < self.task.top:
            spent = 0.0 if limit is None else (process_time() - started) / limit
            if not out_of_time and spent > _PROVING:
                out_of_time = True
                self._drop_open()
            if spent > (_FILLING if self.families else _SEEKING):
                break
            self._step(*heapq.heappop(self._heap))
        self.left = min([self.left, *(self._bound(entry) for entry in self._heap)])

    def best(self) -> float:
        """The least cost (time, or device time) of what fits."""
        feasible = [one for family in self.families.values() for one in family]
        return min((self._cost(one.seconds, one.candidate) for one in feasible), default=inf)

    def tried(self) -> list[Tried]:
        """All that was replayed, with its exact memory or, where that was not computed, its lower bound."""
        tried = list[Tried]()
        for candidate, seconds in self.replays.done.items():
            known = self._fits.get(candidate)
            if known is None:
                fit = self.savings.fit(candidate)
                known = Tried(
                    layout=str(candidate),
                    seconds=seconds,
                    memory=fit.device.mid,
                    verdict=fit.verdict,
                    least=True,
                )
            tried.append(known)
        return tried

    def _step(self, key: float, number: int, node: _Node) -> None:
        if isinstance(node, Parallelism):
            self._schedules(key, node)
        elif isinstance(node, _Scheduled):
            if node.saved:
                self._shardings(key, node.parallelism, node.schedule)
            else:
                self._with_saving(key, node)
        elif isinstance(node, Candidate):
            self._replay(key, node)
        else:
            self._compute_memory(node)

    def _drop_open(self) -> None:
        """Time is over: keep whole candidates and schedules that are cheap to make, and search on among
        these, exact times first; if there are none, keep all.
        """
        self.left = min(self._bound(entry) for entry in self._heap)
        whole = [
            entry
            for entry in self._heap
            if isinstance(entry[2], _Timed | Candidate)
            or (isinstance(entry[2], _Scheduled) and entry_of(entry[2].schedule.name).early)
        ]
        if not whole:
            return
        self._heap = [(key * self._delay(node), number, node) for key, number, node in whole]
        heapq.heapify(self._heap)

    def _delay(self, node: _Node) -> float:
        """A factor on the key that puts first what has an exact time, and what fits more surely."""
        if isinstance(node, Parallelism | _Scheduled):
            return 1.0 + 3 * NOISE
        candidate = node if isinstance(node, Candidate) else node.candidate
        doubtful = self.savings.bounds.of(candidate).total > _CERTAIN * self.savings.budget
        expensive = not entry_of(candidate.schedule.name).early
        return 1.0 + NOISE * (8 * doubtful + (2 + 2 * expensive) * isinstance(node, Candidate))

    def _bound(self, entry: tuple[float, int, _Node]) -> float:
        """A lower bound on the cost of everything that comes from an entry of the heap."""
        key, _, node = entry
        return key if isinstance(node, _Timed) else key / (1 + self.task.tolerance)

    def _cost(self, seconds: float, candidate: Candidate) -> float:
        """What is minimised: seconds of the step, or seconds times devices."""
        per_device = self.task.objective == "tokens_per_dollar"
        return seconds * (candidate.parallelism.layout.world if per_device else 1)

    def _push(self, seconds: float, world: int, node: _Node, least: float = 0.0) -> None:
        """Put a node on the heap: a partial choice by its bound plus the tolerance, a timed one by its exact
        time.
        """
        cost = seconds * world if self.task.objective == "tokens_per_dollar" else seconds
        if not isinstance(node, _Timed):
            cost *= 1 + self.task.tolerance
            cost = max(cost, least)
        heapq.heappush(self._heap, (cost, next(self._number), node))

    # ------------------------------------------------------------------ the steps

    def _add_parallelism(self, parallelism: Parallelism) -> None:
        each = len(self.space.sharings(parallelism.layout)) * len(self.space.schedules(parallelism))
        self.candidates += each
        if not each:
            return
        fit = self.savings.cannot_fit(parallelism)
        if fit is None:
            self._push(self.bounds.parallelism(parallelism), parallelism.layout.world, parallelism)
        else:
            dp, saving = self.savings.least_memory(parallelism)
            example = Candidate(parallelism, self.space.schedules(parallelism)[0], dp, saving)
            self.refusals.add(example, fit, least=True, count=each)

    def _schedules(self, key: float, parallelism: Parallelism) -> None:
        for choice in self.space.schedules(parallelism):
            bound = self.bounds.schedule(parallelism, choice, self.space.first_saving())
            self._push(bound, parallelism.layout.world, _Scheduled(parallelism, choice), key)

    def _with_saving(self, key: float, node: _Scheduled) -> None:
        """Bound a schedule once more with the saving that it needs at least; only now its program is made."""
        parallelism, choice = node.parallelism, node.schedule
        saving, may_fit = self.savings.required_saving(parallelism, choice)
        if may_fit:
            bound = self.bounds.schedule(parallelism, choice, saving)
            self._push(bound, parallelism.layout.world, replace(node, saved=True), key)
        else:
            last = Candidate(parallelism, choice, self.savings.least_memory(parallelism)[0], saving)
            each = len(self.space.sharings(parallelism.layout))
            self.refusals.add(last, self.savings.fit(last), least=True, count=each)

    def _shardings(self, key: float, parallelism: Parallelism, choice: ScheduleChoice) -> None:
        first = self.space.first_saving()
        for dp in self.space.sharings(parallelism.layout):
            candidate = Candidate(parallelism, choice, dp, first)
            rows = self.savings.rows(parallelism, choice, dp, first)
            made = self.savings.climb(candidate, rows)
            if not made:
                last = replace(candidate, saving=rows[-1][-1])
                self.refusals.add(last, self.savings.fit(last), least=True)
            for one in made:
                self._add(one, key)

    def _add(self, candidate: Candidate, least: float) -> None:
        if candidate in self._seen or self._beaten(candidate):
            return
        self._seen.add(candidate)
        bound = self.bounds.candidate(candidate, candidate.job(self.task))
        self._push(bound, candidate.parallelism.layout.world, candidate, least)

    def _beaten(self, candidate: Candidate) -> bool:
        family = self.families.get(candidate.family)
        return family is not None and cannot_win(candidate, family)

    def _replay(self, key: float, candidate: Candidate) -> None:
        """Replay a candidate, unless a tighter bound is known by now."""
        if self._beaten(candidate) or not self._is_legal(candidate):
            return
        job, world = candidate.job(self.task), candidate.parallelism.layout.world
        bound = self.replays.bound(candidate, job)
        if self._cost(bound, candidate) * (1 + self.task.tolerance) > key * (1 + 1e-9):
            self._push(bound, world, candidate, key)
            return
        if self.progress and self.replays.count % 20 == 0:
            self.progress(self.replays.count, len(self._fits), len(self.families))
        seconds = self.replays.replay(candidate, job)
        self._push(seconds, world, _Timed(candidate, job, seconds), key)

    def _compute_memory(self, timed: _Timed) -> None:
        """Nothing left is faster than this candidate: if it fits, it is one of the best."""
        candidate = timed.candidate
        if self._beaten(candidate):
            return
        device = self.task.cluster.device
        fit = short_step_fit(timed.job, device, self.task.assumptions)
        if not self.families and fit.likely:
            # the best layout is checked on all of its ranks
            fit = short_step_fit(timed.job, device, self.task.assumptions, every=True)
        self._fits[candidate] = Tried(
            layout=str(candidate), seconds=timed.seconds, memory=fit.device.mid, verdict=fit.verdict
        )
        if not fit.likely:
            self.refusals.add(candidate, fit)
        else:
            self.feasible += 1
            self.families.setdefault(candidate.family, []).append(Feasible(candidate, timed.seconds, fit))
        if fit.verdict != "fits":
            self._add_savings(candidate, self._cost(timed.seconds, candidate))

    def _add_savings(self, candidate: Candidate, least: float) -> None:
        """Add what saves more than a candidate that does not surely fit."""
        parallelism = candidate.parallelism
        choice = candidate.schedule
        dp = candidate.dp
        ladder = self.savings.rows(parallelism, choice, dp, candidate.saving)
        for row in (ladder[0][1:], *ladder[1:]):
            # memory decreases along a row: if its last saving does not fit, none does
            if row and (len(row) < 3 or self._last_saving_fits(replace(candidate, saving=row[-1]))):
                for one in self.savings.climb(candidate, [row]):
                    self._add(one, least)

    def _last_saving_fits(self, candidate: Candidate) -> bool:
        if candidate not in self._ends:
            fit = short_step_fit(candidate.job(self.task), self.task.cluster.device, self.task.assumptions)
            self._ends[candidate] = fit.likely
            if not self._ends[candidate]:
                self.refusals.add(candidate, fit, least=True)
        return self._ends[candidate]

    def _is_legal(self, candidate: Candidate) -> bool:
        """By the rules, which are asked once for each parallelism and schedule."""
        key = candidate.parallelism, candidate.schedule
        if key not in self._legal:
            self._legal[key] = not self.space.illegal(candidate.job(self.task), str(candidate))
        return self._legal[key]


# ------------------------------------------------------------------ exact times


class Replays:
    """The replays of one search, and the bounds that follow from them."""

    def __init__(self, task: Task, bounds: TimeBounds) -> None:
        self.task, self.bounds = task, bounds
        self.done = dict[Candidate, float]()
        self._makespans = dict[tuple[Parallelism, ScheduleChoice, Saving], float]()

    @property
    def count(self) -> int:
        """Candidates replayed."""
        return len(self.done)

    def bound(self, candidate: Candidate, job: Job) -> float:
        """The best lower bound on a candidate's seconds before its replay: the bound with its program, and
        the makespan of a candidate that differs only in how states are sharded.
        """
        bound = self.bounds.candidate(candidate, job, *_program(job))
        return max(
            bound, self._makespans.get((candidate.parallelism, candidate.schedule, candidate.saving), 0.0)
        )

    def replay(self, candidate: Candidate, job: Job) -> float:
        """Seconds of a step."""
        assumptions = self.task.assumptions
        cluster = self.bounds.cluster(candidate.parallelism.layout.world)
        modes = memory_of(job).modes if job.recompute.mode == "auto" else self._modes(candidate)
        time = step_time(job, cluster, assumptions, precision_of(job), modes)
        # other ways of sharding states can make actions longer, never shorter
        if job.dp.mode in ("ddp", "zero1"):
            key = candidate.parallelism, candidate.schedule, candidate.saving
            self._makespans[key] = time.timeline.makespan * cluster.correction
        self.done[candidate] = time.seconds * cluster.correction
        return self.done[candidate]

    def _modes(self, candidate: Candidate) -> list[Mode] | None:
        """How each block is recomputed, where only some of a stage are."""
        most, shape = candidate.saving.recompute.blocks, self.task.shape
        if most is None:
            return None
        modes: list[Mode] = ["none"] * shape.layers
        depth = depth_of(candidate.schedule, candidate.parallelism.layout.pp)
        for stage in stages_of(shape, self.task.sequence, depth):
            for layer in [layer for layer in stage if 1 <= layer <= shape.layers][:most]:
                modes[layer - 1] = "full"
        return modes


def _program(job: Job) -> tuple[bool, Program | None]:
    """Whether gradients are reduced with each microbatch, and the program where the bound uses it."""
    if job.dp.mode not in ("zero2", "zero3"):
        return False, None
    program = job.program()
    return reduction(program, job.dp.mode, job.dp.reduce) == "microbatch", program


# ------------------------------------------------------------------ errors


def _check(task: Task) -> None:
    """Raise what no layout can mend."""
    job = replace(task.job, layout=Layout(), global_batch=1, micro_batch=1)
    wrong = problems(job)
    if wrong:
        raise wrong[0]
    if task.objective == "tokens_per_dollar" and task.price is None:
        raise StrettoError(
            f"objective tokens_per_dollar: cluster {task.cluster.name!r} has no price",
            hint="give it one in its YAML file: price, dollars an hour of one device",
        )


def _nothing_legal(task: Task, space: Space) -> StrettoError:
    """The error where no layout is legal: the first rule that was broken, or no product of sizes."""
    for name, (_, example) in space.rejected.items():
        return StrettoError(f"no layout is legal: {example}", hint=f"look at {name}, and at --fix")
    return StrettoError(
        f"no layout of {task.devices} devices is left by what is fixed: "
        + ", ".join(f"{name}={_in_words(values)}" for name, values in task.fixed.items()),
        hint="tp x cp x dp x pp must be the number of devices",
    )


def _in_words(values: object) -> str:
    return ",".join(map(str, values)) if isinstance(values, tuple) else str(values)
