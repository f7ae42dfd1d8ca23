"""How a job keeps parameters, gradients and optimiser states, as its config says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.layout.shards import Mode, ShardSizes, shard_sizes

Place = Literal["none", "cpu", "nvme"]
Reduce = Literal["step", "microbatch"]
Gather = Literal["layer", "stage"]

KEEP = ("*norm*", "*router*")  # parameters that stay in float32 unless the config says otherwise
# sizes, the largest first, and the mode from which on each means something
SHARDS = {"shard_states": "zero1", "shard_gradients": "zero2", "shard_parameters": "zero3"}
MODES: tuple[Mode, ...] = ("server", "ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Section `dp` of a config: what ranks with the same parameters share, and what lies elsewhere."""

    mode: Mode = "ddp"
    shard_states: int | None = None
    shard_gradients: int | None = None
    shard_parameters: int | None = None
    reduce: Literal["auto", "step", "microbatch"] = "auto"
    gather: Literal["auto", "layer", "stage"] = "auto"
    offload: Place = "none"
    offload_parameters: Place = "none"
    path: str | None = None

    def sizes(self, copies: int) -> ShardSizes:
        """Over how many ranks each is split, of `copies` with the same parameters."""
        return shard_sizes(self.mode, copies, self.shard_parameters, self.shard_gradients, self.shard_states)

    def gathers(self, pp: int) -> Gather | None:
        """What is gathered at once; None where parameters are whole. Stages overlap with the pipeline's other
        work; without a pipeline a stage is the whole model.
        """
        if self.mode != "zero3":
            return None
        return self.gather if self.gather != "auto" else "layer" if pp == 1 else "stage"

    @property
    def shards(self) -> dict[str, int | None]:
        """The three sizes by their fields, the largest first."""
        return {name: getattr(self, name) for name in SHARDS}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """`train.dtype` and section `precision` of a config."""

    dtype: str = "float32"
    gradients: Literal["float32", "same"] = "float32"
    keep: tuple[str, ...] = KEEP
    fp8: Literal["none", "tensor", "row"] = "none"
    loss_scale: float = 65536.0
    loss_scale_steps: int = 2000

    @property
    def half(self) -> bool:
        """Whether weights have 16 bits."""
        return self.dtype in ("bfloat16", "float16")
