"""Which parameters training changes; the others are frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from stretto.spec.lora import is_adapter


@dataclass(frozen=True)
class Trained:
    """Which parameters the optimiser updates, by their names in the plain model. A frozen one has no
    gradient, no optimiser state and no master.

    Attributes:
        freeze: patterns of names of frozen parameters; `*` stands for any text.
        adapters: all parameters but those of low-rank adapters are frozen.
    """

    freeze: tuple[str, ...] = ()
    adapters: bool = False

    def __call__(self, name: str) -> bool:
        """Whether the optimiser updates this parameter."""
        if adjusted(name) or (self.adapters and not is_adapter(name)):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.freeze)

    @property
    def everything(self) -> bool:
        """Whether nothing is frozen."""
        return not self.freeze and not self.adapters

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Patterns that match none of these names."""
        known = list(names)
        return [p for p in self.freeze if not any(fnmatchcase(name, p) for name in known)]


EVERYTHING = Trained()


def adjusted(name: str) -> bool:
    """Whether a parameter is set by a rule of its own after each step, without a gradient: the correction of
    expert scores (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2). Every rank keeps it whole, in float32 at
    least.
    """
    return name.endswith("router.correction")
