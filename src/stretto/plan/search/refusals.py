"""What a search turns down for its memory, why, and what came nearest to fitting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from stretto.plan.fits import Fit
from stretto.plan.search.ranking import Rejected
from stretto.plan.search.task import Candidate


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
