"""Dynamic loss scaling, which keeps gradients within float16's range (Micikevicius et al. 2018, section
3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

LARGEST, SMALLEST = 2.0**24, 1.0


@dataclass(kw_only=True)
class LossScale:
    """A dynamic loss scale: halved when gradients overflow, in which case the update is skipped; doubled
    after `steps` consecutive updates without overflow.

    Attributes:
        value: the current scale, by which loss and gradients are multiplied.
        steps: number of updates without overflow after which the scale doubles.
        good: number of updates since the last change.
        skipped: total number of skipped updates.
        exhausted: gradients overflowed at the smallest scale: training has diverged.
    """

    value: float = 65536.0
    steps: int = 2000
    good: int = 0
    skipped: int = 0
    exhausted: bool = False

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step; all ranks must pass the same `overflow`."""
        if overflow:
            self.skipped += 1
            self.good = 0
            self.exhausted = self.value <= SMALLEST
            self.value = max(SMALLEST, self.value / 2)
            return
        self.good += 1
        self.exhausted = False
        if self.good >= self.steps:
            self.good = 0
            self.value = min(LARGEST, self.value * 2)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "good": self.good, "skipped": self.skipped}

    def load(self, state: dict[str, float]) -> None:
        """Restore the result of `state`."""
        self.value = state["value"]
        self.good = int(state["good"])
        self.skipped = int(state["skipped"])
        self.exhausted = False
