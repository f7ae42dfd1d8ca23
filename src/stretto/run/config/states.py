"""How weights, gradients and optimiser states are kept: by which ranks, where, in which type."""

from __future__ import annotations

from pydantic import Field

from stretto.layout.shards import Mode
from stretto.run.config.section import Section
from stretto.spec.data_parallel import KEEP, Fp8, GatherChoice, GradientType, Offload, ReduceChoice


class DataParallelConfig(Section):
    """How data-parallel ranks (those of cp and dp) shard parameters, gradients and optimiser states."""

    mode: Mode = Field(
        default="ddp",
        description="`server`: the first rank has all states, gathers gradients and sends weights; `ddp`: "
        "every rank has everything; `zero1` shards optimiser states, `zero2` gradients too, `zero3` "
        "parameters too.",
    )
    shard_states: int | None = Field(
        default=None, gt=0, description="Ranks that share one copy of the optimiser states; null: all."
    )
    shard_gradients: int | None = Field(
        default=None,
        gt=0,
        description="Ranks that share one copy of the gradients; divides `shard_states`; null: as many, from "
        "`zero2` on.",
    )
    shard_parameters: int | None = Field(
        default=None,
        gt=0,
        description="Ranks that share one copy of the parameters; divides `shard_gradients`; null: as many, "
        "in `zero3`.",
    )
    reduce: ReduceChoice = Field(
        default="auto",
        description="When gradients are reduced: once a stage's last gradient is complete (`step`), or "
        "with each microbatch, so that no rank ever holds all of them; `auto`: from `zero2` "
        "on, whichever takes less memory with the schedule.",
    )
    gather: GatherChoice = Field(
        default="auto",
        description="What `zero3` gathers: a layer, right before it is used, or a stage, as the program "
        "says; `auto`: layers without a pipeline, stages with one.",
    )
    offload: Offload = Field(
        default="none",
        description="Where optimiser states are kept and updated: on the device, in host memory, or in "
        "files under `path`, read ahead and written behind.",
    )
    offload_parameters: Offload = Field(
        default="none", description="With `zero3`: where a rank's shard of the parameters is kept."
    )
    path: str | None = Field(
        default=None,
        description="Folder on a fast local disk for `nvme`; each rank creates its own subfolder.",
    )


class FinetuneConfig(Section):
    """Which parameters are trained."""

    freeze: list[str] = Field(
        default_factory=list[str],
        examples=['["embed.*", "blocks.0.*"]'],
        description="Patterns of names of parameters that are not trained, which then have no gradient and "
        "no optimiser state; `*` stands for any text.",
    )


class PrecisionConfig(Section):
    """Types that `train.dtype` leaves open, with weights in 16 bits."""

    gradients: GradientType = Field(
        default="float32",
        description="Type in which gradients are accumulated and reduced; `same`: the weights'.",
    )
    keep: list[str] = Field(
        default_factory=lambda: list(KEEP),
        description="Patterns of names of parameters whose weights stay in float32.",
    )
    fp8: Fp8 = Field(
        default="none",
        description="Products of the blocks' linear layers in 8 bits, with a scale for each tensor or each "
        "row; emulated on the CPU.",
    )
    loss_scale: float = Field(
        default=65536.0, gt=0, description="Initial scale of the loss with float16, halved at each overflow."
    )
    loss_scale_steps: int = Field(
        default=2000, gt=0, description="Steps without overflow after which it doubles."
    )
