"""How the language models here are split over ranks: inside of layers (Shoeybi et al. 2019, section 3), along
the sequence (Korthikanti et al. 2022, section 4.2.2), and by experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.engine.parallel.context.style import ContextAttention
from stretto.engine.parallel.expert.experts import ExpertParallel, ExpertWeights
from stretto.engine.parallel.styles import (
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
from stretto.spec.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Splitting:
    """What the plan depends on beside the model.

    sequence: tokens of a sample; None: the model's positions.
    sequence_parallel: norms, dropout and residual stream split along the sequence over tp.
    context: how cp ranks attend to each other's tokens, "ring" or "ulysses".
    vocab_multiple: every rank's share of the vocabulary is padded to a multiple of this.
    expert_tp: ranks that share each expert.
    """

    sequence: int | None = None
    sequence_parallel: bool = False
    context: str = "ring"
    vocab_multiple: int = 1
    expert_tp: int = 1


def sharding_plan(shape: ModelShape, how: Splitting | None = None) -> dict[str, Style]:
    """Style of every module of the model that `build(shape)` makes."""
    how = how or Splitting()
    family = _gpt(shape, how) if shape.family == "gpt" else _llama(shape, how)
    return {
        **_common(shape, how),
        **family,
        **(_mlp(shape, how) if shape.moe is None else _experts(shape, how)),
    }


def _common(shape: ModelShape, how: Splitting) -> dict[str, Style]:
    d = shape.head_dim
    multiple = how.vocab_multiple
    sp = how.sequence_parallel
    length = how.sequence or shape.sequence
    fused = ((shape.heads, d), (shape.kv_heads, d), (shape.kv_heads, d))
    return {
        "embed.tok": Vocabulary(multiple, sequence=sp),
        "blocks.*.norm1": Replicate(sequence=sp),
        "blocks.*.attn": Heads(),
        "blocks.*.attn.qkv": Column(segments=fused, sequence=sp),
        "blocks.*.attn.core": ContextAttention(how.context, length),
        "blocks.*.attn.core.drop": SplitDropout(heads=(1, shape.heads)),
        "blocks.*.attn.proj": Row(sequence=sp),
        "blocks.*.norm2": Replicate(sequence=sp),
        "head.norm": Replicate(sequence=sp),
        "head.out": Vocabulary(multiple, sequence=sp),
        "loss": VocabularyLoss(shape.vocab, multiple),
    }


def _gpt(shape: ModelShape, how: Splitting) -> dict[str, Style]:
    sp, length = how.sequence_parallel, how.sequence or shape.sequence
    along = SplitDropout(sequence=(1, length, sp))
    return {
        "embed": Positions(length, sequence=sp, sharded=True),
        "embed.pos": Replicate(sequence=sp),
        "embed.drop": along,
        "blocks.*.attn.drop": along,
        "blocks.*.mlp.drop": along,
    }


def _llama(shape: ModelShape, how: Splitting) -> dict[str, Style]:
    return {"blocks.*.attn.rotary": Positions(how.sequence or shape.sequence, how.sequence_parallel)}


def _mlp(shape: ModelShape, how: Splitting) -> dict[str, Style]:
    return _linears("blocks.*.mlp", shape, shape.ffn, how.sequence_parallel)


def _experts(shape: ModelShape, how: Splitting) -> dict[str, Style]:
    moe, sp = shape.moe, how.sequence_parallel
    assert moe is not None
    return {
        "blocks.*.mlp": ExpertParallel(how.sequence or shape.sequence, sequence=sp),
        "blocks.*.mlp.router": Replicate(sequence=True),  # tp ranks route different tokens
        "blocks.*.mlp.experts": ExpertWeights(how.expert_tp),
        **(_linears("blocks.*.mlp.shared", shape, moe.shared_ffn, sp) if moe.shared_ffn else {}),
    }


def _linears(mlp: str, shape: ModelShape, width: int, sp: bool) -> dict[str, Style]:
    """The two linears of an MLP of that inner width; nothing between them minds the order of tokens."""
    first: dict[str, Style] = (
        {f"{mlp}.gate_up": Column(segments=((width, 1), (width, 1)), sequence=sp, ordered=False)}
        if shape.gated
        else {f"{mlp}.up": Column(sequence=sp, ordered=False)}
    )
    return {**first, f"{mlp}.down": Row(sequence=sp, ordered=False)}
