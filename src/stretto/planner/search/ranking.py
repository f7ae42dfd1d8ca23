"""The ranking of a search: what it consists of, the order of candidates, and the reasons in words.

Candidates that may not fit, and odd ones (`oddity`), are ranked as if they were a little slower. Those whose
times are tied then (`TIE`) are ordered by memory left and by complexity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import attrgetter

from stretto.display import render
from stretto.job.chain import block_count
from stretto.layout.layout import Layout
from stretto.planner.assumptions import Assumptions
from stretto.planner.estimate import NOISE, PARTS, Estimate, estimate
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.fits import Fit, Verdict
from stretto.planner.memory.short_step import short_step_fit
from stretto.planner.search.task import RANKED, Candidate, Objective, SearchTask


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """One of the best layouts.

    Attributes:
        estimate: time, and memory of every pipeline rank.
        reason: the strength of the first, and what the others lose by, in words.
        layout: the layout in words, as `Evaluated.layout`.
        tokens_per_dollar: tokens per dollar, or None if the cluster has no price.
        variants: what differs in layouts with the same axes and sharding that are as fast, the fastest first.
    """

    estimate: Estimate
    reason: str
    layout: str
    tokens_per_dollar: float | None = None
    variants: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One candidate whose time and memory were computed.

    Attributes:
        layout: the layout in words.
        seconds: time of a step.
        memory: bytes of the fullest device as its driver reports them, the middle of the interval.
        lower_bound: `memory` is a lower bound, which already exceeds the device.
    """

    layout: str
    seconds: float
    memory: float
    verdict: Verdict
    lower_bound: bool = False


@dataclass(frozen=True)
class Rejected:
    """Candidates rejected for one reason: their number, and one of them in words."""

    count: int
    example: str


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A kind of layout that people use without a search.

    Attributes:
        fastest: the fastest that fits, or None if no such layout is legal or fits.
        safe: the fastest found whose whole interval of memory fits, with the wanted headroom, or None.
        missing: why there is no fastest, in words.
    """

    fastest: Ranked | None = None
    safe: Ranked | None = None
    missing: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to "which layout, and will it fit?".

    Attributes:
        ranking: the best layouts, the best first; empty if nothing fits, or nothing was found within the
            limit (`complete`).
        safe: the best layout found whose whole interval of memory fits, with the wanted headroom, or None.
        baselines: each kind of layout that people use without a search, by name.
        evaluated: all candidates that were replayed, in the order of the search; those whose exact memory was
            not needed have a lower bound of it.
        rejected: rejected candidates by reason: a field of the config whose rule was broken, "memory",
            "slower"; and "slower layouts": layouts whose candidates are all slower, and were not counted.
        candidates: number of legal combinations of all choices, in the layouts that may be among the best.
        feasible: number of candidates whose memory was computed and that fit.
        replayed: number of candidates that were replayed; the others were excluded by bounds.
        seconds: duration of the search, by the clock.
        gap: no layout that was not examined can be better than the best by more than this fraction, odd ones
            as if they were slower (`ODD`); infinite if nothing fits so far and something was not examined.
        complete: the search finished: up to the tolerance nothing is faster, or nothing fits; else its limit
            cut it short.
        widened: states and parameters were sharded and offloaded in every way, since nothing conventional
            fits without offload, or a plain layout with offload is faster.
        nearest: the candidate nearest to fitting, if nothing fits.
    """

    ranking: Sequence[Ranked]
    safe: Ranked | None = None
    baselines: Mapping[str, Baseline] = field(default_factory=dict[str, Baseline])
    evaluated: Sequence[Evaluated]
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

    def __repr__(self) -> str:
        """Return the best layout, and the number of candidates."""
        best = self.ranking[0] if self.ranking else self.nearest
        outcome = "best" if self.ranking else f"{'nothing fits' if self.complete else 'cut short'}, nearest"
        first = "none" if best is None else f"{best.layout!r}, {best.estimate!r}"
        return f"Plan({outcome} {first}; {len(self.ranking)} ranked of {self.candidates:,} candidates)"

    def _repr_html_(self) -> str | None:
        return render("plan_html", self)


TIE = 0.01  # about half the noise between measurements: up to that a simpler or safer layout comes first
TIGHT = 0.03  # a layout that may not fit must be faster than one that surely does by this fraction
# An odd layout must be faster than a plain one by this fraction. Picking the layout that is predicted fastest
# costs 2.5% of the best measured time, so a smaller advantage is no reason for one.
ODD = 0.03
ENOUGH_HEADROOM = 2  # tenths of the device's memory; more than that is no advantage
_CONTEXT_TOKENS = 4096  # of a rank; published runs with context parallelism have as many or more
_MANY_EXPERTS = 128  # without expert parallelism every rank gathers all of their weights


def oddity(layout: Layout, task: SearchTask) -> str:
    """What a cautious engineer would call odd about a layout, in words; empty for a plain one."""
    node, moe = min(task.cluster.node, task.devices), task.shape.moe
    odd = [f"tp{layout.tp} in nodes of {node}"] if node % layout.tp else []
    for name, size in (("cp", layout.cp), ("ep", layout.ep)):
        if node % size and not (size % node == 0 and _has_small_factors(size // node)):
            odd.append(f"{name}{size} in nodes of {node}")
    if layout.cp > 1 and task.sequence < _CONTEXT_TOKENS * layout.cp:
        odd.append(f"cp{layout.cp} of {task.sequence:,} tokens")
    if moe is not None and moe.experts >= _MANY_EXPERTS and layout.ep == 1 and layout.world > 1:
        odd.append(f"{moe.experts} experts without ep")
    if not _has_small_factors(layout.pp) and block_count(task.shape) % layout.pp:
        odd.append(f"pp{layout.pp}")
    return ", ".join(odd)


def _has_small_factors(n: int) -> bool:
    """True if a number has no prime factors but 2 and 3."""
    return 6 ** n.bit_length() % n == 0


def cost_factor(layout: Layout, task: SearchTask) -> float:
    """What a second of a layout counts in the ranking: its devices if the objective is tokens per dollar, and
    more if it is odd.
    """
    devices = layout.world if task.objective == "tokens_per_dollar" else 1
    return devices * (1 + ODD) if oddity(layout, task) else devices


@dataclass(frozen=True)
class Feasible:
    """A candidate that fits, with its exact time and memory."""

    candidate: Candidate
    seconds: float
    fit: Fit

    @property
    def headroom(self) -> int:
        """Tenths of the device's memory that are left, at most `ENOUGH_HEADROOM`; -1 if it may not fit."""
        if self.fit.verdict != "fits":
            return -1
        if self.fit.capacity == inf:
            return ENOUGH_HEADROOM
        return min(ENOUGH_HEADROOM, int(10 * self.fit.slack / self.fit.capacity))

    @property
    def penalty(self) -> float:
        """The factor by which this is ranked as if it were slower, since it may not fit."""
        return 1.0 if self.fit.verdict == "fits" else 1.0 + TIGHT

    @property
    def preferred(self) -> tuple[int, tuple[int, ...], float]:
        """A sort key among equally fast candidates: most headroom if that is short, then the simpler layout
        (fewer axes, a common schedule, less recomputation).
        """
        return -self.headroom, self.candidate.complexity, self.seconds


def is_safe(fit: Fit, headroom: float) -> bool:
    """True if the whole interval of the memory fits, and leaves `headroom` bytes."""
    return fit.verdict == "fits" and fit.capacity - fit.device.high >= headroom


def best_of_family(family: Sequence[Feasible]) -> Feasible:
    """The preferred variant of a layout among those as fast as the fastest."""
    fastest = min(variant.seconds * variant.penalty for variant in family)
    ties = [v for v in family if v.seconds * v.penalty <= fastest * (1 + TIE)]
    return min(ties, key=attrgetter("preferred"))


def cannot_win(candidate: Candidate, seconds: float, family: Sequence[Feasible], headroom: float) -> bool:
    """True if a candidate that takes at least this long can neither represent its family nor be its fastest
    safe variant: a safe one is faster by more than a tie, or as fast, as simple and has enough headroom.
    """
    return any(
        is_safe(variant.fit, headroom)
        and (
            variant.seconds * (1 + TIE) < seconds
            or (
                variant.seconds <= seconds
                and variant.headroom == ENOUGH_HEADROOM
                and variant.candidate.complexity <= candidate.complexity
            )
        )
        for variant in family
    )


def sort_feasible(candidates: Sequence[Feasible], task: SearchTask) -> list[Feasible]:
    """Sort by the objective, those that may not fit (`TIGHT`) and odd ones (`ODD`) as if they were slower. A
    layout that surely fits, odd or not, comes before those that may not and are little faster. Of the first
    `RANKED`, sort those tied with the first by preference.
    """

    def slower(feasible: Feasible) -> float:
        return feasible.seconds * feasible.penalty * cost_factor(feasible.candidate.parallelism.layout, task)

    def odd(feasible: Feasible) -> bool:
        return bool(oddity(feasible.candidate.parallelism.layout, task))

    tight = [slower(feasible) for feasible in candidates if feasible.headroom < 0 and not odd(feasible)]

    def cost(feasible: Feasible) -> float:
        displaces = odd(feasible) and feasible.headroom >= 0
        return min([slower(feasible), *(t for t in tight if displaces and slower(feasible) <= (1 + ODD) * t)])

    def preference(feasible: Feasible) -> tuple[object, ...]:
        return feasible.headroom < 0, odd(feasible), *feasible.preferred

    by_cost = sorted(candidates, key=lambda feasible: (cost(feasible), feasible.headroom < 0))
    if not by_cost:
        return []
    ties = [f for f in by_cost[:RANKED] if cost(f) <= cost(by_cost[0]) * (1 + TIE)]
    return sorted(ties, key=preference) + by_cost[len(ties) :]


@dataclass
class RejectionCounts:
    """Candidates that do not fit.

    Attributes:
        count: number of candidates.
        example: the first of them, in words.
        closest: fit and candidate, of the one nearest to fitting.
    """

    count: int = 0
    example: str = ""
    closest: tuple[Fit, Candidate] | None = None

    def add(self, candidate: Candidate, fit: Fit, *, lower_bound: bool = False, count: int = 1) -> None:
        """Record a candidate that does not fit.

        Args:
            lower_bound: the memory is a lower bound.
            count: number of candidates that this one represents.
        """
        self.count += count
        if not self.example:
            self.example = f"{candidate}: needs {'at least ' * lower_bound}{fit.needed}"
        if self.closest is None or fit.missing < self.closest[0].missing:
            self.closest = (fit, candidate)

    def reasons(
        self, rules: Mapping[str, tuple[int, str]], candidates: int, replayed: int, layouts: int
    ) -> dict[str, Rejected]:
        """Count the rejected candidates by reason: by rule, for memory, and those that are slower by their
        bounds, without a replay; and the layouts that are slower with any microbatch and schedule.
        """
        rejected = {name: Rejected(*entry) for name, entry in rules.items()}
        if self.count:
            rejected["memory"] = Rejected(self.count, self.example)
        slower = candidates - replayed - self.count
        if slower > 0:
            rejected["slower"] = Rejected(slower, "")
        if layouts:
            rejected["slower layouts"] = Rejected(
                layouts, "with any microbatch and schedule, by their bounds"
            )
        return rejected


def gap(best: float, left: float) -> float:
    """The fraction by which something unexamined could be better than the best; infinite if nothing fits so
    far and something was not examined.
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
_SMALLEST_BYTES = 0.05 * 2**30  # bytes of memory that are not mentioned
_SMALLEST_SHARE = 0.003  # share of the step below which a part is not mentioned


def rank_candidates(
    candidates: Sequence[Feasible], task: SearchTask, times: Mapping[Candidate, Estimate]
) -> list[Ranked]:
    """The ranking with its reasons; `times` has the estimates of the candidates, without memory."""
    ranking = list[Ranked]()
    for feasible in candidates:
        best = ranking[0].estimate if ranking else None
        ranking.append(rank_candidate(feasible, best, task, times))
    return ranking


def rank_candidate(
    feasible: Feasible, best: Estimate | None, task: SearchTask, times: Mapping[Candidate, Estimate]
) -> Ranked:
    """A candidate with the reason for its distance to `best`, which is None for the best itself."""
    result = replace(times[feasible.candidate], memory=feasible.fit)
    return _ranked(feasible.candidate, result, _losses(result, best) if best else _strengths(result), task)


def variants_of(feasible: Feasible, family: Sequence[Feasible]) -> tuple[str, ...]:
    """What differs in the variants of a layout that are as fast as it and no less likely to fit, the fastest
    first.
    """
    limit = feasible.seconds * feasible.penalty * (1 + TIE)
    equal = [v for v in family if v.candidate != feasible.candidate and v.seconds * v.penalty <= limit]
    common = str(feasible.candidate).split(", ")
    texts = dict[str, None]()
    for variant in sorted(equal, key=attrgetter("seconds")):
        texts[", ".join(part for part in str(variant.candidate).split(", ") if part not in common)] = None
    return tuple(filter(None, texts))


def nearest_to_fitting(
    closest: tuple[Fit, Candidate] | None, task: SearchTask, sized_cluster: Callable[[int], Cluster]
) -> Ranked | None:
    """The candidate nearest to fitting, from `RejectionCounts.closest`."""
    if closest is None:
        return None
    candidate = closest[1]
    job, cluster = candidate.job(task), sized_cluster(candidate.parallelism.layout.world)
    fit = short_step_fit(job, cluster, task.assumptions)
    result = replace(estimate(job, cluster, task.assumptions, memory=False), memory=fit)
    return _ranked(candidate, result, f"needs {fit.needed}", task)


def _ranked(candidate: Candidate, result: Estimate, reason: str, task: SearchTask) -> Ranked:
    dollars, world = task.price, candidate.parallelism.layout.world
    if (fit := result.memory) is not None and fit.host and fit.likely:
        reason += f"; {fit.host_text}"
    tokens_per_dollar = None if dollars is None else result.tokens_per_s * 3600 / (dollars * world)
    if odd := oddity(candidate.parallelism.layout, task):
        reason += f"; odd: {odd}"
    return Ranked(estimate=result, reason=reason, layout=str(candidate), tokens_per_dollar=tokens_per_dollar)


def _strengths(result: Estimate) -> str:
    """The share of computation in the best, and what else costs it most."""
    shares = {name: result.parts.get(name, 0.0) / result.seconds for name in PARTS}
    reasons = [f"computes for {100 * shares['compute']:.0f}% of the step"]
    costly = sorted((name for name in PARTS if name != "compute"), key=lambda name: -shares[name])[:2]
    costs = [
        f"{_PART_NAMES.get(name, name)} {100 * shares[name]:.1f}%"
        for name in costly
        if shares[name] > _SMALLEST_SHARE
    ]
    if costs:
        reasons.append("then " + ", ".join(costs))
    if (fit := result.memory) is not None:
        tight = "; tight" if fit.verdict == "tight" else ""
        if fit.capacity == inf:
            reasons.append(f"{fit.allocated.mid / 2**30:.3g} GiB a rank")
        elif fit.slack <= _SMALLEST_BYTES:  # the allocator reserves all that tensors leave free
            reasons.append(f"fills the {_gib(fit)}{tight}")
        else:
            reasons.append(f"{fit.slack / 2**30:.3g} of {_gib(fit)} left{tight}")
    return "; ".join(reasons)


def _losses(result: Estimate, best: Estimate) -> str:
    """The parts by which a step is longer, or what decides among equally fast ones."""
    changes = {name: result.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in PARTS}
    large = [name for name in PARTS if abs(changes[name]) > _SMALLEST_SHARE * best.seconds]
    large.sort(key=lambda name: -changes[name])
    reason = ", ".join(
        (f"{changes[name]:+.3g} s" if abs(changes[name]) >= 0.1 else f"{1e3 * changes[name]:+.3g} ms")
        + f" {_PART_NAMES.get(name, name)}"
        for name in large
    )
    if result.job.layout.world != best.job.layout.world:
        reason = f"{result.job.layout.world} devices; {reason}"
    elif abs(result.seconds / best.seconds - 1) <= NOISE:
        reason = f"as fast within the noise ({reason})" if reason else "as fast"
        if result.memory is not None and best.memory is not None:
            lost = best.memory.slack - result.memory.slack
            if abs(lost) > _SMALLEST_BYTES:
                reason += f", {abs(lost) / 2**30:.3g} GiB {'less' if lost > 0 else 'more'} room"
    if result.memory is not None and result.memory.verdict == "tight":
        reason += "; tight"
    return reason


def _gib(fit: Fit) -> str:
    return f"{fit.capacity / 2**30:.4g} GiB"
