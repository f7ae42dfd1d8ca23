"""One job as the planner sees it, and what may be wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.errors import Problem
from stretto.layout.layout import Layout
from stretto.program import PLAIN
from stretto.program.program import Program
from stretto.spec.attention import ContextKind
from stretto.spec.data_parallel import DataParallel, Precision
from stretto.spec.program import build_program
from stretto.spec.shape import ModelShape

RecomputeMode = Literal["none", "selective", "full", "auto"]


@dataclass(frozen=True)
class Recompute:
    """What the forward forgets, as the config says it."""

    mode: RecomputeMode = "none"
    blocks: int | None = None
    shard_inputs: bool = False
    memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the rules look at: one model on one layout.

    `world` is the number of processes and `devices` the number of accelerators, where they are known.
    `expert_tp` is as given: a layout with one expert-parallel rank does not keep it.
    """

    shape: ModelShape
    layout: Layout
    global_batch: int  # samples of a step
    micro_batch: int  # samples of a microbatch
    sequence: int  # tokens of a sample
    schedule: str = PLAIN
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the schedule
    world: int | None = None
    devices: int | None = None
    clip: float | None = None  # largest gradient norm
    expert_tp: int | None = None
    sequence_parallel: bool = False
    context: ContextKind = "ring"  # how context-parallel ranks attend
    recompute: Recompute = Recompute()
    dp: DataParallel = field(default_factory=DataParallel)
    precision: Precision = field(default_factory=Precision)

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step in each replica; None where the batch does not divide."""
        whole, rest = divmod(self.global_batch, self.layout.dp * self.micro_batch)
        return None if rest else whole

    @property
    def copies(self) -> int:
        """Ranks with the same parameters: those of cp and dp."""
        return self.layout.cp * self.layout.dp

    def program(self, short: bool = False) -> Program:
        """The compute actions of a step, and where sharded parameters of stages are gathered; only with a
        batch that divides.

        Args:
            short: lowered, and without the microbatches that make no rank hold more (`schedule.steady`).

        Raises:
            StrettoError: there is no such schedule, or not with these ranks, microbatches and options.
        """
        assert self.microbatches
        return build_program(
            name=self.schedule,
            ranks=self.layout.pp,
            microbatches=self.microbatches,
            options=self.options,
            shape=self.shape,
            sequence=self.sequence,
            recompute=self.recompute.mode,
            gathered=self.dp.gathers(self.layout.pp) == "stage",
            short=short,
        )


Rule = Callable[[Job], Iterator[Problem]]


def nearest_values(value: int, legal: Iterable[int]) -> list[int]:
    """The nearest legal value below and above `value`, the nearer first; at most two."""
    below = [n for n in legal if n < value][-1:]
    above = [n for n in legal if n > value][:1]
    return sorted(below + above, key=lambda n: abs(n - value))


def either(field: str, values: list[int]) -> str | None:
    """The fix that names the nearest legal values."""
    return f"nearest: {field}={' or '.join(map(str, values))}" if values else None
