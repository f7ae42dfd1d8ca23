"""The layers of a model in the order in which they are cut into stages, with one stack of blocks or two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from stretto.job.shape import ModelShape

LayerKind = Literal["embed", "block", "between", "head"]


@dataclass(frozen=True, kw_only=True)
class ChainLayer:
    """One layer.

    Attributes:
        name: the layer's name in the model.
        kind: `between` is the layer between encoder and decoder: the encoder's last norm and the embedding of
            the decoder's tokens.
        shape: for a block, a model that consists of blocks like it alone; otherwise the model.
        decoder: True if an encoder exists and the layer processes the decoder's tokens.
        block: index among all blocks, the encoder's first; None if the layer is not a block.
    """

    name: str
    kind: LayerKind
    shape: ModelShape
    decoder: bool = False
    block: int | None = None


@lru_cache(maxsize=16384)
def layer_of(shape: ModelShape, index: int) -> ChainLayer:
    """Return the layer with an index in the chain: 0 is the embedding, `shape.chain - 1` the head."""
    assert 0 <= index < shape.chain, f"layer {index} of {shape.chain}"
    encoder, blocks = shape.encoder_layers, index - 1
    if index == 0:
        return ChainLayer(name="embed", kind="embed", shape=shape)
    if index == shape.chain - 1:
        return ChainLayer(name="head", kind="head", shape=shape, decoder=encoder > 0)
    if index <= encoder:
        kind = shape.encoder_stack.block(blocks)
        return ChainLayer(name=f"encoder.{blocks}", kind="block", shape=kind, block=blocks)
    if encoder and index == encoder + 1:
        return ChainLayer(name="decoder_embed", kind="between", shape=shape, decoder=True)
    inside = blocks - (encoder + 1 if encoder else 0)
    return ChainLayer(
        name=f"blocks.{inside}",
        kind="block",
        shape=shape.block(inside),
        decoder=encoder > 0,
        block=encoder + inside,
    )


def is_block(shape: ModelShape, index: int) -> bool:
    """True if the layer with this index in the chain is a block."""
    return layer_of(shape, index).block is not None


def blocks_among(shape: ModelShape, layers: Iterable[int]) -> list[int]:
    """Return those of the layers (indices in the chain) that are blocks."""
    return [layer for layer in layers if is_block(shape, layer)]


def non_blocks_among(shape: ModelShape, layers: Iterable[int]) -> list[int]:
    """Return those of the layers (indices in the chain) that are not blocks."""
    return [layer for layer in layers if not is_block(shape, layer)]


def block_count(shape: ModelShape) -> int:
    """Return the number of blocks of all stacks."""
    return shape.encoder_layers + shape.layers


@lru_cache(maxsize=256)
def block_kinds(shape: ModelShape) -> tuple[tuple[ModelShape, int], ...]:
    """Return the kinds of blocks of all stacks, in the order of their first blocks, each with its count."""
    return (*(shape.encoder_stack.kinds() if shape.encoder_layers else ()), *shape.kinds())


@lru_cache(maxsize=16384)
def kind_counts(shape: ModelShape, layers: range) -> tuple[int, ...]:
    """Return how many of the layers (indices in the chain) are blocks of each of `block_kinds`."""
    kinds = [kind for kind, _ in block_kinds(shape)]
    if len(kinds) == 1:
        return (len(range(max(1, layers.start), min(layers.stop, shape.layers + 1))),)
    blocks = [layer_of(shape, layer).shape for layer in blocks_among(shape, layers)]
    return tuple(blocks.count(kind) for kind in kinds)
