"""Floating-point operations of a model, by the convention that published utilisation figures use.

Counted are matrix products only, 2mnk for [m, k] times [k, n]; the backward pass costs twice the forward.
Per token, a block does 2 FLOPs for each weight of its linears, and its attention 4 * sequence * heads *
head_dim (the scores, and their product with the values); the head does 2 * hidden * vocab. Norms,
activations, softmax and the look-up of the embedding are left out. Of a mixture of experts a token does the
router, its `top_k` experts and the shared one, whether or not a choice is dropped. Latent attention is
counted as it is trained, keys and values of all heads written out.

For GPT that is 72 L h^2 (1 + s/(6h) + V/(12 h L)) per token, forward and backward: the model FLOPs of
Korthikanti et al. 2022, and equation 3 of Narayanan et al. 2021 without its recomputation. It is also the
count of Chowdhery et al. 2022 (PaLM), appendix B, 6N + 12 L H Q T, with N the weights of the linears and
the head.

Megatron, FlashAttention and MosaicML count causal attention as if every position saw all others
(`causal=False`, the default here). With `causal=True` attention counts half, as in MaxText since July 2025. A
window counts the positions that it lets through, in either convention.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Literal

from stretto.cost.parameters import block_shapes, expert_shapes
from stretto.cost.shape import ModelShape

Recompute = Literal["none", "selective", "full"]


def attention_flops(shape: ModelShape, sequence: int, causal: bool = False) -> float:
    """Forward FLOPs per token of one block's softmax(q k^T) v, without the linears around it.

    Where blocks differ it is their mean; ask for one with `shape.block(index)`.
    """
    return _mean(shape, lambda kind: _attention(kind, sequence, causal))


def block_flops(shape: ModelShape, sequence: int, causal: bool = False) -> float:
    """Forward FLOPs per token of one block; where blocks differ, their mean."""
    return _mean(shape, lambda kind: _block(kind, sequence, causal))


def _mean(shape: ModelShape, count: Callable[[ModelShape], float]) -> float:
    kinds = shape.kinds()
    if len(kinds) == 1:
        return count(kinds[0][0])
    return sum(many * count(kind) for kind, many in kinds) / shape.layers


def _attention(kind: ModelShape, sequence: int, causal: bool) -> float:
    """Scores, and their product with the values, of the positions that one is scored against."""
    return 2.0 * kind.heads * (kind.head_dim + kind.value_dim) * kind.special.seen(sequence, causal)


def _block(kind: ModelShape, sequence: int, causal: bool) -> float:
    return 2.0 * _weights(kind) + _attention(kind, sequence, causal)


def _weights(shape: ModelShape) -> int:
    """Weights of a block's linears that a token is multiplied with."""
    stacked = expert_shapes(shape)
    plain = [sizes for name, sizes in block_shapes(shape).items() if name not in stacked]
    routed = sum(prod(sizes[1:]) for sizes in stacked.values() if len(sizes) == 3)  # biases have two
    top_k = 0 if shape.moe is None else shape.moe.top_k
    return sum(prod(sizes) for sizes in plain if len(sizes) == 2) + top_k * routed


def head_flops(shape: ModelShape) -> float:
    """Forward FLOPs per token of the logits."""
    return 2.0 * shape.hidden * shape.vocab


def forward_flops_per_token(shape: ModelShape, sequence: int, causal: bool = False) -> float:
    """FLOPs per token of one forward pass over rows of `sequence` tokens."""
    blocks = sum(many * _block(kind, sequence, causal) for kind, many in shape.kinds())
    return blocks + head_flops(shape)


def model_flops_per_token(shape: ModelShape, sequence: int, causal: bool = False) -> float:
    """FLOPs per token of forward and backward, nothing recomputed.

    Model FLOPs utilisation, MFU = model_flops_per_token * tokens per second / (devices * peak FLOPs per
    second).
    """
    return 3.0 * forward_flops_per_token(shape, sequence, causal)


def model_flops_per_step(shape: ModelShape, sequence: int, batch: int, causal: bool = False) -> float:
    """Model FLOPs of one step over `batch` rows of `sequence` tokens, on all devices together."""
    return batch * sequence * model_flops_per_token(shape, sequence, causal)


def hardware_flops_per_token(
    shape: ModelShape, sequence: int, recompute: Recompute = "none", causal: bool = False
) -> float:
    """FLOPs per token that the devices do, with what is recomputed in the backward pass.

    "full" runs every block's forward twice: for GPT 96 L h^2 (1 + s/(6h) + V/(16 h L)), equation 3 of
    Narayanan et al. 2021. "selective" repeats only the forward of softmax(q k^T) v; Korthikanti
    et al. 2022 add three times as much for it (s/(3h) in their equation of hardware FLOPs).
    """
    again = {
        "none": 0.0,
        "selective": attention_flops(shape, sequence, causal),
        "full": block_flops(shape, sequence, causal),
    }
    return model_flops_per_token(shape, sequence, causal) + shape.layers * again[recompute]


def hardware_flops_per_step(
    shape: ModelShape, sequence: int, batch: int, recompute: Recompute = "none", causal: bool = False
) -> float:
    """Hardware FLOPs of one step over `batch` rows of `sequence` tokens, on all devices together."""
    return batch * sequence * hardware_flops_per_token(shape, sequence, recompute, causal)


def model_flops_utilisation(flops: float, seconds: float, devices: int, peak_flops: float) -> float:
    """Share of the peak: model FLOPs done in `seconds` over devices * peak FLOPs per second * seconds."""
    return flops / (devices * peak_flops * seconds)
