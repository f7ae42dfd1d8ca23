"""How the language models here are split over tensor-parallel ranks (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from stretto.cost.shape import ModelShape
from stretto.parallel.styles import (
    Column,
    Heads,
    Replicate,
    Row,
    SplitDropout,
    Style,
    Vocabulary,
    VocabularyLoss,
)


def sharding_plan(shape: ModelShape, vocab_multiple: int = 1) -> dict[str, Style]:
    """Style of every module of the model that `build(shape)` makes.

    Args:
        vocab_multiple: every rank's share of the vocabulary is padded to a multiple of this.
    """
    return {**_common(shape, vocab_multiple), **(_gpt() if shape.family == "gpt" else _llama(shape))}


def _common(shape: ModelShape, multiple: int) -> dict[str, Style]:
    d = shape.head_dim
    return {
        "embed.tok": Vocabulary(multiple),
        "blocks.*.norm1": Replicate(),
        "blocks.*.attn": Heads(),
        "blocks.*.attn.qkv": Column(segments=((shape.heads, d), (shape.kv_heads, d), (shape.kv_heads, d))),
        "blocks.*.attn.core.drop": SplitDropout(dim=1),
        "blocks.*.attn.proj": Row(),
        "blocks.*.norm2": Replicate(),
        "blocks.*.mlp.down": Row(),
        "head.norm": Replicate(),
        "head.out": Vocabulary(multiple),
        "loss": VocabularyLoss(shape.vocab, multiple),
    }


def _gpt() -> dict[str, Style]:
    return {"embed.pos": Replicate(), "blocks.*.mlp.up": Column()}


def _llama(shape: ModelShape) -> dict[str, Style]:
    return {"blocks.*.mlp.gate_up": Column(segments=((shape.ffn, 1), (shape.ffn, 1)))}
