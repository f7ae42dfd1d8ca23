"""The results of a comparison side by side: ranked, against a baseline, with the losses that should agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.run.compare.result import LOSS_TOLERANCE, Mathematics, Result, agreement


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All results of one comparison.

    Attributes:
        title: the config and what was done with it.
        results: of every combination, in the order of the command line.
        baseline: the name of the combination that others are compared with.
        kinds: `mathematics` of each combination, by fingerprint.
    """

    title: str
    results: Sequence[Result]
    baseline: str
    kinds: Mapping[str, Mathematics]

    @property
    def ranked(self) -> list[Result]:
        """The combinations with a step time, fastest first."""
        timed = [one for one in self.results if one.seconds is not None]
        return sorted(timed, key=lambda one: one.seconds or 0.0)

    @property
    def others(self) -> list[Result]:
        """Those without: refused, failed or stopped."""
        return [one for one in self.results if one.seconds is None]

    @property
    def base(self) -> Result | None:
        """The baseline; the first combination with a step time where the baseline has none."""
        timed = [one for one in self.results if one.seconds is not None]
        return next((one for one in timed if one.name == self.baseline), timed[0] if timed else None)

    def speedup(self, one: Result) -> float | None:
        """The baseline's step time over this one's."""
        base = self.base
        if base is None or base.seconds is None or not one.seconds:
            return None
        return base.seconds / one.seconds

    @property
    def losses(self) -> list[str]:
        """A line for each group of combinations that compute the same: whether their losses agree."""
        lines = list[str]()
        for dtype, group, difference in agreement(self.results, self.kinds):
            tolerance = LOSS_TOLERANCE[dtype]
            everything = len(group) == len(self.ranked)
            names = "" if everything else f" ({'; '.join(one.name for one in group)})"
            agree = "agree" if difference <= tolerance else "DIFFER"
            lines.append(
                f"losses of {len(group)} combinations that compute the same {agree}: at most "
                f"{difference:.1e} apart in any step, {tolerance:g} is rounding in {dtype}{names}"
                + ("" if difference <= tolerance else "; `stretto verify` shows which tensor differs first")
            )
        return lines
