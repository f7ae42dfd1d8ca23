"""The sharding plans of the language models: within layers (Shoeybi et al. 2019, section 3), along the
sequence (Korthikanti et al. 2022, section 4.2.2), and by experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stretto.engine.parallel.adapters import adapter_styles
from stretto.engine.parallel.context.style import ContextAttention
from stretto.engine.parallel.expert.experts import ExpertParallel, ExpertWeights
from stretto.engine.parallel.styles import (
    ColumnParallel,
    HeadParallel,
    ParallelStyle,
    Replicate,
    ReplicatedLinear,
    RowParallel,
    ShardedPositions,
    SharedInput,
    SplitDropout,
    VocabParallel,
    VocabParallelLoss,
)
from stretto.job.attention import LatentShape
from stretto.job.experts import ExpertShape
from stretto.job.job import Job
from stretto.job.lora import PROJECTIONS, LoraShape
from stretto.job.parameters import block_shapes
from stretto.job.shape import ModelShape


def sharding_plan(job: Job) -> dict[str, ParallelStyle]:
    """Return the style of every module of the model `build(job.shape)`, for the job's layout."""
    shape, sp = job.shape, _sequence_parallel(job)
    multiple = job.vocab_multiple
    plan: dict[str, ParallelStyle] = {
        "embed.tok": VocabParallel(multiple, sequence=sp),
        "head.out": VocabParallel(multiple, sequence=sp),
        "loss": VocabParallelLoss(shape.vocab, multiple),
        "embed.drop": _dropout(job),
    }
    if shape.last_norm:
        plan["head.norm"] = Replicate(sequence=sp)
    plan |= _embedding("embed", job)
    if shape.encoder_layers:
        decoder = replace(job, sequence=job.target_sequence)
        plan["decoder_embed.tok"] = VocabParallel(multiple, sequence=sp)
        plan["decoder_embed.drop"] = _dropout(decoder)
        plan |= _embedding("decoder_embed", decoder)
        if shape.last_norm:
            plan["decoder_embed.memory_norm"] = Replicate(sequence=sp)
        return plan | _stack("encoder", job, shape.encoder_stack) | _stack("blocks", decoder, shape)
    return plan | _stack("blocks", job, shape)


def _embedding(name: str, job: Job) -> dict[str, ParallelStyle]:
    """Return the styles of learned positions and of the embedding norm."""
    shape, sp = job.shape, _sequence_parallel(job)
    styles: dict[str, ParallelStyle] = (
        {f"{name}.norm": Replicate(sequence=sp)} if shape.embedding_norm else {}
    )
    if shape.learned:
        styles[name] = ShardedPositions(job.sequence, sequence=sp, sharded=True)
        styles[f"{name}.pos"] = Replicate(sequence=sp)
    return styles


def _stack(name: str, job: Job, stack: ModelShape) -> dict[str, ParallelStyle]:
    """Return the styles of the blocks of a stack, for samples of `job.sequence` tokens."""
    if len(stack.kinds()) == 1:
        return _block(f"{name}.*", job, stack.block(0))
    plan = dict[str, ParallelStyle]()
    for i in range(stack.layers):
        plan |= _block(f"{name}.{i}", job, stack.block(i))
    return plan


def _sequence_parallel(job: Job) -> bool:
    """True if norms, dropout and residual stream are split along the sequence over tp."""
    return job.sequence_parallel and job.layout.tp > 1


def _dropout(job: Job) -> ParallelStyle:
    """Return the style of dropout of the residual stream."""
    return SplitDropout(sequence=(1, job.sequence, _sequence_parallel(job)))


def _block(name: str, job: Job, shape: ModelShape) -> dict[str, ParallelStyle]:
    """Return the styles of the blocks that match `name`, all of one shape."""
    norms = ["norm1", "norm2"]
    if shape.block_norms == "sandwich":
        norms += ["norm1_post", "norm2_post"]
    parts = {
        **{norm: Replicate(sequence=_sequence_parallel(job)) for norm in norms},
        **(_attention(job, shape) if shape.latent is None else _latent(job, shape, shape.latent)),
        **(_cross(job, shape) if shape.encoder_layers else {}),
        "mlp.drop": _dropout(job),
        **(
            _linears("mlp", shape, shape.ffn, _sequence_parallel(job))
            if shape.moe is None
            else _experts(job, shape, shape.moe)
        ),
    }
    if shape.lora is not None:
        parts |= _adapters(parts, job, shape, shape.lora)
    return {f"{name}.{part}": style for part, style in parts.items()}


def _adapters(
    parts: Mapping[str, ParallelStyle], job: Job, shape: ModelShape, lora: LoraShape
) -> dict[str, ParallelStyle]:
    """Return the styles of the split, adapted linears of a block, and of their adapters."""
    styles, sizes = dict[str, ParallelStyle](), block_shapes(shape)
    for name, style in parts.items():
        if isinstance(style, ColumnParallel | RowParallel) and (adapted := lora.adapted(name)):
            inside = adapter_styles(
                style,
                projections=PROJECTIONS[name],
                adapted=adapted,
                columns=sizes[f"{name}.weight"][1],
                tokens=(1, job.sequence, style.sequence),
            )
            styles |= {f"{name}.{part}".rstrip("."): inner for part, inner in inside.items()}
    return styles


def _attention(job: Job, shape: ModelShape) -> dict[str, ParallelStyle]:
    d, sp = shape.head_dim, _sequence_parallel(job)
    fused = ((shape.heads, d), (shape.kv_heads, d), (shape.kv_heads, d))
    styles = {**_heads("attn", job, shape), "attn.qkv": ColumnParallel(segments=fused, sequence=sp)}
    if shape.attention.norm is not None:  # they see only local heads, so their gradients are summed
        styles |= dict.fromkeys(("attn.q_norm", "attn.k_norm"), Replicate(sequence=True))
    if shape.rotary:
        styles["attn.rotary"] = ShardedPositions(job.sequence, sp)
    return styles


def _cross(job: Job, shape: ModelShape) -> dict[str, ParallelStyle]:
    """Return the styles of cross-attention; sequence parallelism splits the encoder's tokens like the
    decoder's.
    """
    d, sp = shape.head_dim, _sequence_parallel(job)
    return {
        "norm_cross": Replicate(sequence=sp),
        "cross.q": ColumnParallel(segments=((shape.heads, d),), sequence=sp),
        "cross.kv": ColumnParallel(segments=((shape.kv_heads, d), (shape.kv_heads, d)), sequence=sp),
        **_heads("cross", job, shape),
    }


def _heads(name: str, job: Job, shape: ModelShape) -> dict[str, ParallelStyle]:
    """Return the styles of softmax(q k^T) v, split by heads, and of the modules after it."""
    plain = name == "attn" and shape.attention.causal and not shape.relative
    return {
        name: HeadParallel(),
        **({f"{name}.core": ContextAttention(job.context, job.sequence)} if plain else {}),
        f"{name}.core.drop": SplitDropout(heads=(1, shape.heads)),
        f"{name}.proj": RowParallel(sequence=_sequence_parallel(job)),
        f"{name}.drop": _dropout(job),
    }


def _latent(job: Job, shape: ModelShape, latent: LatentShape) -> dict[str, ParallelStyle]:
    """Return the styles of latent attention; the linears to narrow vectors are replicated.

    Under sequence parallelism each rank computes the narrow vectors of its own tokens, which are gathered for
    the linears to heads: fewer bytes than the tokens themselves, and no redundant products.
    """
    sp = _sequence_parallel(job)
    rows = shape.head_dim - latent.rope_dim + latent.value_dim
    narrow = ["attn.kv_down"] if latent.q_rank is None else ["attn.kv_down", "attn.q_down"]
    queries = "attn.q" if latent.q_rank is None else "attn.q_up"
    return {
        **_heads("attn", job, shape),
        **{name: ReplicatedLinear(sequence=sp) for name in narrow},
        **{f"{name}_norm": Replicate(sequence=sp) for name in narrow},
        queries: ColumnParallel(segments=((shape.heads, shape.head_dim),), sequence=sp),
        "attn.kv_up": ColumnParallel(segments=((shape.heads, rows),), sequence=sp),
        "attn.shared_key": SharedInput(sequence=sp),
        "attn.rotary": ShardedPositions(job.sequence, sp),
    }


def _experts(job: Job, shape: ModelShape, moe: ExpertShape) -> dict[str, ParallelStyle]:
    sp = _sequence_parallel(job)
    return {
        "mlp": ExpertParallel(job.sequence, sequence=sp),
        "mlp.router": Replicate(sequence=True),  # tp ranks route different tokens
        "mlp.experts": ExpertWeights(job.layout.size("expert_tp")),
        **(_linears("mlp.shared", shape, moe.shared_ffn, sp) if moe.shared_ffn else {}),
        **({"mlp.shared_gate": Replicate(sequence=sp)} if moe.shared_ffn and moe.shared_gate else {}),
    }


def _linears(mlp: str, shape: ModelShape, width: int, sp: bool) -> dict[str, ParallelStyle]:
    """Return the styles of the two linears of an MLP of this inner width.

    Between them tokens may be in any order, unless adapters draw dropout masks.
    """
    ordered = shape.lora is not None and shape.lora.dropout > 0.0
    first: dict[str, ParallelStyle] = (
        {f"{mlp}.gate_up": ColumnParallel(segments=((width, 1), (width, 1)), sequence=sp, ordered=ordered)}
        if shape.gated
        else {f"{mlp}.up": ColumnParallel(sequence=sp, ordered=ordered)}
    )
    return {**first, f"{mlp}.down": RowParallel(sequence=sp, ordered=ordered)}
