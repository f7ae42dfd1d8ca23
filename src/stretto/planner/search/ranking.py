"""The ranking of a search: what it consists of, the order of candidates, and the reasons in words.

Candidates whose times are tied (`TIE`) are ordered by memory left and by complexity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from stretto.planner.assumptions import Assumptions
from stretto.planner.estimate import NOISE, PARTS, Estimate, estimate
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.fits import Fit, Verdict
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.task import RANKED, Candidate, Objective, Task


@dataclass(frozen=True)
class Ranked:
    """One of the best layouts.

    Attributes:
        estimate: time, and memory of every pipeline rank.
        why: in words: the strength of the first, and what the others lose by.
        words: the layout in words, as `Tried.layout`.
        tokens_per_dollar: None where the cluster has no price.
    """

    estimate: Estimate
    why: str
    words: str
    tokens_per_dollar: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One candidate whose time and memory were computed.

    Attributes:
        layout: in words.
        seconds: of a step.
        memory: bytes of the fullest device as its driver reports them, the middle of the interval.
        least: `memory` is a lower bound, which already exceeds the device.
    """

    layout: str
    seconds: float
    memory: float
    verdict: Verdict
    least: bool = False


@dataclass(frozen=True)
class Rejected:
    """Candidates rejected for one reason: their number, and one of them in words."""

    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to "which layout, and will it fit?".

    Attributes:
        ranking: the best first; empty: nothing fits, or nothing was found in time (`complete`).
        safe: the fastest whose whole interval of memory fits, with the room that is wanted; None: none was
            found.
        plain: the fastest of each kind of layout that people use without a search, by its name; None: no such
            layout is legal or fits.
        tried: all that were replayed, in the order of the search; those whose exact memory was not needed
            have a lower bound of it.
        rejected: by reason: a field of the config whose rule was broken, "memory", or "slower".
        candidates: legal combinations of all choices.
        feasible: candidates whose memory was computed and that fit.
        replayed: candidates that were replayed; the others were excluded by bounds.
        seconds: duration of the search.
        gap: no layout that was not examined can be better than the best by more than this fraction; infinite
            where nothing fits so far and something was not examined.
        complete: the search came to its end: up to the tolerance nothing is faster, or nothing fits; else it
            was cut short by its time limit.
        widened: nothing conventional fitted until states and parameters were sharded and offloaded in every
            way.
        nearest: where nothing fits, the candidate nearest to it.
    """

    ranking: Sequence[Ranked]
    safe: Ranked | None = None
    plain: Mapping[str, Ranked | None] = field(default_factory=dict[str, "Ranked | None"])
    tried: Sequence[Tried]
    rejected: Mapping[str, Rejected]
    candidates: int
    feasible: int
    replayed: int
    seconds: float
    objective: Objective
    assumptions: Assumptions
    gap: float = 0.0
    complete: bool = True
    widened: bool = False
    nearest: Ranked | None = None


TIE = 0.01  # about half the noise between measurements: up to that a simpler or safer layout comes first
ENOUGH_HEADROOM = 2  # tenths of the device's memory; more than that is no advantage


@dataclass(frozen=True)
class Feasible:
    """A candidate that fits, with its exact time and memory."""

    candidate: Candidate
    seconds: float
    fit: Fit

    @property
    def headroom(self) -> int:
        """Tenths of the device's memory that are left, at most `ENOUGH_HEADROOM`; -1 where it may not fit."""
        if self.fit.verdict != "fits":
            return -1
        if self.fit.capacity == float("inf"):
            return ENOUGH_HEADROOM
        return min(ENOUGH_HEADROOM, int(10 * self.fit.slack / self.fit.capacity))

    @property
    def preferred(self) -> tuple[int, tuple[int, ...], float]:
        """A sort key among equally fast candidates: most headroom where that is short, then the simpler
        layout (fewer axes, a common schedule, less recomputation).
        """
        return -self.headroom, self.candidate.complexity, self.seconds


def is_safe(fit: Fit, room: float) -> bool:
    """Whether the whole interval of the memory fits, and leaves `room` bytes."""
    return fit.verdict == "fits" and fit.capacity - fit.device.high >= room


def best_of_family(family: Sequence[Feasible]) -> Feasible:
    """Of variants of one layout, the preferred one among those as fast as the fastest."""
    fastest = min(family, key=lambda one: one.seconds)
    return min(
        (one for one in family if one.seconds <= fastest.seconds * (1 + TIE)), key=attrgetter("preferred")
    )


def cannot_win(candidate: Candidate, seconds: float, family: Sequence[Feasible], room: float) -> bool:
    """Whether a candidate that takes at least so long can neither represent its family nor be the fastest
    safe one of it, since another is as fast, as simple, safe, and has enough headroom.
    """
    return any(
        one.seconds <= seconds
        and one.headroom == ENOUGH_HEADROOM
        and is_safe(one.fit, room)
        and one.candidate.complexity <= candidate.complexity
        for one in family
    )


def sort_feasible(candidates: Sequence[Feasible], task: Task) -> list[Feasible]:
    """Sorted by the objective; of the first `RANKED`, those tied with the first are sorted by
    preference.
    """

    def cost(one: Feasible) -> float:
        world = one.candidate.parallelism.layout.world if task.objective == "tokens_per_dollar" else 1
        return one.seconds * world

    by_cost = sorted(candidates, key=cost)
    if not by_cost:
        return []
    least = cost(by_cost[0])
    ties = [one for one in by_cost[:RANKED] if cost(one) <= least * (1 + TIE)]
    return sorted(ties, key=attrgetter("preferred")) + by_cost[len(ties) :]


@dataclass
class Refusals:
    """Candidates that do not fit.

    Attributes:
        count: their number.
        closest: of the one nearest to fitting, the bytes that it lacks.
    """

    count: int = 0
    example: str = ""
    closest: tuple[float, Candidate] | None = None

    def add(self, candidate: Candidate, fit: Fit, *, least: bool = False, count: int = 1) -> None:
        """Record a candidate that does not fit.

        Args:
            least: the memory is a lower bound.
            count: candidates for which this one stands.
        """
        self.count += count
        over = fit.device.mid - fit.capacity
        if not self.example:
            words = f"{candidate}: {'at least ' * least}{fit.device.mid / 2**30:.4g} GiB"
            self.example = f"{words} on {fit.capacity / 2**30:.4g} GiB"
        if self.closest is None or over < self.closest[0]:
            self.closest = (over, candidate)

    def reasons(
        self, rules: Mapping[str, tuple[int, str]], candidates: int, replayed: int
    ) -> dict[str, Rejected]:
        """Why candidates were rejected, and how many: by rules, for memory, and the rest by bounds."""
        rejected = {name: Rejected(*entry) for name, entry in rules.items()}
        if self.count:
            rejected["memory"] = Rejected(self.count, self.example)
        rest = candidates - replayed - self.count
        if rest > 0:
            rejected["slower"] = Rejected(rest, "by their bounds, without a replay")
        return rejected


def gap(best: float, left: float) -> float:
    """The fraction by which something unexamined could be better than the best; infinite where nothing fits
    so far and something was not examined.
    """
    if left >= best:
        return 0.0
    return inf if best == inf or not left else best / left - 1


_PART_NAMES = {
    "compute": "computing",
    "data": "data-parallel communication",
    "optimiser": "the optimiser",
    "bubble": "bubble",
}
_LITTLE = 0.05 * 2**30  # bytes of memory that are not mentioned
_SMALL = 0.003  # share of the step below which a part is not mentioned


def ranked(
    candidates: Sequence[Feasible],
    task: Task,
    times: Mapping[Candidate, Estimate],
) -> list[Ranked]:
    """The ranking with its reasons.

    Args:
        times: of the candidates.
    """
    ranking = list[Ranked]()
    for feasible in candidates:
        first = ranking[0].estimate if ranking else None
        ranking.append(compared(feasible, first, task, times))
    return ranking


def compared(
    feasible: Feasible,
    first: Estimate | None,
    task: Task,
    times: Mapping[Candidate, Estimate],
) -> Ranked:
    """A candidate with the reason for its distance to the first; None: it is the first itself."""
    candidate = feasible.candidate
    result = replace(times[candidate], memory=feasible.fit)
    return _ranked(candidate, result, _loses(result, first) if first else _wins(result), task)


def nearest_to_fitting(
    closest: tuple[float, Candidate] | None, task: Task, sized: Callable[[int], Cluster]
) -> Ranked | None:
    """The candidate nearest to fitting."""
    if closest is None:
        return None
    candidate = closest[1]
    job, cluster = candidate.job(task), sized(candidate.parallelism.layout.world)
    fit = short_step_fit(job, cluster.device, task.assumptions)
    result = replace(estimate(job, cluster, task.assumptions, memory=False), memory=fit)
    return _ranked(candidate, result, f"lacks {-fit.slack / 2**30:.4g} GiB of {_gib(fit)}", task)


def _ranked(candidate: Candidate, result: Estimate, why: str, task: Task) -> Ranked:
    price, world = task.price, candidate.parallelism.layout.world
    return Ranked(
        result, why, str(candidate), None if price is None else result.tokens_per_s * 3600 / (price * world)
    )


def _wins(result: Estimate) -> str:
    """The share of computation in the first, and what costs it most beside that."""
    shares = {name: result.parts.get(name, 0.0) / result.seconds for name in PARTS}
    words = [f"computes for {100 * shares['compute']:.0f}% of the step"]
    costly = sorted((name for name in PARTS if name != "compute"), key=lambda name: -shares[name])[:2]
    most = [
        f"{_PART_NAMES.get(name, name)} {100 * shares[name]:.1f}%" for name in costly if shares[name] > _SMALL
    ]
    if most:
        words.append("then " + ", ".join(most))
    if result.memory is not None:
        words.append(_room(result.memory))
    return "; ".join(words)


def _loses(result: Estimate, first: Estimate) -> str:
    """The parts by which a step is longer, or what decides among equally fast ones."""
    if result.job.layout.world != first.job.layout.world:
        return f"{result.job.layout.world} devices; {_parts(result, first)}"
    near = abs(result.seconds / first.seconds - 1) <= NOISE
    words = _parts(result, first)
    if near:
        words = f"as fast within the noise ({words})" if words else "as fast"
        if result.memory is not None and first.memory is not None:
            less = first.memory.slack - result.memory.slack
            if abs(less) > _LITTLE:
                words += f", {abs(less) / 2**30:.3g} GiB {'less' if less > 0 else 'more'} room"
    if result.memory is not None and result.memory.verdict == "tight":
        words += "; tight"
    return words


def _parts(result: Estimate, first: Estimate) -> str:
    changes = {name: result.parts.get(name, 0.0) - first.parts.get(name, 0.0) for name in PARTS}
    large = [name for name in PARTS if abs(changes[name]) > _SMALL * first.seconds]
    large.sort(key=lambda name: -changes[name])
    return ", ".join(f"{_seconds(changes[name])} {_PART_NAMES.get(name, name)}" for name in large)


def _seconds(change: float) -> str:
    return f"{change:+.3g} s" if abs(change) >= 0.1 else f"{1e3 * change:+.3g} ms"


def _room(fit: Fit) -> str:
    if fit.capacity == float("inf"):
        return f"{fit.allocated.mid / 2**30:.3g} GiB a rank"
    tight = "; tight" if fit.verdict == "tight" else ""
    if fit.slack <= _LITTLE:  # the allocator reserves what there is, as far as tensors leave it free
        return f"fills the {_gib(fit)}{tight}"
    return f"{fit.slack / 2**30:.3g} of {_gib(fit)} left{tight}"


def _gib(fit: Fit) -> str:
    return f"{fit.capacity / 2**30:.4g} GiB"
