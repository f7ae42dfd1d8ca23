"""Which parameters are trained and which are frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from stretto.job.field import Field
from stretto.job.lora import is_adapter


@dataclass(frozen=True)
class TrainedParameters:
    """Which parameters are trained, by their names in the plain model. A frozen parameter has no gradient, no
    optimiser state and no master weight.
    """

    freeze: Annotated[
        tuple[str, ...],
        Field(
            "Name patterns of parameters that are frozen, which then have no gradient and no optimiser "
            "state; `*` stands for any text.",
            examples=('["embed.*", "blocks.0.*"]',),
        ),
    ] = ()
    adapters: bool = False
    """Only low-rank adapters are trained."""

    def __call__(self, name: str) -> bool:
        """True if the optimiser updates this parameter."""
        if is_router_correction(name) or (self.adapters and not is_adapter(name)):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.freeze)

    @property
    def everything(self) -> bool:
        """True if nothing is frozen."""
        return not self.freeze and not self.adapters

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the patterns that match none of the names."""
        parameters = list(names)
        return [p for p in self.freeze if not any(fnmatchcase(name, p) for name in parameters)]


ALL_TRAINED = TrainedParameters()


def is_router_correction(name: str) -> bool:
    """True if a parameter is the bias of expert scores that is set after each step by a rule without a
    gradient (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2). Every rank stores all of it, in float32 at
    least.
    """
    return name.endswith("router.correction")
