"""What every layer of a model costs beside the others, for cutting the model into stages of equal work."""

from __future__ import annotations

from stretto.cost.flops import block_flops, head_flops
from stretto.cost.shape import ModelShape


def layer_costs(shape: ModelShape, sequence: int) -> list[float]:
    """Forward FLOPs per token of [embed, block, ..., block, head]; the embedding, a look-up, costs none."""
    blocks = shape.each(lambda kind: block_flops(kind, sequence))
    return [0.0, *blocks, head_flops(shape)]


def layer_names(shape: ModelShape) -> list[str]:
    """Names of the layers that `layer_costs` counts, in the same order."""
    return ["embed", *(f"blocks.{i}" for i in range(shape.layers)), "head"]
