"""Why a layout is where it is in a ranking, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from stretto.planner.estimate import PARTS, Estimate, estimate
from stretto.planner.machines.cluster import Cluster
from stretto.planner.memory.fits import Fit
from stretto.planner.search.exact_memory import weigh
from stretto.planner.search.ordering import Found
from stretto.planner.search.ranking import NOISE, Ranked, Rejected
from stretto.planner.search.task import Candidate, Task


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
        found = {name: Rejected(*entry) for name, entry in rules.items()}
        if self.count:
            found["memory"] = Rejected(self.count, self.example)
        rest = candidates - replayed - self.count
        if rest > 0:
            found["slower"] = Rejected(rest, "by their bounds, without a replay")
        return found


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


def ranked(found: Sequence[Found], task: Task, sized: Callable[[int], Cluster]) -> list[Ranked]:
    """The ranking with its reasons.

    Args:
        sized: the cluster with so many devices.
    """
    ranking = list[Ranked]()
    for one in found:
        made = _estimate(one.candidate, one.fit, task, sized)
        first = ranking[0].estimate if ranking else None
        why = _loses(made, first) if first else _wins(made)
        ranking.append(_ranked(one.candidate, made, why, task))
    return ranking


def nearest(
    closest: tuple[float, Candidate] | None, task: Task, sized: Callable[[int], Cluster]
) -> Ranked | None:
    """What comes nearest to fitting."""
    if closest is None:
        return None
    candidate = closest[1]
    job = candidate.job(task)
    fit = weigh(job, sized(candidate.place.layout.world).device, task.assumptions)
    made = _estimate(candidate, fit, task, sized)
    return _ranked(candidate, made, f"lacks {-fit.slack / 2**30:.4g} GiB of {_gib(fit)}", task)


def _estimate(candidate: Candidate, fit: Fit, task: Task, sized: Callable[[int], Cluster]) -> Estimate:
    from dataclasses import replace

    cluster = sized(candidate.place.layout.world)
    return replace(estimate(candidate.job(task), cluster, task.assumptions, memory=False), memory=fit)


def _ranked(candidate: Candidate, made: Estimate, why: str, task: Task) -> Ranked:
    own = task.cluster.price
    price = task.cluster.device.price if own is None else own
    world = candidate.place.layout.world
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
