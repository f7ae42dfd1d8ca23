"""The ordered actions of every pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stretto.schedule.action import Action


@dataclass(frozen=True)
class Program:
    """What every pipeline rank does in one training step, in order.

    A schedule gives compute actions only; `lower` adds communications and sets `lowered`.
    """

    name: str
    placement: tuple[int, ...]  # rank of each stage
    microbatches: int
    orders: tuple[tuple[Action, ...], ...]  # one per rank
    parameters: Mapping[str, int] = field(default_factory=dict[str, int])  # chunks, group, ...
    tied: tuple[tuple[int, ...], ...] = ()  # sets of stages that share a parameter; known once lowered
    lowered: bool = False
    trains: bool = True  # False: forwards only

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that `rank` holds, in model order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]
