"""Published model sizes by name.

Sources: GPT-2, Radford et al. 2019, table 2; GPT-3, Brown et al. 2020, table 2.1, and NeMo's recipes; Llama
2, Touvron et al. 2023; Llama 3, Grattafiori et al. 2024, table 3, and the published configurations of 3.2;
Mixtral, Jiang et al. 2024, and the published configurations of version 0.1; Megatron, Narayanan et al. 2021,
table 1; Korthikanti et al. 2022, table 3; MPT, the pretraining files of llm-foundry.

Dropout is 0 in all. The Llama 3.1 and 3.2 sizes have the sequence they were pretrained on first, before their
positions were stretched.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.cost.experts import ExpertShape
from stretto.cost.shape import ModelShape
from stretto.errors import StrettoError, nearest


def _gpt2(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=50257, sequence=1024)


def _gpt3(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=50257, sequence=2048)


def _megatron(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048)


def _mpt(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(family="gpt", layers=layers, hidden=hidden, heads=heads, vocab=50368, sequence=2048)


def _llama2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    return ModelShape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=32000,
        sequence=4096,
    )


def _llama3(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, *, tied: bool = False
) -> ModelShape:
    return ModelShape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=128256,
        sequence=8192,
        rope_theta=500000.0,
        tied=tied,
    )


def _mixtral(layers: int, hidden: int, heads: int, ffn: int, sequence: int, balance: float) -> ModelShape:
    return ModelShape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=32000,
        sequence=sequence,
        rope_theta=1e6,
        moe=ExpertShape(experts=8, top_k=2, balance=balance),
    )


_PRESETS: dict[str, Callable[[], ModelShape]] = {
    "gpt2": lambda: _gpt2(12, 768, 12),
    "gpt2-medium": lambda: _gpt2(24, 1024, 16),
    "gpt2-large": lambda: _gpt2(36, 1280, 20),
    "gpt2-xl": lambda: _gpt2(48, 1600, 25),
    "gpt3-5b": lambda: _gpt3(24, 4096, 32),
    "gpt3-20b": lambda: _gpt3(44, 6144, 48),
    "gpt3-40b": lambda: _gpt3(48, 8192, 64),
    "gpt3-175b": lambda: _gpt3(96, 12288, 96),
    "llama2-7b": lambda: _llama2(32, 4096, 32, 32, 11008),
    "llama2-13b": lambda: _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": lambda: _llama2(80, 8192, 64, 8, 28672),
    "llama3-8b": lambda: _llama3(32, 4096, 32, 8, 14336),
    "llama3-70b": lambda: _llama3(80, 8192, 64, 8, 28672),
    "llama3.1-405b": lambda: _llama3(126, 16384, 128, 8, 53248),
    "llama3.2-1b": lambda: _llama3(16, 2048, 32, 8, 8192, tied=True),
    "llama3.2-3b": lambda: _llama3(28, 3072, 24, 8, 8192, tied=True),
    "mixtral-8x7b": lambda: _mixtral(32, 4096, 32, 14336, 32768, 0.02),
    "mixtral-8x22b": lambda: _mixtral(56, 6144, 48, 16384, 65536, 0.001),
    "mpt-125m": lambda: _mpt(12, 768, 12),
    "mpt-350m": lambda: _mpt(24, 1024, 16),
    "mpt-760m": lambda: _mpt(24, 1536, 12),
    "mpt-1b": lambda: _mpt(24, 2048, 16),
    "mpt-3b": lambda: _mpt(32, 2560, 20),
    "mpt-7b": lambda: _mpt(32, 4096, 32),
    "mpt-13b": lambda: _mpt(40, 5120, 40),
    "mpt-30b": lambda: _mpt(48, 7168, 56),
    "mpt-70b": lambda: _mpt(80, 8192, 64),
    "megatron-1.7b": lambda: _megatron(24, 2304, 24),
    "megatron-3.6b": lambda: _megatron(30, 3072, 32),
    "megatron-7.5b": lambda: _megatron(36, 4096, 32),
    "megatron-18.4b": lambda: _megatron(40, 6144, 48),
    "megatron-39.1b": lambda: _megatron(48, 8192, 64),
    "megatron-76.1b": lambda: _megatron(60, 10240, 80),
    "megatron-145.6b": lambda: _megatron(80, 12288, 96),
    "megatron-310.1b": lambda: _megatron(96, 16384, 128),
    "megatron-529.6b": lambda: _megatron(105, 20480, 128),
    "megatron-1008.0b": lambda: _megatron(128, 25600, 160),
    "korthikanti-22b": lambda: _megatron(48, 6144, 64),
    "korthikanti-175b": lambda: _megatron(96, 12288, 96),
    "korthikanti-530b": lambda: _megatron(105, 20480, 128),
    "korthikanti-1000b": lambda: _megatron(128, 25600, 160),
}

PRESETS: tuple[str, ...] = tuple(_PRESETS)


def preset(name: str) -> ModelShape:
    """The published shape of that name, as in "llama3-8b"; case does not matter.

    Raises:
        StrettoError: no such name.
    """
    wanted = name.lower()
    if wanted not in _PRESETS:
        near = nearest(wanted, PRESETS)
        hint = f"did you mean {near!r}?" if near else f"known models: {', '.join(PRESETS)}"
        raise StrettoError(f"model {name!r} is not known", hint=hint)
    return _PRESETS[wanted]()
