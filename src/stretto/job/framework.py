"""How other frameworks differ from Stretto in what they store, fuse and recompute. Only predictions use it,
to count the memory of such runs; no config can name it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from stretto.job.data_parallel import DataParallelSettings, Precision

# Megatron-Core's `recompute_modules`; and `alternate_mm`, torchtitan's policy "op", which keeps the output
# of every second matrix product and of attention.
Operator = Literal[
    "core_attn",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
    "alternate_mm",
]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
CORE: tuple[Operator, ...] = ("core_attn",)
_BUCKET = 10**9  # bytes of DeepSpeed's reduction buffer: 5e8 elements of 16 bits


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What a training framework stores; the defaults are Stretto's behaviour.

    Attributes:
        operators: the operators of each block that selective recomputation repeats.
        inputs_on_host: full recomputation copies a block's input to host memory as soon as the block has run,
            as DeepSpeed's `cpu_checkpointing` does.
        fused_softmax: one kernel scales, masks and normalises the scores of explicit attention, and dropout
            stores no random numbers.
        fused_activation: one kernel computes the input of a gated MLP's second linear from the output of the
            first and saves no intermediate.
        wide_shards: sharded parameters are stored in float32 and gathered in 16 bits, as in FSDP; otherwise
            16-bit shards are stored in addition to float32 masters.
        lasting_gradients: 16-bit gradients persist in addition to the float32 ones that they are added to, as
            in DeepSpeed's BF16Optimizer; otherwise they are freed layer by layer.
        buckets: bytes of persistent reduction buffers: DeepSpeed's `reduce_bucket_size`, by default 5e8
            elements.
        torch_loss: the loss over an unsplit vocabulary is torch's cross-entropy, which saves
            log-probabilities and computes its gradient from two float32 tensors of the logits' size;
            Stretto's overwrites the probabilities with the gradient.
        dtensor_loss: the loss over a vocabulary split over tp is DTensor's, which computes its gradient from
            three float32 tensors of the logits' size.
        remainders: masters are the 16 bits that bfloat16 weights lack, and the update has no temporaries:
            apex's DistributedFusedAdam, as NeMo uses it.
        frees_sent: what a pipeline stage has sent is freed at once (Megatron-LM's
            `deallocate_pipeline_outputs`); otherwise as soon as a later action has waited for it.
        inputs_in_8_bits: linears with 8-bit products save their inputs in 8 bits, as Transformer Engine does;
            the output of core attention, which its backward reads, is saved in addition.
    """

    operators: tuple[Operator, ...] = CORE
    inputs_on_host: bool = False
    fused_softmax: bool = False
    fused_activation: bool = False
    wide_shards: bool = False
    lasting_gradients: bool = False
    buckets: int = 0
    torch_loss: bool = False
    dtensor_loss: bool = False
    remainders: bool = False
    frees_sent: bool = False
    inputs_in_8_bits: bool = False


STRETTO = Framework()


def framework_behaviour(
    name: str,
    *,
    dp: DataParallelSettings,
    precision: Precision,
    compiled: bool = False,
    recompute: Framework = STRETTO,
) -> Framework:
    """Return what a framework stores and fuses for a job.

    Args:
        name: `megatron`, `nemo`, `fsdp` (torchtitan's and others') or `deepspeed`.
        compiled: a compiler or hand-written kernels fuse a gated MLP's activation.
        recompute: the framework's recomputation settings.
    """
    sharded = dp.mode == "zero3"
    return replace(
        recompute,
        fused_softmax=True,
        fused_activation=compiled or name in ("megatron", "nemo"),
        wide_shards=name == "fsdp" and sharded,
        lasting_gradients=name == "deepspeed" and precision.gradients == "float32" and not sharded,
        buckets=_BUCKET if name == "deepspeed" and dp.mode in ("zero1", "zero2") else 0,
        torch_loss=True,
        dtensor_loss=name == "fsdp",
        remainders=name == "nemo" and precision.dtype == "bfloat16",
        frees_sent=name in ("megatron", "nemo"),
        inputs_in_8_bits=name in ("megatron", "nemo") and precision.fp8 != "none",
    )
