"""The best layouts of a model on a cluster: branch and bound over all legal candidates.

Choices are made in four steps: where layers are and how large a microbatch is, in which order microbatches
go, who keeps states, and what is computed again or put elsewhere where memory does not suffice. Each partial
choice has a lower bound (`plan.bounds`); the least is looked at first. A candidate is replayed exactly when
its bound comes up, and comes back with its exact time; when that comes up, nothing that is left can be
faster, and it is weighed. So candidates are accepted in the order of their times, the best of all is never
left out, and the search is over when as many layouts are found as are wanted.

What saves memory and takes time (recomputation, offload) is a ladder: a rung is looked at only where the one
before it does not surely fit.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from time import perf_counter, process_time

from stretto.cost.flops import Recompute as Mode
from stretto.errors import StrettoError
from stretto.plan.asking import check
from stretto.plan.bounds import Bounds
from stretto.plan.estimate import precision_of
from stretto.plan.fits import Fit
from stretto.plan.holding import memory_of
from stretto.plan.job import Job
from stretto.plan.ordering import Found, best_of_family, cannot_win, in_order
from stretto.plan.ranking import NOISE, Plan, Rejected, Tried
from stretto.plan.reduction import reduction
from stretto.plan.space import Space, depth_of
from stretto.plan.task import Candidate, Order, Place, Saving, Task
from stretto.plan.timing import stages_of, step_time
from stretto.plan.weighing import LeastMemory, budget, weigh
from stretto.plan.why import nearest, ranked
from stretto.schedule.program import Program

_PATIENCE = 1.25, 2.0  # times the time that was given, with some layouts found and with none

Progress = Callable[[int, int, int], None]  # replayed, weighed, layouts found


@dataclass(frozen=True)
class _Ladder:
    """A candidate with all that saves more, of which nothing is known yet."""

    candidate: Candidate


@dataclass(frozen=True)
class _Timed:
    """A candidate and its exact time."""

    candidate: Candidate
    job: Job
    seconds: float


_Node = Place | tuple[Place, Order] | _Ladder | Candidate | _Timed


def search(task: Task, progress: Progress | None = None) -> Plan:
    """The best layouts of the task, the best first.

    Args:
        progress: called now and then.

    Raises:
        StrettoError: the task itself is illegal, or no layout is legal with what is fixed.
    """
    check(task)
    plan = _search(task, progress)
    if plan.ranking or task.wide:
        return plan
    wider = _search(replace(task, wide=True), progress)
    return replace(wider, seconds=plan.seconds + wider.seconds, replayed=plan.replayed + wider.replayed)


def _search(task: Task, progress: Progress | None) -> Plan:
    started = perf_counter()
    run = _Search(task, progress)
    run.go()
    chosen = in_order([best_of_family(family) for family in run.families.values()], task)
    ranking = ranked(chosen, task, run.bounds.cluster)
    return Plan(
        ranking=ranking,
        tried=tuple(run.tried),
        rejected=run.reasons(),
        candidates=run.candidates,
        feasible=run.feasible,
        replayed=run.replayed,
        seconds=perf_counter() - started,
        objective=task.objective,
        running=task.running,
        gap=run.gap(),
        nearest=None if ranking else nearest(run.closest, task, run.bounds.cluster),
    )


@dataclass
class _Search:
    """One search: the heap of partial choices, and what was found."""

    task: Task
    progress: Progress | None = None
    families: dict[tuple[object, ...], list[Found]] = field(
        default_factory=dict[tuple[object, ...], list[Found]]
    )
    tried: list[Tried] = field(default_factory=list[Tried])
    candidates: int = 0
    feasible: int = 0
    replayed: int = 0
    unfit: tuple[int, str] = (0, "")
    left: float = inf  # what no candidate that was not looked at can be below
    closest: tuple[float, Candidate] | None = None  # bytes over, of what does not fit

    def __post_init__(self) -> None:
        self.space, self.bounds = Space(self.task), Bounds(self.task)
        self.memory = LeastMemory(self.task)
        self._heap: list[tuple[float, int, _Node]] = []
        self._number = count()
        self._makespans: dict[tuple[Place, Order, Saving], float] = {}
        self._legal: dict[tuple[Place, Order], bool] = {}
        self._seen: set[Candidate] = set()
        self._ends: dict[Candidate, bool] = {}

    def go(self) -> None:
        """Until as many families are found as are wanted, or nothing is left."""
        for place in self.space.places():
            sharings = len(self.space.sharings(place.layout))
            self.candidates += sharings * len(self.space.orders(place))
            self._push(self.bounds.place(place), place.layout.world, place)
        if not self.candidates:
            raise self._nothing()
        started, hurry = process_time(), False
        while self._heap and len(self.families) < self.task.top:
            if not hurry and self.task.seconds is not None and process_time() - started > self.task.seconds:
                hurry = True
                self._cut()
            if hurry and self._late(process_time() - started):
                break
            self._step(*heapq.heappop(self._heap))
        self.left = min([self.left, *(self._bound(entry) for entry in self._heap)])

    def _step(self, key: float, number: int, node: _Node) -> None:
        if isinstance(node, Place):
            self._orders(node)
        elif isinstance(node, tuple):
            self._sharings(key, *node)
        elif isinstance(node, _Ladder):
            self._begin(key, node)
        elif isinstance(node, Candidate):
            self._time(key, node)
        else:
            self._weigh(node)

    def _late(self, taken: float) -> bool:
        """Whether to be content: with few layouts a little after the time, with none long after it."""
        assert self.task.seconds is not None
        return taken > self.task.seconds * (_PATIENCE[0] if self.families else _PATIENCE[1])

    def _cut(self) -> None:
        """Time is over: go on with whole candidates alone, those first whose times are exact."""
        self.left = min(self._bound(entry) for entry in self._heap)
        whole = [entry for entry in self._heap if isinstance(entry[2], _Timed | Candidate | _Ladder)]
        later = 1.0 + 2 * NOISE
        self._heap = [
            (key if isinstance(node, _Timed) else key * later, number, node) for key, number, node in whole
        ]
        heapq.heapify(self._heap)

    def _bound(self, entry: tuple[float, int, _Node]) -> float:
        """What nothing that comes from an entry of the heap can be below."""
        key, _, node = entry
        return key if isinstance(node, _Timed) else key / (1 + self.task.tolerance)

    def _push(self, seconds: float, world: int, node: _Node, least: float = 0.0) -> None:
        """Put a partial choice on the heap, by its bound and a little more, or one with its exact time."""
        cost = seconds * world if self.task.objective == "tokens_per_dollar" else seconds
        if not isinstance(node, _Timed):
            cost *= 1 + self.task.tolerance
            cost = max(cost, least)
        heapq.heappush(self._heap, (cost, next(self._number), node))

    # ------------------------------------------------------------------ the steps

    def _orders(self, place: Place) -> None:
        for order in self.space.orders(place):
            bound = self.bounds.order(place, order, self.space.first_saving())
            self._push(bound, place.layout.world, (place, order))

    def _sharings(self, key: float, place: Place, order: Order) -> None:
        first = self.space.first_saving()
        for dp in self.space.sharings(place.layout):
            candidate = Candidate(place, order, dp, first)
            bound = self.bounds.candidate(candidate, candidate.job(self.task))
            self._push(bound, place.layout.world, _Ladder(candidate), key)

    def _begin(self, key: float, ladder: _Ladder) -> None:
        candidate = ladder.candidate
        family = self.families.get(candidate.family)
        if not (family and cannot_win(candidate, family)):
            blocks = self._most_blocks(candidate.place, candidate.order)
            self._climb(candidate, self.space.ladder(candidate.saving, blocks, candidate.dp), key)

    def _climb(self, candidate: Candidate, ladder: Sequence[Sequence[Saving]], least: float) -> None:
        """Put on the heap, of each row of savings, the first that may fit.

        Args:
            ladder: rows of savings, in each of which less and less is held. Of a later row nothing is looked
                at if the first saving of the first may fit.
        """
        last = replace(candidate, saving=ladder[-1][-1])
        if self._too_much(last):
            self._refuse(last, self._least(last), 0.0, least=True)
            return
        for row in ladder:
            if self._too_much(replace(candidate, saving=row[-1])):
                continue
            at = bisect_left(
                row, True, key=lambda saving: not self._too_much(replace(candidate, saving=saving))
            )
            self._add(replace(candidate, saving=row[at]), least)
            if at == 0:
                return

    def _too_much(self, candidate: Candidate) -> bool:
        device = self.bounds.cluster(candidate.place.layout.world).device
        return self.memory.of(candidate).total > budget(device, self.task.running.reserve)

    def _least(self, candidate: Candidate) -> Fit:
        """By the bound on memory."""
        device = self.bounds.cluster(candidate.place.layout.world).device
        return self.memory.of(candidate).fit(device, self.task.running.reserve)

    def _add(self, candidate: Candidate, least: float) -> None:
        if candidate in self._seen:
            return
        self._seen.add(candidate)
        bound = self.bounds.candidate(candidate, candidate.job(self.task))
        self._push(bound, candidate.place.layout.world, candidate, least)

    def _time(self, key: float, candidate: Candidate) -> None:
        """Replay a candidate, unless a better bound is known by now."""
        family = self.families.get(candidate.family)
        if (family and cannot_win(candidate, family)) or not self._is_legal(candidate):
            return
        job = candidate.job(self.task)
        world = candidate.place.layout.world
        bound = self.bounds.candidate(candidate, job, *self._program(job))
        known = self._makespans.get((candidate.place, candidate.order, candidate.saving))
        if known is not None:
            bound = max(bound, known)
        cost = bound * world if self.task.objective == "tokens_per_dollar" else bound
        if cost * (1 + self.task.tolerance) > key * (1 + 1e-9):
            self._push(bound, world, candidate, key)
            return
        seconds = self._replay(candidate, job)
        self._push(seconds, world, _Timed(candidate, job, seconds), key)

    def _program(self, job: Job) -> tuple[bool, Program | None]:
        """Whether gradients are reduced with each microbatch, and the program where a bound looks at it."""
        if job.dp.mode not in ("zero2", "zero3"):
            return False, None
        program = job.program()
        return reduction(program, job.dp.mode, job.dp.reduce) == "microbatch", program

    def _replay(self, candidate: Candidate, job: Job) -> float:
        self.replayed += 1
        if self.progress and self.replayed % 20 == 1:
            self.progress(self.replayed, len(self.tried), len(self.families))
        running = self.task.running
        cluster = self.bounds.cluster(candidate.place.layout.world)
        modes = memory_of(job, running).modes if job.recompute.mode == "auto" else self._modes(candidate)
        time = step_time(job, cluster, running, precision_of(job), modes)
        key = candidate.place, candidate.order, candidate.saving
        # another way of keeping states can make actions longer, and never shorter
        if job.dp.mode in ("ddp", "zero1"):
            self._makespans[key] = time.timeline.makespan * cluster.correction
        return time.seconds * cluster.correction

    def _modes(self, candidate: Candidate) -> list[Mode] | None:
        """How each block is recomputed, where only some of a stage are."""
        most, shape = candidate.saving.recompute.blocks, self.task.shape
        if most is None:
            return None
        modes: list[Mode] = ["none"] * shape.layers
        for stage in stages_of(
            shape, self.task.sequence, depth_of(candidate.order, candidate.place.layout.pp)
        ):
            for layer in [layer for layer in stage if 1 <= layer <= shape.layers][:most]:
                modes[layer - 1] = "full"
        return modes

    def _weigh(self, timed: _Timed) -> None:
        """Nothing that is left is faster than this candidate: it is one of the best if it fits."""
        candidate = timed.candidate
        family = self.families.get(candidate.family)
        if family and cannot_win(candidate, family):
            return
        device = self.bounds.cluster(candidate.place.layout.world).device
        fit = weigh(timed.job, device, self.task.running)
        if fit.verdict == "does not fit":
            self._refuse(candidate, fit, timed.seconds)
        else:
            self.tried.append(Tried(str(candidate), timed.seconds, fit.device.mid, fit.verdict))
            self.feasible += 1
            self.families.setdefault(candidate.family, []).append(Found(candidate, timed.seconds, fit))
        if fit.verdict != "fits":
            world = candidate.place.layout.world
            cost = timed.seconds * (world if self.task.objective == "tokens_per_dollar" else 1)
            self._save_more(candidate, cost)

    def _save_more(self, candidate: Candidate, least: float) -> None:
        """What saves more than a candidate that does not fit surely."""
        place, order, dp = candidate.place, candidate.order, candidate.dp
        ladder = self.space.ladder(candidate.saving, self._most_blocks(place, order), dp)
        for row in (ladder[0][1:], *ladder[1:]):
            # a row holds less and less: where its end does not fit, nothing of it does
            if row and (len(row) < 3 or self._end_fits(replace(candidate, saving=row[-1]))):
                self._climb(candidate, [row], least)

    def _end_fits(self, candidate: Candidate) -> bool:
        if candidate not in self._ends:
            device = self.bounds.cluster(candidate.place.layout.world).device
            fit = weigh(candidate.job(self.task), device, self.task.running)
            self._ends[candidate] = fit.verdict != "does not fit"
            if not self._ends[candidate]:
                self._refuse(candidate, fit, 0.0, least=True)
        return self._ends[candidate]

    def _most_blocks(self, place: Place, order: Order) -> int:
        shape = self.task.shape
        stages = stages_of(shape, self.task.sequence, depth_of(order, place.layout.pp))
        return max(sum(1 <= layer <= shape.layers for layer in stage) for stage in stages)

    # ------------------------------------------------------------------ what is turned down

    def _is_legal(self, candidate: Candidate) -> bool:
        """By the rules; those on schedules and states are asked once for each."""
        key = candidate.place, candidate.order
        if key not in self._legal:
            plain = candidate.job(self.task)
            self._legal[key] = not self.space.illegal(plain, str(candidate))
        return self._legal[key]

    def _refuse(self, candidate: Candidate, fit: Fit, seconds: float, *, least: bool = False) -> None:
        over = fit.device.low - fit.capacity
        said = f"{candidate}: {'at least ' * least}{fit.device.low / 2**30:.4g} GiB"
        self.unfit = (self.unfit[0] + 1, self.unfit[1] or f"{said} on {fit.capacity / 2**30:.4g} GiB")
        if self.closest is None or over < self.closest[0]:
            self.closest = (over, candidate)
        if not least:
            self.tried.append(Tried(str(candidate), seconds, fit.device.mid, fit.verdict))

    def gap(self) -> float:
        """By what part something that was not looked at could be better than the best."""
        found = [one for family in self.families.values() for one in family]
        worlds = self.task.objective == "tokens_per_dollar"
        best = min(
            (f.seconds * (f.candidate.place.layout.world if worlds else 1) for f in found), default=inf
        )
        return 0.0 if not found or self.left >= best else best / self.left - 1

    def reasons(self) -> dict[str, Rejected]:
        """Why candidates were turned down, and how many."""
        found = {name: Rejected(*entry) for name, entry in self.space.rejected.items()}
        if self.unfit[0]:
            found["memory"] = Rejected(*self.unfit)
        rest = self.candidates - self.replayed - self.unfit[0]
        if rest > 0:
            found["slower"] = Rejected(rest, "by their bounds, without a replay")
        return found

    def _nothing(self) -> StrettoError:
        """No layout at all is legal: the first rule that was broken, or the numbers do not make a product."""
        for name, (_, example) in self.space.rejected.items():
            return StrettoError(f"no layout is legal: {example}", hint=f"look at {name}, and at --fix")
        return StrettoError(
            f"no layout of {self.task.devices} devices is left by what is fixed: "
            + ", ".join(f"{name}={_said(values)}" for name, values in self.task.fixed.items()),
            hint="tp x cp x dp x pp must be the number of devices",
        )


def _said(values: object) -> str:
    return ",".join(map(str, values)) if isinstance(values, tuple) else str(values)
