"""The sharding plans of the language models: within layers (Shoeybi et al. 2019, section 3), along the
sequence (Korthikanti et al. 2022, section 4.2.2), and by experts.
"""

from __future__ import annotations

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
from stretto.spec.job import Job
from stretto.spec.shape import ModelShape


def sharding_plan(job: Job) -> dict[str, Style]:
    """Style of every module of the model that `build(job.shape)` makes, on the job's layout."""
    shape = job.shape
    return {
        **_common(job),
        **(_gpt(job) if shape.family == "gpt" else _llama(job)),
        **(_mlp(job) if shape.moe is None else _experts(job)),
    }


def _sequence_parallel(job: Job) -> bool:
    """Whether norms, dropout and residual stream are split along the sequence over tp."""
    return job.sequence_parallel and job.layout.tp > 1


def _common(job: Job) -> dict[str, Style]:
    shape = job.shape
    d = shape.head_dim
    multiple = job.vocab_multiple
    sp = _sequence_parallel(job)
    fused = ((shape.heads, d), (shape.kv_heads, d), (shape.kv_heads, d))
    return {
        "embed.tok": Vocabulary(multiple, sequence=sp),
        "blocks.*.norm1": Replicate(sequence=sp),
        "blocks.*.attn": Heads(),
        "blocks.*.attn.qkv": Column(segments=fused, sequence=sp),
        "blocks.*.attn.core": ContextAttention(job.context, job.sequence),
        "blocks.*.attn.core.drop": SplitDropout(heads=(1, shape.heads)),
        "blocks.*.attn.proj": Row(sequence=sp),
        "blocks.*.norm2": Replicate(sequence=sp),
        "head.norm": Replicate(sequence=sp),
        "head.out": Vocabulary(multiple, sequence=sp),
        "loss": VocabularyLoss(shape.vocab, multiple),
    }


def _gpt(job: Job) -> dict[str, Style]:
    sp = _sequence_parallel(job)
    along = SplitDropout(sequence=(1, job.sequence, sp))
    return {
        "embed": Positions(job.sequence, sequence=sp, sharded=True),
        "embed.pos": Replicate(sequence=sp),
        "embed.drop": along,
        "blocks.*.attn.drop": along,
        "blocks.*.mlp.drop": along,
    }


def _llama(job: Job) -> dict[str, Style]:
    return {"blocks.*.attn.rotary": Positions(job.sequence, _sequence_parallel(job))}


def _mlp(job: Job) -> dict[str, Style]:
    return _linears("blocks.*.mlp", job.shape, job.shape.ffn, _sequence_parallel(job))


def _experts(job: Job) -> dict[str, Style]:
    shape, sp = job.shape, _sequence_parallel(job)
    moe = shape.moe
    assert moe is not None
    return {
        "blocks.*.mlp": ExpertParallel(job.sequence, sequence=sp),
        "blocks.*.mlp.router": Replicate(sequence=True),  # tp ranks route different tokens
        "blocks.*.mlp.experts": ExpertWeights(job.layout.size("expert_tp")),
        **(_linears("blocks.*.mlp.shared", shape, moe.shared_ffn, sp) if moe.shared_ffn else {}),
    }


def _linears(mlp: str, shape: ModelShape, width: int, sp: bool) -> dict[str, Style]:
    """The two linears of an MLP of that inner width; between them, tokens may be in any order."""
    first: dict[str, Style] = (
        {f"{mlp}.gate_up": Column(segments=((width, 1), (width, 1)), sequence=sp, ordered=False)}
        if shape.gated
        else {f"{mlp}.up": Column(sequence=sp, ordered=False)}
    )
    return {**first, f"{mlp}.down": Row(sequence=sp, ordered=False)}
