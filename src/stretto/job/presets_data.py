"""The published sizes behind the names of `presets`, family by family.

Sources: GPT-2, Radford et al. 2019, table 2; GPT-3, Brown et al. 2020, table 2.1, and NeMo's recipes;
Megatron, Narayanan et al. 2021, table 1; Korthikanti et al. 2022, table 3; MPT, the pretraining files of
llm-foundry; Llama, Touvron et al. 2023; Llama 3, Grattafiori et al. 2024, table 3; Mixtral, Jiang et al.
2024; T5, Raffel et al. 2020, section 3.7, and t5x for version 1.1; BART, Lewis et al. 2020; Gemma 2, arXiv
2408.00118, table 1; Gemma 3, arXiv 2503.19786, table 1; Nemotron, NeMo's recipes; and the published
`config.json` of all models.

Dropout is 0 in all. `sequence` is the context length of the published model; if it was extended after
pretraining, `rope` has the original one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.families import Family
from stretto.job.shape import ModelShape

SOURCES = "the model's report and its published config.json, or NeMo's recipes; see stretto.job.presets_data"
Maker = Callable[[], ModelShape]
TABLE: dict[str, Maker] = {}
HYBRID = "blocks of Mamba between those of attention"
OUT_OF_SCOPE = {"nemotronh-8b": HYBRID, "nemotronh-47b": HYBRID, "nemotronh-56b": HYBRID}


def _rows(make: Callable[..., ModelShape], columns: str, rows: dict[str, tuple[Any, ...]]) -> None:
    """Add a model to the table for each row, whose sizes are named by `columns`."""
    names = columns.split()
    for model, row in rows.items():
        TABLE[model] = partial(make, **dict(zip(names, row, strict=True)))


_gpt = partial(ModelShape, family="gpt")
_rows(
    partial(_gpt, vocab=50257),
    "layers hidden heads sequence",
    {
        "gpt2": (12, 768, 12, 1024),
        "gpt2-medium": (24, 1024, 16, 1024),
        "gpt2-large": (36, 1280, 20, 1024),
        "gpt2-xl": (48, 1600, 25, 1024),
        "gpt3-5b": (24, 4096, 32, 2048),
        "gpt3-20b": (44, 6144, 48, 2048),
        "gpt3-40b": (48, 8192, 64, 2048),
        "gpt3-175b": (96, 12288, 96, 2048),
    },
)
_rows(
    partial(_gpt, vocab=50368, sequence=2048),
    "layers hidden heads",
    {
        "mpt-125m": (12, 768, 12),
        "mpt-350m": (24, 1024, 16),
        "mpt-760m": (24, 1536, 12),
        "mpt-1b": (24, 2048, 16),
        "mpt-3b": (32, 2560, 20),
        "mpt-7b": (32, 4096, 32),
        "mpt-13b": (40, 5120, 40),
        "mpt-30b": (48, 7168, 56),
        "mpt-70b": (80, 8192, 64),
    },
)
_rows(
    partial(_gpt, vocab=51200, sequence=2048),
    "layers hidden heads",
    {
        "megatron-1.7b": (24, 2304, 24),
        "megatron-3.6b": (30, 3072, 32),
        "megatron-7.5b": (36, 4096, 32),
        "megatron-18.4b": (40, 6144, 48),
        "megatron-39.1b": (48, 8192, 64),
        "megatron-76.1b": (60, 10240, 80),
        "megatron-145.6b": (80, 12288, 96),
        "megatron-310.1b": (96, 16384, 128),
        "megatron-529.6b": (105, 20480, 128),
        "megatron-1008.0b": (128, 25600, 160),
        "korthikanti-22b": (48, 6144, 64),
        "korthikanti-175b": (96, 12288, 96),
        "korthikanti-530b": (105, 20480, 128),
        "korthikanti-1000b": (128, 25600, 160),
    },
)


_SIZES = "layers hidden heads kv_heads ffn"
_llama = partial(ModelShape, family="llama")
_rows(
    partial(_llama, vocab=32000, sequence=2048, norm_eps=1e-6),
    _SIZES,
    {
        "llama1-7b": (32, 4096, 32, 32, 11008),
        "llama1-13b": (40, 5120, 40, 40, 13824),
        "llama1-33b": (60, 6656, 52, 52, 17920),
        "llama1-65b": (80, 8192, 64, 64, 22016),
    },
)
_rows(
    partial(_llama, vocab=32000, sequence=4096),
    _SIZES,
    {
        "llama2-7b": (32, 4096, 32, 32, 11008),
        "llama2-13b": (40, 5120, 40, 40, 13824),
        "llama2-70b": (80, 8192, 64, 8, 28672),
    },
)
_llama3 = partial(_llama, vocab=128256, rope_theta=500000.0)
_rows(
    partial(_llama3, sequence=8192),
    _SIZES,
    {"llama3-8b": (32, 4096, 32, 8, 14336), "llama3-70b": (80, 8192, 64, 8, 28672)},
)
_LLAMA3_ROPE = RopeScaling(type="llama3", factor=8.0, original_positions=8192)
_rows(
    partial(_llama3, sequence=131072, rope=_LLAMA3_ROPE),
    _SIZES,
    {
        "llama3.1-8b": (32, 4096, 32, 8, 14336),
        "llama3.1-70b": (80, 8192, 64, 8, 28672),
        "llama3.1-405b": (126, 16384, 128, 8, 53248),
    },
)
_rows(
    partial(
        _llama3,
        sequence=131072,
        rope=RopeScaling(type="llama3", factor=32.0, original_positions=8192),
        tied=True,
    ),
    _SIZES,
    {"llama3.2-1b": (16, 2048, 32, 8, 8192), "llama3.2-3b": (28, 3072, 24, 8, 8192)},
)
_mistral = partial(ModelShape, family="mistral")
TABLE["mistral-7b"] = partial(
    _mistral,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32000,
    sequence=32768,
    attention=AttentionShape(window=4096),
)
_rows(
    partial(_mistral, head_dim=128),
    f"{_SIZES} vocab sequence rope_theta",
    {
        "mistral-nemo-12b": (40, 5120, 32, 8, 14336, 131072, 131072, 1e6),
        "mistral-small-24b": (40, 5120, 32, 8, 32768, 131072, 32768, 1e8),
        "mistral-large-123b": (88, 12288, 96, 8, 28672, 32768, 131072, 1e6),
    },
)
TABLE["smollm3-3b"] = partial(
    _llama,
    layers=36,
    hidden=2048,
    heads=16,
    kv_heads=4,
    ffn=11008,
    vocab=128256,
    sequence=4096,
    rope_theta=50000.0,
    tied=True,
    norm_eps=1e-6,
    unmodelled_features=("every fourth block without positions",),
)


def _mixtral(*, balance: float, **sizes: Any) -> ModelShape:
    moe = ExpertShape(experts=8, top_k=2, balance=balance)
    return ModelShape(family="mixtral", **sizes, kv_heads=8, vocab=32000, rope_theta=1e6, moe=moe)


_rows(
    _mixtral,
    "layers hidden heads ffn sequence balance",
    {
        "mixtral-8x7b": (32, 4096, 32, 14336, 32768, 0.02),
        "mixtral-8x22b": (56, 6144, 48, 16384, 65536, 0.001),
    },
)
_rows(
    partial(
        _llama,
        vocab=100352,
        sequence=4096,
        rope_theta=500000.0,
        norm_eps=1e-6,
        attention=AttentionShape(norm="all"),
        unmodelled_features=("norms after each half of a block",),
    ),
    _SIZES,
    {"olmo2-7b": (32, 4096, 32, 32, 11008), "olmo2-13b": (40, 5120, 40, 40, 13824)},
)
_rows(
    partial(ModelShape, family="qwen2", sequence=32768, rope_theta=1e6, norm_eps=1e-6),
    f"{_SIZES} vocab tied",
    {
        "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151936, True),
        "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151936, True),
        "qwen2.5-3b": (36, 2048, 16, 2, 11008, 151936, True),
        "qwen2.5-7b": (28, 3584, 28, 4, 18944, 152064, False),
        "qwen2.5-14b": (48, 5120, 40, 8, 13824, 152064, False),
        "qwen2.5-32b": (64, 5120, 40, 8, 27648, 152064, False),
        "qwen2.5-72b": (80, 8192, 64, 8, 29568, 152064, False),
    },
)
_qwen2_experts = partial(ExpertShape, normalise=False, shared_gate=True, balance=0.001)
_rows(
    partial(ModelShape, family="qwen2_moe", vocab=151936, rope_theta=1e6, norm_eps=1e-6),
    f"{_SIZES} sequence moe",
    {
        "qwen1.5-moe-a2.7b": (
            24,
            2048,
            16,
            16,
            5632,
            8192,
            _qwen2_experts(experts=60, top_k=4, ffn=1408, shared_ffn=5632),
        ),
        "qwen2-57b-a14b": (
            28,
            3584,
            28,
            4,
            18944,
            32768,
            _qwen2_experts(experts=64, top_k=8, ffn=2560, shared_ffn=20480),
        ),
    },
)
_QWEN3: dict[str, Any] = {
    "vocab": 151936,
    "sequence": 40960,
    "rope_theta": 1e6,
    "head_dim": 128,
    "norm_eps": 1e-6,
}
_rows(
    partial(ModelShape, family="qwen3", **_QWEN3),
    f"{_SIZES} tied",
    {
        "qwen3-0.6b": (28, 1024, 16, 8, 3072, True),
        "qwen3-1.7b": (28, 2048, 16, 8, 6144, True),
        "qwen3-4b": (36, 2560, 32, 8, 9728, True),
        "qwen3-8b": (36, 4096, 32, 8, 12288, False),
        "qwen3-14b": (40, 5120, 40, 8, 17408, False),
        "qwen3-32b": (64, 5120, 64, 8, 25600, False),
    },
)
_qwen3_experts = partial(ExpertShape, experts=128, top_k=8, balance=0.001)
_rows(
    partial(ModelShape, family="qwen3_moe", **_QWEN3),
    f"{_SIZES} moe",
    {
        "qwen3-30b-a3b": (48, 2048, 32, 4, 6144, _qwen3_experts(ffn=768)),
        "qwen3-235b-a22b": (94, 4096, 64, 4, 12288, _qwen3_experts(ffn=1536)),
    },
)


def _gemma2(*, query_scale: float, **sizes: Any) -> ModelShape:
    attention = AttentionShape(softcap=50.0, window=4096, full_every=2, query_scale=query_scale)
    return ModelShape(
        family="gemma2", **sizes, vocab=256000, sequence=8192, norm_eps=1e-6, attention=attention
    )


_rows(
    _gemma2,
    f"{_SIZES} head_dim query_scale",
    {
        "gemma2-2b": (26, 2304, 8, 4, 9216, 256, 256.0),
        "gemma2-9b": (42, 3584, 16, 8, 14336, 256, 256.0),
        "gemma2-27b": (46, 4608, 32, 16, 36864, 128, 144.0),
    },
)


def _gemma3(*, window: int, query_scale: float, **sizes: Any) -> ModelShape:
    """Return the language model; positions of the larger ones were extended from 16384 after pretraining."""
    stretched = RopeScaling(type="linear", factor=8.0) if sizes["sequence"] > 32768 else None
    attention = AttentionShape(
        norm="head", window=window, full_every=6, local_theta=10000.0, query_scale=query_scale
    )
    return ModelShape(
        family="gemma3", **sizes, rope_theta=1e6, rope=stretched, norm_eps=1e-6, attention=attention
    )


_rows(
    _gemma3,
    f"{_SIZES} head_dim query_scale window vocab sequence",
    {
        "gemma3-1b": (26, 1152, 4, 1, 6912, 256, 256.0, 512, 262144, 32768),
        "gemma3-4b": (34, 2560, 8, 4, 10240, 256, 256.0, 1024, 262208, 131072),
        "gemma3-12b": (48, 3840, 16, 8, 15360, 256, 256.0, 1024, 262208, 131072),
        "gemma3-27b": (62, 5376, 32, 16, 21504, 128, 168.0, 1024, 262208, 131072),
    },
)


def _nemotron(layers: int, hidden: int, heads: int, kv_heads: int) -> ModelShape:
    """Return a model with squared relu, no gate, layer norms with biases and half of each head rotated."""
    return ModelShape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=4 * hidden,
        vocab=256000,
        sequence=4096,
        mlp="relu2",
        norm="layer",
        unmodelled_features=("rotary positions on half of a head",),
    )


def _falcon() -> ModelShape:
    return ModelShape(
        family="llama",
        layers=80,
        hidden=14848,
        heads=232,
        kv_heads=8,
        ffn=4 * 14848,
        vocab=65024,
        sequence=2048,
        mlp="gelu",
        norm="layer",
        unmodelled_features=("attention parallel to the MLP",),
    )


def _neox() -> ModelShape:
    return ModelShape(
        family="llama",
        layers=44,
        hidden=6144,
        heads=64,
        ffn=24576,
        vocab=50432,
        sequence=2048,
        bias=True,
        mlp="gelu",
        norm="layer",
        unmodelled_features=("attention parallel to the MLP", "rotary positions on a quarter of a head"),
    )


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    return ModelShape(
        family="gpt_oss",
        layers=layers,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201088,
        sequence=131072,
        rope_theta=150000.0,
        rope=RopeScaling(type="yarn", factor=32.0, original_positions=4096, truncate=False),
        moe=ExpertShape(experts=experts, top_k=4, router_bias=True),
    )


def _llama4(experts: int, every: int) -> ModelShape:
    """Return the language model of Llama 4. Three of four blocks attend within chunks of 8192 positions,
    modelled as a window of 8192: for longer sequences, chunks attend to half as many positions on average.
    """
    moe = ExpertShape(
        experts=experts, top_k=1, ffn=8192, shared_ffn=8192, score="sigmoid", normalise=False, every=every
    )
    return ModelShape(
        family="llama",
        layers=48,
        hidden=5120,
        heads=40,
        kv_heads=8,
        head_dim=128,
        ffn=16384,
        vocab=202048,
        sequence=8192,
        rope_theta=500000.0,
        moe=moe,
        attention=AttentionShape(window=8192, full_every=4),
        unmodelled_features=("every fourth block without positions", "weights of experts on their inputs"),
    )


def _deepseek(
    *,
    family: Family,
    moe: ExpertShape,
    q_rank: int | None,
    mscale: float,
    **sizes: Any,
) -> ModelShape:
    latent = LatentShape(kv_rank=512, rope_dim=64, value_dim=128, q_rank=q_rank)
    return ModelShape(
        family=family,
        **sizes,
        head_dim=192,
        sequence=163840,
        norm_eps=1e-6,
        rope=RopeScaling(
            type="yarn", factor=40.0, original_positions=4096, mscale=mscale, mscale_all_dim=mscale
        ),
        moe=moe,
        attention=AttentionShape(latent=latent, interleaved=True),
    )


_rows(
    _nemotron,
    "layers hidden heads kv_heads",
    {
        "nemotron3-8b": (32, 4096, 32, 32),
        "nemotron3-22b": (40, 6144, 48, 48),
        "nemotron4-15b": (32, 6144, 48, 8),
        "nemotron4-340b": (96, 18432, 96, 8),
    },
)
_rows(
    partial(ModelShape, family="t5", vocab=32128, sequence=512, norm_eps=1e-6),
    "layers encoder_layers hidden heads head_dim ffn",
    {
        "t5-small": (6, 6, 512, 8, 64, 2048),
        "t5-base": (12, 12, 768, 12, 64, 3072),
        "t5-large": (24, 24, 1024, 16, 64, 4096),
        "t5-3b": (24, 24, 1024, 32, 128, 16384),
        "t5-11b": (24, 24, 1024, 128, 128, 65536),
    },
)
_rows(
    partial(ModelShape, family="t5", mlp="geglu", tied=False, vocab=32128, sequence=512, norm_eps=1e-6),
    "layers encoder_layers hidden heads ffn",
    {
        "t5-v1.1-small": (8, 8, 512, 6, 1024),
        "t5-v1.1-base": (12, 12, 768, 12, 2048),
        "t5-v1.1-large": (24, 24, 1024, 16, 2816),
        "t5-v1.1-xl": (24, 24, 2048, 32, 5120),
        "t5-v1.1-xxl": (24, 24, 4096, 64, 10240),
    },
)
_rows(
    partial(ModelShape, family="bart", vocab=50265, sequence=1024),
    "layers encoder_layers hidden heads",
    {"bart-base": (6, 6, 768, 12), "bart-large": (12, 12, 1024, 16)},
)
TABLE.update({"falcon-180b": _falcon, "gpt-neox-20b": _neox})
_rows(_gpt_oss, "layers experts", {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128)})
_rows(_llama4, "experts every", {"llama4-e16": (16, 1), "llama4-e128": (128, 2)})
_v2 = partial(_deepseek, family="deepseek_v2", vocab=102400, mscale=0.707)
_v2_experts = partial(ExpertShape, top_k=6, normalise=False, balance=0.001, dense_layers=1)
TABLE["deepseek-v2-lite"] = partial(
    _v2,
    layers=27,
    hidden=2048,
    heads=16,
    ffn=10944,
    moe=_v2_experts(experts=64, ffn=1408, shared_ffn=2 * 1408),
    q_rank=None,
)
TABLE["deepseek-v2"] = partial(
    _v2,
    layers=60,
    hidden=5120,
    heads=128,
    ffn=12288,
    moe=_v2_experts(experts=160, ffn=1536, shared_ffn=2 * 1536, groups=8, top_groups=3, scale=16.0),
    q_rank=1536,
)
TABLE["deepseek-v3"] = partial(
    _deepseek,
    family="deepseek_v3",
    layers=61,
    hidden=7168,
    heads=128,
    ffn=18432,
    vocab=129280,
    moe=ExpertShape(
        experts=256,
        top_k=8,
        ffn=2048,
        shared_ffn=2048,
        score="sigmoid",
        balance=0.001,
        dense_layers=3,
        correction=True,
        correction_rate=0.001,  # arXiv 2412.19437, section 4.2
        groups=8,
        top_groups=4,
        group_score="top2",
        scale=2.5,
    ),
    q_rank=1536,
    mscale=1.0,
)
