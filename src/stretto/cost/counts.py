"""Operations that one rank really does in a layer for one microbatch, to the last one.

Matrix products only, 2mnk for [m, k] times [k, n]. Other than in `cost.flops`, padding counts, key heads that
are copied count on every rank, and what a kernel of attention is given counts in full where it leaves out
what is masked. Ranks of a ring leave blocks of it out themselves: these do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.cost.activations import Computing
from stretto.cost.shape import ModelShape

_TILE = 256  # queries that attention which is written out takes at a time, where it works block by block


@dataclass(frozen=True)
class LayerFlops:
    """Operations of linear layers (`products`) and of softmax(q k^T) v (`attention`).

    Attributes:
        backward: gradients of inputs and of weights.
        again: of the forward, in the backward.
    """

    forward: tuple[int, int] = (0, 0)
    again: tuple[int, int] = (0, 0)
    backward: tuple[int, int] = (0, 0)


def layer_flops(shape: ModelShape, kind: str, how: Computing) -> LayerFlops:
    """Of a layer: `kind` is "embed", "block" or "head"; `how.recompute` says what a block repeats."""
    if kind == "embed":
        return LayerFlops()
    if kind == "head":
        columns = -(-shape.vocab // (how.tp * how.vocab_multiple)) * how.vocab_multiple
        logits = 2 * how.tokens * shape.hidden * columns
        return LayerFlops((logits, 0), (0, 0), (2 * logits, 0))
    attention, attention_back = _core(shape, how)
    both_ways, forward_only = _linears(shape, how)
    forward = both_ways + forward_only, attention
    again = {"none": (0, 0), "selective": (0, attention), "full": forward}[how.recompute]
    return LayerFlops(forward, again, (2 * both_ways, attention_back))


def _linears(shape: ModelShape, how: Computing) -> tuple[int, int]:
    """Products of a block whose backward is two of their size, and those that have none."""
    h, q = shape.hidden, shape.attention_width // how.tp
    kv = max(shape.kv_heads // how.tp, 1) * shape.head_dim
    around = how.tokens * h * (2 * q + 2 * kv)
    wide = 3 if shape.gated else 2  # matrices of an MLP
    if shape.moe is None:
        return 2 * (around + how.tokens * wide * h * (shape.ffn // how.tp)), 0
    moe, slices = shape.moe, how.tp if how.expert_tp is None else how.expert_tp
    together = how.ep == 1 and slices == how.tp
    length = how.tokens // how.batch
    routed = how.tokens if together else how.batch * -(-length // how.tp)
    rows = routed * moe.top_k * (1 if together else slices)
    inner = rows * wide * h * (shape.expert_ffn // slices)
    inner += how.tokens * wide * h * (moe.shared_ffn // how.tp)
    # the weighted sum of a token's experts is a product, its gradients are not
    return 2 * (around + inner + routed * h * moe.experts), 2 * routed * moe.top_k * h


def _core(shape: ModelShape, how: Computing) -> tuple[int, int]:
    """Attention, forward and backward."""
    heads, n = shape.heads // how.tp, how.tokens // how.batch
    explicit = how.attention == "explicit" or shape.dropout > 0.0
    of = 2 * how.batch * heads * shape.head_dim  # of a pair of query and key, in one product
    if how.cp > 1 and how.context == "ring":
        half, others = n // 2, (how.cp - 1) * (n * n // 2)
        triangle = _triangle if explicit else _square
        own, own_back = triangle(n), half * half + 2 * triangle(half)
        return 2 * of * (own + others), 5 * of * (own_back + others)
    if how.cp > 1:
        of, n = of // how.cp, n * how.cp
    # probabilities that are kept are not formed again: four products, not five
    return 2 * of * n * n, (4 if explicit else 5) * of * n * n


def _square(n: int) -> int:
    return n * n


def _triangle(n: int) -> int:
    """Pairs of n queries and keys, of which each tile of queries leaves out the keys behind it."""
    return sum(min(_TILE, n - start) * min(start + _TILE, n) for start in range(0, n, _TILE))
