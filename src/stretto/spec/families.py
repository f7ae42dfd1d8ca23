"""What the named families of models have in common: the usual values of a shape's fields.

A family is nothing but these values. Modules, sharding and costs read the fields of a shape and never ask for
its family, so a new family is an entry here and its names at Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.spec.attention import AttentionShape, LatentShape

Family = Literal[
    "gpt",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "t5",
    "bart",
]


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual values of a family.

    shape: of fields of `ModelShape`.
    experts: of fields of `ExpertShape`, where a model of the family has experts.
    ffn: the inner width of the MLP over `hidden`, and what it is rounded up to a multiple of.
    scaled_embedding: the embedding is multiplied by sqrt(hidden).
    scaled_logits: the input of a tied output projection is divided by sqrt(hidden).
    encoder: there is one, with as many blocks as the decoder.
    """

    shape: Mapping[str, Any] = field(default_factory=dict[str, Any])
    experts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ffn: tuple[float, int] = (8 / 3, 256)
    scaled_embedding: bool = False
    scaled_logits: bool = False
    encoder: bool = False

    def values(self, hidden: int) -> dict[str, Any]:
        """The usual value of every field of a shape that has one, for a residual stream of `hidden`."""
        ratio, multiple = self.ffn
        scale = hidden**0.5 if self.scaled_embedding else 1.0
        ffn = -(-round(ratio * hidden * 3) // (3 * multiple)) * multiple
        output = hidden**-0.5 if self.scaled_logits else 1.0
        return {**_LLAMA, "ffn": ffn, "embedding_scale": scale, "logit_scale": output, **self.shape}


_LLAMA: dict[str, Any] = {
    "position_embedding": "rotary",
    "attention": AttentionShape(),
    "mlp": "swiglu",
    "norm": "rms",
    "block_norms": "pre",
    "bias": False,
    "tied": False,
    "logit_softcap": 0.0,
    "embedding_norm": False,
}
_GEMMA: dict[str, Any] = {"mlp": "geglu", "norm": "rms1p", "block_norms": "sandwich", "tied": True}
_LATENT = LatentShape(kv_rank=512, rope_dim=64, value_dim=128, q_rank=1536)
_DEEPSEEK: dict[str, Any] = {
    "attention": AttentionShape(latent=_LATENT, interleaved=True),
    "head_dim": 192,
}

USUAL: Mapping[Family, Usual] = {
    "gpt": Usual(
        shape={"position_embedding": "learned", "mlp": "gelu", "norm": "layer", "bias": True, "tied": True},
        ffn=(4, 1),
    ),
    "llama": Usual(),
    "mistral": Usual(),
    "mixtral": Usual(),
    "qwen2": Usual(shape={"attention": AttentionShape(qkv_bias=True)}),
    "qwen2_moe": Usual(
        shape={"attention": AttentionShape(qkv_bias=True)},
        experts={"normalise": False, "shared_gate": True},
    ),
    "qwen3": Usual(shape={"attention": AttentionShape(norm="head")}),
    "qwen3_moe": Usual(shape={"attention": AttentionShape(norm="head")}),
    "gemma2": Usual(
        shape={
            **_GEMMA,
            "attention": AttentionShape(softcap=50.0, window=4096, full_every=2),
            "logit_softcap": 30.0,
        },
        ffn=(4, 1),
        scaled_embedding=True,
    ),
    "gemma3": Usual(
        shape={
            **_GEMMA,
            "attention": AttentionShape(norm="head", window=512, full_every=6, local_theta=10000.0),
        },
        ffn=(6, 1),
        scaled_embedding=True,
    ),
    "gpt_oss": Usual(
        shape={
            "attention": AttentionShape(sinks=True, window=128, full_every=2),
            "mlp": "swiglu_clamped",
            "bias": True,
        },
        experts={"router_bias": True},
        ffn=(1, 1),
    ),
    "deepseek_v2": Usual(shape=_DEEPSEEK, experts={"normalise": False, "dense_layers": 1}),
    "deepseek_v3": Usual(
        shape=_DEEPSEEK,
        experts={
            "score": "sigmoid",
            "correction": True,
            "group_score": "top2",
            "dense_layers": 3,
        },
    ),
    "t5": Usual(
        shape={
            "position_embedding": "relative",
            "attention": AttentionShape(query_scale=1.0),
            "mlp": "relu",
            "head_dim": 64,
            "tied": True,
        },
        ffn=(4, 1),
        scaled_logits=True,
        encoder=True,
    ),
    "bart": Usual(
        shape={
            "position_embedding": "learned",
            "mlp": "gelu_exact",
            "norm": "layer",
            "block_norms": "post",
            "bias": True,
            "tied": True,
            "embedding_norm": True,
        },
        ffn=(4, 1),
        encoder=True,
    ),
}
FAMILIES: tuple[Family, ...] = tuple(USUAL)
