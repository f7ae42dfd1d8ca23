"""One job: the description that rules, planner, engine, trainer and proofs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.errors import Problem
from stretto.layout.layout import Layout
from stretto.program import PLAIN
from stretto.program.program import Program
from stretto.spec.attention import AttentionKernel, ContextKind
from stretto.spec.data_parallel import BUCKET_BYTES, DataParallel, Precision
from stretto.spec.optimiser import Optimiser
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
    """One model on one layout, and all that decides what its ranks compute and hold.

    `world` is the number of processes and `devices` the number of accelerators, where they are known.
    `expert_tp` is as given: a layout with one expert-parallel rank does not keep it.
    `attention` is the kernel: `explicit` forms the matrix of probabilities; dropout always does.
    With `fused_loss` one kernel computes the loss from logits as they are, another their gradient in a tensor
    like them; Stretto's own is not fused.
    Each rank's share of the vocabulary is a multiple of `vocab_multiple`; `bucket` is the bytes of weights at
    which a unit of reduction is full; with `one_memory` host and device are one, as on a CPU.
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
    expert_tp: int | None = None
    sequence_parallel: bool = False
    context: ContextKind = "ring"  # how context-parallel ranks attend
    recompute: Recompute = Recompute()
    dp: DataParallel = field(default_factory=DataParallel)
    precision: Precision = field(default_factory=Precision)
    optimiser: Optimiser = field(default_factory=lambda: Optimiser(clip=None))
    attention: AttentionKernel = "flash"
    fused_loss: bool = False
    vocab_multiple: int = 1
    bucket: int = BUCKET_BYTES
    one_memory: bool = False

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
            short: lowered, and without the microbatches that make no rank hold more
                (`program.transforms.shorten`).

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
