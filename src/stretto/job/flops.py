"""FLOPs of a model and of each of its layers.

If the model has an encoder, `sequence` is the length of the encoder's sample and `target` that of the
decoder's (0: the same); costs "per token" of the whole model are then per token of the encoder's sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import fsum, prod
from typing import Literal

from stretto.job.framework import CORE, Operator
from stretto.job.parameters import block_shapes, expert_shapes
from stretto.job.shape import ModelShape
from stretto.job.user_shape import UserShape

Recompute = Literal["none", "selective", "full"]


def attention_flops(shape: ModelShape, sequence: int, causal: bool = False, memory: int = 0) -> float:
    """Return the forward FLOPs per token of one block's softmax(q k^T) v, without the linears around it; a
    decoder's block includes cross-attention.

    If blocks differ, this is their mean; pass `shape.block(index)` for a single one.

    Args:
        sequence: tokens of the block's sample.
        memory: tokens that cross-attention attends to; 0: `sequence`.
    """
    return _mean(shape, lambda kind: _attention(kind, sequence, causal, memory))


def block_flops(shape: ModelShape, sequence: int, causal: bool = False, memory: int = 0) -> float:
    """Return the forward FLOPs per token of one block, or the mean if blocks differ; see
    `attention_flops`.
    """
    return _mean(shape, lambda kind: _block(kind, sequence, causal, memory))


def _mean(shape: ModelShape, count: Callable[[ModelShape], float]) -> float:
    kinds = shape.kinds()
    if len(kinds) == 1:
        return count(kinds[0][0])
    return fsum(many * count(kind) for kind, many in kinds) / shape.layers


def _attention(kind: ModelShape, sequence: int, causal: bool, memory: int = 0) -> float:
    """Return the FLOPs of one query's scores and of their product with the values."""
    context = kind.attention.mean_context(sequence, causal and kind.attention.causal)
    if kind.encoder_layers:
        context += memory or sequence
    return 2.0 * kind.heads * (kind.head_dim + kind.value_dim) * context


def _block(kind: ModelShape, sequence: int, causal: bool, memory: int = 0) -> float:
    # the weights that one token uses
    stacked = expert_shapes(kind)
    plain = [sizes for name, sizes in block_shapes(kind).items() if name not in stacked]
    routed = sum(prod(sizes[1:]) for sizes in stacked.values() if len(sizes) == 3)  # biases have two
    top_k = 0 if kind.moe is None else kind.moe.top_k
    linears = 2.0 * (sum(prod(sizes) for sizes in plain if len(sizes) == 2) + top_k * routed)
    if kind.encoder_layers and memory:  # keys and values of cross-attention come from the encoder's tokens
        linears += 2.0 * prod(block_shapes(kind)["cross.kv.weight"]) * (memory / sequence - 1.0)
    return linears + _attention(kind, sequence, causal, memory)


def recomputed_flops(
    shape: ModelShape,
    sequence: int,
    recompute: Recompute,
    operators: Sequence[Operator] = CORE,
    causal: bool = False,
) -> float:
    """Return the FLOPs per token that one block recomputes in its backward, or the mean if blocks differ.

    Args:
        operators: the operators that "selective" recomputes; norms and activation functions count no FLOPs.
    """
    if recompute != "selective":
        return block_flops(shape, sequence, causal) if recompute == "full" else 0.0
    core = attention_flops(shape, sequence, causal) if "core_attn" in operators else 0.0
    return core + _mean(shape, lambda kind: 2.0 * sum(_repeated_weights(kind, operators)))


def _repeated_weights(shape: ModelShape, operators: Sequence[Operator]) -> Iterator[float]:
    """Yield the number of weights of each recomputed linear that one token uses."""
    ffn, gates = shape.ffn, 3 if shape.gated else 2
    if shape.moe is not None:
        routed = shape.moe.top_k * shape.expert_ffn
        ffn = routed + shape.moe.shared_ffn
        if "moe" in operators:
            yield shape.hidden * (gates * ffn + shape.moe.experts)
        elif "shared_experts" in operators:
            yield shape.hidden * gates * shape.moe.shared_ffn
    elif "mlp" in operators:
        yield shape.hidden * gates * ffn
    if "mla_up_proj" in operators and shape.latent is not None:
        sizes = block_shapes(shape)
        yield float(
            sum(prod(sizes[name]) for name in ("attn.q_up.weight", "attn.kv_up.weight") if name in sizes)
        )
    if "alternate_mm" in operators:
        # keys, the projection, and the MLP's second product
        yield shape.hidden * (shape.kv_width + shape.heads * shape.value_dim + (ffn if shape.gated else 0))


def head_flops(shape: ModelShape) -> float:
    """Return the forward FLOPs per token of the logits."""
    return 2.0 * shape.hidden * shape.vocab


def forward_flops_per_token(shape: ModelShape, sequence: int, causal: bool = False, target: int = 0) -> float:
    """Return the FLOPs per token of one forward pass over samples of `sequence` tokens."""
    if not shape.encoder_layers:
        blocks = fsum(many * _block(kind, sequence, causal) for kind, many in shape.kinds())
        return blocks + head_flops(shape)
    target = target or sequence
    encoder = fsum(many * _block(kind, sequence, causal) for kind, many in shape.encoder_stack.kinds())
    decoder = fsum(many * _block(kind, target, causal, sequence) for kind, many in shape.kinds())
    return encoder + (decoder + head_flops(shape)) * target / sequence


def model_flops_per_token(shape: ModelShape, sequence: int, causal: bool = False, target: int = 0) -> float:
    """Return the FLOPs per token of forward and backward, without recomputation.

    Model FLOPs utilisation, MFU = model_flops_per_token * tokens per second / (devices * peak FLOPs per
    second).
    """
    return 3.0 * forward_flops_per_token(shape, sequence, causal, target)


def model_flops_per_step(
    shape: ModelShape, sequence: int, batch: int, causal: bool = False, target: int = 0
) -> float:
    """Return the model FLOPs of one step over `batch` samples of `sequence` tokens, summed over all
    devices.
    """
    return batch * sequence * model_flops_per_token(shape, sequence, causal, target)


def hardware_flops_per_token(
    shape: ModelShape,
    sequence: int,
    recompute: Recompute = "none",
    causal: bool = False,
    operators: Sequence[Operator] = CORE,
) -> float:
    """Return the FLOPs per token that the devices perform, including recomputation in the backward pass.

    "full" runs every block's forward twice: for GPT 96 L h^2 (1 + s/(6h) + V/(16 h L)), equation 3 of
    Narayanan et al. 2021. "selective" repeats `operators`, by default only the forward of softmax(q k^T) v;
    Korthikanti et al. 2022 add three times as much for it (s/(3h) in their equation of hardware FLOPs).
    """
    again = recomputed_flops(shape, sequence, recompute, operators, causal)
    return model_flops_per_token(shape, sequence, causal) + shape.layers * again


def hardware_flops_per_step(
    shape: ModelShape, sequence: int, batch: int, recompute: Recompute = "none", causal: bool = False
) -> float:
    """Return the hardware FLOPs of one step over `batch` samples of `sequence` tokens, summed over all
    devices.
    """
    return batch * sequence * hardware_flops_per_token(shape, sequence, recompute, causal)


def model_flops_utilisation(flops: float, seconds: float, devices: int, peak_flops: float) -> float:
    """Return MFU: model FLOPs per second over devices * `peak_flops` (FLOPs per second)."""
    return flops / (devices * peak_flops * seconds)


def layer_costs(shape: ModelShape, sequence: int, target: int = 0) -> list[float]:
    """Return the forward FLOPs per token of each layer in `layer_names`; embeddings are lookups and
    cost 0.
    """
    if not shape.encoder_layers:
        blocks = shape.each(lambda kind: block_flops(kind, sequence))
        return [0.0, *blocks, head_flops(shape)]
    target = target or sequence
    encoder = shape.encoder_stack.each(lambda kind: block_flops(kind, sequence))
    decoder = [*shape.each(lambda kind: block_flops(kind, target, memory=sequence)), head_flops(shape)]
    return [0.0, *encoder, 0.0, *(cost * target / sequence for cost in decoder)]


def layer_names(shape: ModelShape) -> list[str]:
    """Return the names of the model's layers, in the order in which they are cut into stages."""
    if isinstance(shape, UserShape):
        return list(shape.layer_names)
    encoder = [*(f"encoder.{i}" for i in range(shape.encoder_layers)), "decoder_embed"]
    blocks = [f"blocks.{i}" for i in range(shape.layers)]
    return ["embed", *(encoder if shape.encoder_layers else []), *blocks, "head"]
