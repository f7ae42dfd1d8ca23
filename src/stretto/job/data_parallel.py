"""Settings of data parallelism, and types of parameters, gradients and optimiser states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from stretto.job.field import Field
from stretto.layout.shards import Mode, ShardSizes, shard_sizes

Offload = Literal["none", "cpu", "nvme"]
Reduce = Literal["step", "microbatch"]
ReduceChoice = Literal["auto", "step", "microbatch"]
Gather = Literal["layer", "stage"]
GatherChoice = Literal["auto", "layer", "stage"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
GradientType = Literal["float32", "same"]  # `same`: the weights'
Fp8 = Literal["none", "tensor", "row"]

BUCKET_BYTES = 25 * 2**20  # weights per unit of reduction
KEEP = ("*norm*", "*router*")  # parameters that stay in float32 unless the config says otherwise
# sizes of shard groups, the largest first, and the first mode that uses each
SHARDS = {"shard_states": "zero1", "shard_gradients": "zero2", "shard_parameters": "zero3"}
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """How data-parallel ranks (those of cp and dp) shard parameters, gradients and optimiser states."""

    mode: Annotated[
        Mode,
        Field(
            "`server`: the first rank has all states, gathers gradients and sends weights; `ddp`: every rank "
            "has everything; `zero1` shards optimiser states, `zero2` gradients too, `zero3` parameters too."
        ),
    ] = "ddp"
    shard_states: Annotated[
        int | None, Field("Ranks that share one copy of the optimiser states; null: all.", gt=0)
    ] = None
    shard_gradients: Annotated[
        int | None,
        Field(
            "Ranks that share one copy of the gradients; divides `shard_states`; null: as many, from `zero2` "
            "on.",
            gt=0,
        ),
    ] = None
    shard_parameters: Annotated[
        int | None,
        Field(
            "Ranks that share one copy of the parameters; divides `shard_gradients`; null: as many, in "
            "`zero3`.",
            gt=0,
        ),
    ] = None
    reduce: Annotated[
        ReduceChoice,
        Field(
            "When gradients are reduced: once a stage's last gradient is complete (`step`), or with each "
            "microbatch, so that no rank ever holds all of them; `auto`: from `zero2` on, whichever takes "
            "less memory with the schedule."
        ),
    ] = "auto"
    gather: Annotated[
        GatherChoice,
        Field(
            "What `zero3` gathers at once: a layer, right before it is used, or a stage, by actions of the "
            "program; `auto`: layers without a pipeline, stages with one."
        ),
    ] = "auto"
    offload: Annotated[
        Offload,
        Field(
            "Where optimiser states are kept and updated: on the device, in host memory, or in files under "
            "`path`, read ahead and written behind."
        ),
    ] = "none"
    offload_parameters: Annotated[
        Offload, Field("With `zero3`: where a rank's shard of the parameters is kept.")
    ] = "none"
    path: Annotated[
        str | None, Field("Folder on a fast local disk for `nvme`; each rank creates its own subfolder.")
    ] = None

    def sizes(self, copies: int) -> ShardSizes:
        """Return the number of ranks that parameters, gradients and states are each sharded over.

        Args:
            copies: number of ranks with the same parameters.
        """
        return shard_sizes(self.mode, copies, self.shard_parameters, self.shard_gradients, self.shard_states)

    def gathers(self, pp: int) -> Gather | None:
        """Return what is gathered at once, or None if parameters are not sharded. Gathers of stages overlap
        with the pipeline's other work; without a pipeline a stage is the whole model.
        """
        if self.mode != "zero3":
            return None
        return self.gather if self.gather != "auto" else "layer" if pp == 1 else "stage"

    @property
    def shards(self) -> dict[str, int | None]:
        """The three configured sizes by field name, the largest first."""
        return {name: getattr(self, name) for name in SHARDS}


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """Types that `train.dtype` does not determine, if weights have 16 bits."""

    gradients: Annotated[
        GradientType, Field("Type in which gradients are accumulated and reduced; `same`: the weights'.")
    ] = "float32"
    keep: Annotated[
        tuple[str, ...], Field("Patterns of names of parameters whose weights stay in float32.")
    ] = KEEP
    fp8: Annotated[
        Fp8,
        Field(
            "Products of the blocks' linear layers in 8 bits, with a scale for each tensor or each row; "
            "emulated on the CPU."
        ),
    ] = "none"
    loss_scale: Annotated[
        float, Field("Initial scale of the loss with float16, halved at each overflow.", gt=0)
    ] = 65536.0
    loss_scale_steps: Annotated[int, Field("Steps without overflow after which it doubles.", gt=0)] = 2000


@dataclass(frozen=True, kw_only=True)
class ComputeType:
    """The type of weights and computation, in section `train` of a config."""

    dtype: Annotated[
        Dtype,
        Field(
            "Type of weights and computation. With 16 bits the optimiser also keeps float32 weights; with "
            "float16 the loss is scaled."
        ),
    ] = "float32"


@dataclass(frozen=True, kw_only=True)
class Precision(ComputeType, PrecisionSettings):
    """The types of weights, gradients and products."""

    @property
    def half(self) -> bool:
        """True if weights have 16 bits."""
        return self.dtype in ("bfloat16", "float16")
