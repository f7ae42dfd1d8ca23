"""How weights, gradients and optimiser states are kept: by which ranks, where, in which type."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from stretto.errors import StrettoError
from stretto.layout.shards import Mode
from stretto.run.config.section import Section
from stretto.spec.data_parallel import KEEP, Fp8, GatherChoice, GradientType, Offload, ReduceChoice
from stretto.spec.job import RecomputeMode
from stretto.spec.lora import EVERY_LINEAR, LoraShape


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


class LoraConfig(Section):
    """Low-rank adapters beside the linears of blocks (Hu et al. 2021); all other parameters are frozen."""

    rank: int | None = Field(default=None, gt=0, description="Rank of the adapters; null: none.")
    alpha: float | None = Field(
        default=None, gt=0, description="An adapter adds `alpha / rank` B A x; null: `rank`."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Probability of dropout on the input of A.")
    targets: list[str] = Field(
        default_factory=lambda: [EVERY_LINEAR],
        min_length=1,
        examples=['["q_proj", "v_proj"]'],
        description="Linears with adapters: names as in PEFT, names of modules here with `*` for any text "
        "(`attn.*`), or `all-linear`.",
    )
    rslora: bool = Field(
        default=False,
        description="The factor is `alpha / sqrt(rank)` (Kalajdzievski 2023); PEFT's `use_rslora`.",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        self.shape()  # which looks for the targets
        fields = LoraConfig.model_fields.items()
        usual = {name: field.get_default(call_default_factory=True) for name, field in fields}
        if self.rank is None and self.model_dump() != usual:
            raise StrettoError("has no rank, so that there are no adapters", hint="lora.rank=8")
        return self

    def shape(self) -> LoraShape | None:
        """The adapters; None without a rank."""
        if self.rank is None:
            return None
        return LoraShape(
            rank=self.rank,
            alpha=self.rank if self.alpha is None else self.alpha,
            dropout=self.dropout,
            targets=tuple(self.targets),
            rslora=self.rslora,
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


class RecomputeConfig(Section):
    """Activations that are dropped after the forward and recomputed in the backward, to save memory."""

    mode: RecomputeMode = Field(
        default="none",
        description="`selective`: only softmax(q k^T) v; `full`: whole blocks; `auto`: for each block the "
        "cheapest mode that fits `memory_gib`.",
    )
    blocks: int | None = Field(
        default=None,
        ge=0,
        description="With `full`: the number of blocks of each stage to recompute, from the first; null: "
        "all.",
    )
    shard_inputs: bool = Field(
        default=False,
        description="With `full`: each tp rank keeps only its part of a block's input, which is gathered "
        "again in the backward; no effect with sequence_parallel, where the input is split "
        "already.",
    )
    memory_gib: float | None = Field(
        default=None, gt=0, description="With `auto`: the memory that a rank may use, GiB."
    )
