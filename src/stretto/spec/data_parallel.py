"""How a job keeps parameters, gradients and optimiser states, as its config says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stretto.layout.shards import Mode, ShardSizes, shard_sizes

Offload = Literal["none", "cpu", "nvme"]
Reduce = Literal["step", "microbatch"]
ReduceChoice = Literal["auto", "step", "microbatch"]
Gather = Literal["layer", "stage"]
GatherChoice = Literal["auto", "layer", "stage"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
GradientType = Literal["float32", "same"]  # `same`: the weights'
Fp8 = Literal["none", "tensor", "row"]

BUCKET_BYTES = 25 * 2**20  # of weights, at which a unit of reduction is full
KEEP = ("*norm*", "*router*")  # parameters that stay in float32 unless the config says otherwise
# sizes, the largest first, and the mode from which on each means something
SHARDS = {"shard_states": "zero1", "shard_gradients": "zero2", "shard_parameters": "zero3"}
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Section `dp` of a config: what ranks with the same parameters share, and what lies elsewhere."""

    mode: Mode = "ddp"
    shard_states: int | None = None
    shard_gradients: int | None = None
    shard_parameters: int | None = None
    reduce: ReduceChoice = "auto"
    gather: GatherChoice = "auto"
    offload: Offload = "none"
    offload_parameters: Offload = "none"
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

    dtype: Dtype = "float32"
    gradients: GradientType = "float32"
    keep: tuple[str, ...] = KEEP
    fp8: Fp8 = "none"
    loss_scale: float = 65536.0
    loss_scale_steps: int = 2000

    @property
    def half(self) -> bool:
        """Whether weights have 16 bits."""
        return self.dtype in ("bfloat16", "float16")
