"""The ranking of a search: which candidates come first, in which order, and why, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from stretto.planner.assumptions import Assumptions
from stretto.planner.estimate import NOISE, PARTS, Estimate, estimate
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.fits import Fit, Verdict
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.task import Candidate, Objective, Task


@dataclass(frozen=True)
class Ranked:
    """One of the best layouts.

    Attributes:
        estimate: time and memory; of every pipeline rank.
        why: in words: of the first what it is good at, of the others what they lose by.
        words: the layout in words, as `Tried.layout`.
        tokens_per_dollar: None where the cluster has no price.
    """

    estimate: Estimate
    why: str
    words: str
    tokens_per_dollar: float | None = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One candidate whose time and memory were looked at.

    Attributes:
        layout: in words.
        seconds: of a step.
        memory: bytes of the fullest device, as its driver shows them; the middle of the interval.
        least: `memory` is a lower bound, which is too much already.
    """

    layout: str
    seconds: float
    memory: float
    verdict: Verdict
    least: bool = False


@dataclass(frozen=True)
class Rejected:
    """Candidates turned down for one reason: so many, and one of them in words."""

    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to "which layout, and will it fit?".

    Attributes:
        ranking: the best first; empty: nothing fits.
        tried: all that were replayed, in the order of the search; those that were not weighed with the least
            memory that they take.
        rejected: by reason: a field of the config whose rule was broken, "memory", "slower".
        candidates: legal combinations of all choices.
        feasible: of those that were weighed, how many fit.
        replayed: of the candidates, how many were replayed exactly; bounds spared the others.
        seconds: that the search took.
        gap: no layout that was not looked at can be better than the best by more than this part; infinite
            where nothing was found and not all was looked at.
        widened: nothing fitted before states and parameters were shared and put elsewhere in every way.
        nearest: where nothing fits, what comes nearest to it.
    """

    ranking: Sequence[Ranked]
    tried: Sequence[Tried]
    rejected: Mapping[str, Rejected]
    candidates: int
    feasible: int
    replayed: int
    seconds: float
    objective: Objective
    assumptions: Assumptions
    gap: float = 0.0
    widened: bool = False
    nearest: Ranked | None = None


ENOUGH_HEADROOM = 2  # tenths of the device's memory; who has more left is no better off


@dataclass(frozen=True)
class Feasible:
    """A candidate that fits, with its exact time and memory."""

    candidate: Candidate
    seconds: float
    fit: Fit

    @property
    def room(self) -> int:
        """Tenths of the device that are left, up to `ENOUGH_HEADROOM`; negative where it may not fit."""
        if self.fit.verdict != "fits":
            return -1
        if self.fit.capacity == float("inf"):
            return ENOUGH_HEADROOM
        return min(ENOUGH_HEADROOM, int(10 * self.fit.slack / self.fit.capacity))

    @property
    def preferred(self) -> tuple[int, tuple[int, ...], float]:
        """The least is the best of those that are equally fast: most room where it is short, then the simpler
        layout, with fewer axes, a usual schedule, less recomputation.
        """
        return -self.room, self.candidate.simplicity, self.seconds


def best_of_family(family: Sequence[Feasible]) -> Feasible:
    """Of variants of one layout: the best of those as fast as the fastest that fits surely, if any does."""
    fastest = min(family, key=lambda one: one.seconds)
    return min((one for one in family if one.seconds <= fastest.seconds * (1 + NOISE)), key=_preferred)


def cannot_win(candidate: Candidate, family: Sequence[Feasible]) -> bool:
    """Whether a candidate slower than all of its family will not stand for it: one of them is as simple and
    has all the room that counts.
    """
    return any(
        one.room == ENOUGH_HEADROOM and one.candidate.simplicity <= candidate.simplicity for one in family
    )


def sort_feasible(candidates: Sequence[Feasible], task: Task) -> list[Feasible]:
    """The ranking: by the objective, but those within the noise of the first by what is preferred."""

    def cost(one: Feasible) -> float:
        world = one.candidate.parallelism.layout.world if task.objective == "tokens_per_dollar" else 1
        return one.seconds * world

    by_cost = sorted(candidates, key=cost)
    if not by_cost:
        return []
    least = cost(by_cost[0])
    ties = [one for one in by_cost if cost(one) <= least * (1 + NOISE)]
    return sorted(ties, key=_preferred) + by_cost[len(ties) :]


def _preferred(one: Feasible) -> tuple[int, tuple[int, ...], float]:
    return one.preferred


@dataclass
class Refusals:
    """Candidates that do not fit.

    Attributes:
        count: of all of them.
        closest: bytes over, of what is nearest to fitting.
    """

    count: int = 0
    example: str = ""
    closest: tuple[float, Candidate] | None = None

    def add(self, candidate: Candidate, fit: Fit, *, least: bool = False, count: int = 1) -> None:
        """Turn a candidate down.

        Args:
            least: the memory is a lower bound.
            count: candidates for which this one stands.
        """
        self.count += count
        over = fit.device.mid - fit.capacity
        if not self.example:
            said = f"{candidate}: {'at least ' * least}{fit.device.mid / 2**30:.4g} GiB"
            self.example = f"{said} on {fit.capacity / 2**30:.4g} GiB"
        if self.closest is None or over < self.closest[0]:
            self.closest = (over, candidate)

    def reasons(
        self, rules: Mapping[str, tuple[int, str]], candidates: int, replayed: int
    ) -> dict[str, Rejected]:
        """Why candidates were turned down, and how many: by rules, for memory, and the rest by bounds."""
        rejected = {name: Rejected(*entry) for name, entry in rules.items()}
        if self.count:
            rejected["memory"] = Rejected(self.count, self.example)
        rest = candidates - replayed - self.count
        if rest > 0:
            rejected["slower"] = Rejected(rest, "by their bounds, without a replay")
        return rejected


def gap(best: float, left: float) -> float:
    """By what part something that was not looked at could be better than the best; infinite where nothing was
    found, and something was not looked at.
    """
    if left >= best:
        return 0.0
    return inf if best == inf else best / left - 1


_SAID = {
    "compute": "computing",
    "messages": "messages between stages",
    "data": "data-parallel communication",
    "optimiser": "the optimiser",
    "bubble": "bubble",
}
_SMALL = 0.003  # of the step: what is less is not worth a word


def ranked(candidates: Sequence[Feasible], task: Task, sized: Callable[[int], Cluster]) -> list[Ranked]:
    """The ranking with its reasons.

    Args:
        sized: the cluster with so many devices.
    """
    ranking = list[Ranked]()
    for candidate in candidates:
        result = _estimate(candidate.candidate, candidate.fit, task, sized)
        first = ranking[0].estimate if ranking else None
        why = _loses(result, first) if first else _wins(result)
        ranking.append(_ranked(candidate.candidate, result, why, task))
    return ranking


def nearest(
    closest: tuple[float, Candidate] | None, task: Task, sized: Callable[[int], Cluster]
) -> Ranked | None:
    """What comes nearest to fitting."""
    if closest is None:
        return None
    candidate = closest[1]
    job = candidate.job(task)
    fit = short_step_fit(job, sized(candidate.parallelism.layout.world).device, task.assumptions)
    made = _estimate(candidate, fit, task, sized)
    return _ranked(candidate, made, f"lacks {-fit.slack / 2**30:.4g} GiB of {_gib(fit)}", task)


def _estimate(candidate: Candidate, fit: Fit, task: Task, sized: Callable[[int], Cluster]) -> Estimate:
    cluster = sized(candidate.parallelism.layout.world)
    return replace(estimate(candidate.job(task), cluster, task.assumptions, memory=False), memory=fit)


def _ranked(candidate: Candidate, made: Estimate, why: str, task: Task) -> Ranked:
    price, world = task.price, candidate.parallelism.layout.world
    return Ranked(
        made, why, str(candidate), None if price is None else made.tokens_per_s * 3600 / (price * world)
    )


def _wins(made: Estimate) -> str:
    """What the first is good at, and what still costs it most."""
    shares = {name: made.parts.get(name, 0.0) / made.seconds for name in PARTS}
    said = [f"computes for {100 * shares['compute']:.0f}% of the step"]
    costly = sorted((name for name in PARTS if name != "compute"), key=lambda name: -shares[name])[:2]
    most = [f"{_SAID.get(name, name)} {100 * shares[name]:.1f}%" for name in costly if shares[name] > _SMALL]
    if most:
        said.append("then " + ", ".join(most))
    if made.memory is not None:
        said.append(_room(made.memory))
    return "; ".join(said)


def _loses(made: Estimate, first: Estimate) -> str:
    """The parts by which a step is longer, or what decides between equals."""
    if made.job.layout.world != first.job.layout.world:
        return f"{made.job.layout.world} devices; {_parts(made, first)}"
    near = abs(made.seconds / first.seconds - 1) <= NOISE
    said = _parts(made, first)
    if near:
        said = f"as fast within the noise ({said})" if said else "as fast"
        if made.memory is not None and first.memory is not None:
            less = first.memory.slack - made.memory.slack
            said += f", {abs(less) / 2**30:.3g} GiB {'less' if less > 0 else 'more'} room"
    if made.memory is not None and made.memory.verdict == "tight":
        said += "; tight"
    return said


def _parts(made: Estimate, first: Estimate) -> str:
    changes = {name: made.parts.get(name, 0.0) - first.parts.get(name, 0.0) for name in PARTS}
    large = [name for name in PARTS if abs(changes[name]) > _SMALL * first.seconds]
    large.sort(key=lambda name: -changes[name])
    return ", ".join(f"{_seconds(changes[name])} {_SAID.get(name, name)}" for name in large)


def _seconds(change: float) -> str:
    return f"{change:+.3g} s" if abs(change) >= 0.1 else f"{1e3 * change:+.3g} ms"


def _room(fit: Fit) -> str:
    if fit.capacity == float("inf"):
        return f"{fit.allocated.mid / 2**30:.3g} GiB a rank"
    return f"{fit.slack / 2**30:.3g} of {_gib(fit)} left" + ("; tight" if fit.verdict == "tight" else "")


def _gib(fit: Fit) -> str:
    return f"{fit.capacity / 2**30:.4g} GiB"
