"""Bytes of weights, gradients and optimiser state that one rank holds, to the byte.

Shares are those of `models.sharding`: linears by output or input features, the vocabulary padded to a
multiple on every rank, key heads copied where there are fewer than ranks, norms whole on every rank, experts
over ep and each expert's inner width over expert_tp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal

from stretto.cost.parameters import block_shapes, embedding_shapes, head_shapes
from stretto.cost.shape import ModelShape

Optimiser = Literal["adamw", "sgd"]
Named = dict[str, int]  # elements of each tensor

_INTO_RESIDUAL = ("attn.proj", "mlp.down", "mlp.shared.down")  # split by input features


@dataclass(frozen=True)
class Shares:
    """How many ranks share what."""

    tp: int = 1
    ep: int = 1
    expert_tp: int = 1
    vocab_multiple: int = 1


@dataclass(frozen=True)
class StateBytes:
    """What training keeps of parameters."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def layer_elements(shape: ModelShape, layer: int, shares: Shares) -> Named:
    """Elements of each parameter of a layer that one rank holds.

    Names are those of the plain model; a tied output weight goes by its name in the embedding.

    Args:
        layer: 0 for the embedding, then the blocks, then the head.
    """
    if layer == 0:
        return {f"embed.{n}": _dense(n, sizes, shape, shares) for n, sizes in embedding_shapes(shape).items()}
    if layer <= shape.layers:
        found = Named()
        for name, sizes in block_shapes(shape).items():
            routed = name.startswith("mlp.experts.")
            share = _expert(name, sizes, shares) if routed else _dense(name, sizes, shape, shares)
            found[f"blocks.{layer - 1}.{name}"] = share
        return found
    found = {f"head.{n}": _dense(n, sizes, shape, shares) for n, sizes in head_shapes(shape).items()}
    if shape.tied:
        found["embed.tok.weight"] = vocabulary_rows(shape, shares) * shape.hidden
    return found


def elements_of(shape: ModelShape, layers: Iterable[int], shares: Shares) -> Named:
    """Elements of each parameter of these layers, a tied one once."""
    found = Named()
    for layer in layers:
        found |= layer_elements(shape, layer, shares)
    return found


def vocabulary_rows(shape: ModelShape, shares: Shares) -> int:
    """Rows of the vocabulary that each rank holds, padding included."""
    unit = shares.tp * shares.vocab_multiple
    return -(-shape.vocab // unit) * shares.vocab_multiple


def state_bytes(
    elements: Named, element: int, optimiser: Optimiser = "adamw", momentum: float = 0.0
) -> StateBytes:
    """Weights, flat gradients, and the optimiser's states: AdamW's two means and a float32 count of steps for
    every tensor; with momentum, SGD's.

    Args:
        element: bytes of a weight; gradients and states have the same.
    """
    size = element * sum(elements.values())
    if optimiser == "adamw":
        return StateBytes(size, size, 2 * size + 4 * len(elements))
    return StateBytes(size, size, size if momentum else 0)


def _dense(name: str, sizes: tuple[int, ...], shape: ModelShape, shares: Shares) -> int:
    whole, tp = prod(sizes), shares.tp
    if name in ("tok.weight", "out.weight"):
        return vocabulary_rows(shape, shares) * shape.hidden
    if name.startswith("attn.qkv"):
        rows = shape.attention_width // tp + 2 * max(shape.kv_heads // tp, 1) * shape.head_dim
        return rows * (whole // sizes[0])
    if name.startswith(_INTO_RESIDUAL):
        return whole if name.endswith("bias") else whole // tp
    if name.startswith("mlp.") and "router" not in name:
        return whole // tp
    return whole


def _expert(name: str, sizes: tuple[int, ...], shares: Shares) -> int:
    """Of stacked experts [experts, ...]; biases added after the sum over expert_tp are whole there."""
    here = prod(sizes) // shares.ep
    return here if name.endswith("down_bias") else here // shares.expert_tp
