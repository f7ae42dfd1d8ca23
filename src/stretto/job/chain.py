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

    name: in the model.
    kind: `between` is the layer from an encoder to its decoder, the encoder's last norm and the embedding of
        the decoder's tokens.
    shape: of a block, a model with nothing but blocks like it; else the model.
    decoder: whether it works on the tokens of a decoder beside an encoder.
    block: its number among all blocks, the encoder's first; None: it is none.
    """

    name: str
    kind: LayerKind
    shape: ModelShape
    decoder: bool = False
    block: int | None = None


@lru_cache(maxsize=16384)
def layer_of(shape: ModelShape, at: int) -> ChainLayer:
    """The layer at a place of the chain: 0 is the embedding, `shape.chain - 1` the head."""
    assert 0 <= at < shape.chain, f"layer {at} of {shape.chain}"
    encoder, blocks = shape.encoder_layers, at - 1
    if at == 0:
        return ChainLayer(name="embed", kind="embed", shape=shape)
    if at == shape.chain - 1:
        return ChainLayer(name="head", kind="head", shape=shape, decoder=encoder > 0)
    if at <= encoder:
        kind = shape.encoder_stack.block(blocks)
        return ChainLayer(name=f"encoder.{blocks}", kind="block", shape=kind, block=blocks)
    if encoder and at == encoder + 1:
        return ChainLayer(name="decoder_embed", kind="between", shape=shape, decoder=True)
    inside = blocks - (encoder + 1 if encoder else 0)
    return ChainLayer(
        name=f"blocks.{inside}",
        kind="block",
        shape=shape.block(inside),
        decoder=encoder > 0,
        block=encoder + inside,
    )


def is_block(shape: ModelShape, at: int) -> bool:
    """True if the layer at a place of the chain is a block."""
    return layer_of(shape, at).block is not None


def blocks_among(shape: ModelShape, layers: Iterable[int]) -> list[int]:
    """The blocks among some layers, by their places in the chain."""
    return [at for at in layers if is_block(shape, at)]


def non_blocks_among(shape: ModelShape, layers: Iterable[int]) -> list[int]:
    """The layers that are no blocks among some layers."""
    return [at for at in layers if not is_block(shape, at)]


def block_count(shape: ModelShape) -> int:
    """Blocks of all stacks."""
    return shape.encoder_layers + shape.layers


@lru_cache(maxsize=256)
def block_kinds(shape: ModelShape) -> tuple[tuple[ModelShape, int], ...]:
    """The kinds of blocks of all stacks, in the order of their first, and how many there are of each."""
    return (*(shape.encoder_stack.kinds() if shape.encoder_layers else ()), *shape.kinds())


@lru_cache(maxsize=16384)
def kind_counts(shape: ModelShape, layers: range) -> tuple[int, ...]:
    """How many blocks of each of `block_kinds` are among some layers."""
    kinds = [kind for kind, _ in block_kinds(shape)]
    if len(kinds) == 1:
        return (len(range(max(1, layers.start), min(layers.stop, shape.layers + 1))),)
    blocks = [layer_of(shape, at).shape for at in blocks_among(shape, layers)]
    return tuple(blocks.count(kind) for kind in kinds)
