"""Small shapes that between them have every feature of both families."""

from __future__ import annotations

from stretto.job.attention import AttentionShape, LatentShape
from stretto.job.experts import ExpertShape
from stretto.job.shape import ModelShape

SHAPES = {
    "gpt": ModelShape(family="gpt", layers=2, hidden=32, heads=4, vocab=67, sequence=24),
    "gpt-untied": ModelShape(
        family="gpt", layers=3, hidden=24, heads=2, ffn=40, vocab=50, sequence=16, tied=False, norm_eps=1e-6
    ),
    "gpt-plain": ModelShape(family="gpt", layers=2, hidden=32, heads=4, vocab=67, sequence=24, bias=False),
    "llama": ModelShape(family="llama", layers=2, hidden=32, heads=4, ffn=72, vocab=67, sequence=24),
    "llama-grouped": ModelShape(
        family="llama",
        layers=2,
        hidden=64,
        heads=8,
        kv_heads=2,
        ffn=96,
        vocab=51,
        sequence=24,
        norm_eps=1e-6,
        rope_theta=500000.0,
    ),
    "llama-one-kv-head": ModelShape(
        family="llama",
        layers=1,
        hidden=48,
        heads=6,
        kv_heads=1,
        head_dim=10,
        ffn=64,
        vocab=40,
        sequence=24,
        tied=True,
        bias=True,
    ),
}

# and of experts: scores, capacity, shared experts, widths, biases
EXPERTS = {
    "mixtral": ModelShape(
        family="llama",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        ffn=40,
        vocab=67,
        sequence=24,
        moe=ExpertShape(experts=4, balance=0.02),
    ),
    "llama-experts": ModelShape(
        family="llama",
        layers=2,
        hidden=32,
        heads=4,
        vocab=51,
        sequence=24,
        bias=True,
        moe=ExpertShape(experts=5, top_k=3, ffn=12, shared_ffn=28, score="sigmoid", z=1e-3, normalise=False),
    ),
    "gpt-experts": ModelShape(
        family="gpt",
        layers=2,
        hidden=32,
        heads=4,
        vocab=67,
        sequence=24,
        moe=ExpertShape(experts=3, top_k=1, shared_ffn=16, z=1e-3, normalise=False),
    ),
    "gpt-capacity": ModelShape(
        family="gpt",
        layers=1,
        hidden=24,
        heads=2,
        ffn=20,
        vocab=50,
        sequence=24,
        bias=False,
        moe=ExpertShape(experts=4, score="sigmoid", capacity=0.5, drop="position"),
    ),
}

# and what the families of published models add to them
ROUTERS = {
    "deepseek-v3": ModelShape(
        family="deepseek_v3",
        layers=3,
        hidden=32,
        heads=4,
        head_dim=10,
        ffn=40,
        vocab=51,
        sequence=24,
        attention=AttentionShape(
            latent=LatentShape(kv_rank=6, rope_dim=4, value_dim=5, q_rank=9), interleaved=True
        ),
        moe=ExpertShape(
            experts=8,
            ffn=12,
            shared_ffn=16,
            score="sigmoid",
            correction=True,
            groups=4,
            top_groups=2,
            group_score="top2",
            scale=2.5,
            dense_layers=1,
            top_k=3,
        ),
    ),
    "qwen2-moe": ModelShape(
        family="qwen2_moe",
        layers=2,
        hidden=32,
        heads=4,
        ffn=40,
        vocab=51,
        sequence=24,
        moe=ExpertShape(experts=4, ffn=12, shared_ffn=16, shared_gate=True, normalise=False, every=2),
    ),
    "gpt-oss": ModelShape(
        family="gpt_oss",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=6,
        ffn=12,
        vocab=51,
        sequence=24,
        attention=AttentionShape(sinks=True, window=5, full_every=2),
        moe=ExpertShape(experts=4, router_bias=True),
    ),
}
