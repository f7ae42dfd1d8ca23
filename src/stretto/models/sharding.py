"""How the language models here are split over ranks: inside of layers (Shoeybi et al. 2019, section 3), along
the sequence (Korthikanti et al. 2022, section 4.2.2), and by experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.cost.shape import ModelShape
from stretto.parallel.styles import (
    Column,
    Heads,
    Positions,
    Replicate,
    Row,
    SplitDropout,
    Style,
    Vocabulary,
    VocabularyLoss,
)


@dataclass(frozen=True)
class Splitting:
    """What the plan depends on beside the model.

    sequence: tokens of a sample; None: the model's positions.
    sequence_parallel: norms, dropout and residual stream split along the sequence over tp.
    context: how cp ranks attend to each other's tokens, "ring" or "ulysses".
    vocab_multiple: every rank's share of the vocabulary is padded to a multiple of this.
    """

    sequence: int | None = None
    sequence_parallel: bool = False
    context: str = "ring"
    vocab_multiple: int = 1


def sharding_plan(shape: ModelShape, how: Splitting | None = None) -> dict[str, Style]:
    """Style of every module of the model that `build(shape)` makes."""
    how = how or Splitting()
    return {**_common(shape, how), **(_gpt(shape, how) if shape.family == "gpt" else _llama(shape, how))}


def _common(shape: ModelShape, how: Splitting) -> dict[str, Style]:
    d, multiple, sp = shape.head_dim, how.vocab_multiple, how.sequence_parallel
    fused = ((shape.heads, d), (shape.kv_heads, d), (shape.kv_heads, d))
    return {
        "embed.tok": Vocabulary(multiple, sequence=sp),
        "blocks.*.norm1": Replicate(sequence=sp),
        "blocks.*.attn": Heads(),
        "blocks.*.attn.qkv": Column(segments=fused, sequence=sp),
        "blocks.*.attn.core.drop": SplitDropout(heads=(1, shape.heads)),
        "blocks.*.attn.proj": Row(sequence=sp),
        "blocks.*.norm2": Replicate(sequence=sp),
        "blocks.*.mlp.down": Row(sequence=sp),
        "head.norm": Replicate(sequence=sp),
        "head.out": Vocabulary(multiple, sequence=sp),
        "loss": VocabularyLoss(shape.vocab, multiple),
    }


def _gpt(shape: ModelShape, how: Splitting) -> dict[str, Style]:
    sp, length = how.sequence_parallel, how.sequence or shape.sequence
    along = SplitDropout(sequence=(1, length, sp))
    return {
        "embed": Positions(length, sharded=sp),
        "embed.pos": Replicate(sequence=sp),
        "embed.drop": along,
        "blocks.*.attn.drop": along,
        "blocks.*.mlp.up": Column(sequence=sp),
        "blocks.*.mlp.drop": along,
    }


def _llama(shape: ModelShape, how: Splitting) -> dict[str, Style]:
    sp = how.sequence_parallel
    return {
        "blocks.*.attn.rotary": Positions(how.sequence or shape.sequence),
        "blocks.*.mlp.gate_up": Column(segments=((shape.ffn, 1), (shape.ffn, 1)), sequence=sp),
    }
