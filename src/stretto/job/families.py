"""Families of models: default values of a shape's fields.

A family is nothing but these values. Modules, sharding and costs read the fields of a shape and never its
family, so a new family is an entry here and its names at Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stretto.job.attention import AttentionShape, LatentShape

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
class FamilyDefaults:
    """Default values of a family.

    Attributes:
        shape: values of fields of `ModelShape`, by name.
        experts: values of fields of `ExpertShape`, by name, for models with experts.
        ffn: ratio of the MLP's inner width to `hidden`, and the multiple that the width is rounded up to.
        scaled_embedding: the embedding is multiplied by sqrt(hidden).
        scaled_logits: the input of a tied output projection is divided by sqrt(hidden).
        encoder: the model has an encoder with as many blocks as the decoder.
    """

    shape: Mapping[str, Any] = field(default_factory=dict[str, Any])
    experts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ffn: tuple[float, int] = (8 / 3, 256)
    scaled_embedding: bool = False
    scaled_logits: bool = False
    encoder: bool = False

    @property
    def attention(self) -> AttentionShape:
        return self.shape.get("attention", AttentionShape())

    def values(self, layers: int, hidden: int, heads: int, tied: bool | None) -> dict[str, Any]:
        """Return the default of every `derived` field of a shape with these sizes.

        `head_dim` is None if hidden / heads is not a whole number. If `tied` is None, the family's default
        counts.
        """
        ratio, multiple = self.ffn
        values = {
            **_LLAMA,
            "kv_heads": heads,
            "head_dim": None if hidden % heads else hidden // heads,
            "ffn": -(-round(ratio * hidden * 3) // (3 * multiple)) * multiple,
            "embedding_scale": hidden**0.5 if self.scaled_embedding else 1.0,
            "encoder_layers": layers if self.encoder else 0,
            **self.shape,
        }
        scaled = self.scaled_logits and (values["tied"] if tied is None else tied)
        return {**values, "logit_scale": hidden**-0.5 if scaled else 1.0}


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

FAMILY_DEFAULTS: Mapping[Family, FamilyDefaults] = {
    "gpt": FamilyDefaults(
        shape={"position_embedding": "learned", "mlp": "gelu", "norm": "layer", "bias": True, "tied": True},
        ffn=(4, 1),
    ),
    "llama": FamilyDefaults(),
    "mistral": FamilyDefaults(),
    "mixtral": FamilyDefaults(),
    "qwen2": FamilyDefaults(shape={"attention": AttentionShape(qkv_bias=True)}),
    "qwen2_moe": FamilyDefaults(
        shape={"attention": AttentionShape(qkv_bias=True)},
        experts={"normalise": False, "shared_gate": True},
    ),
    "qwen3": FamilyDefaults(shape={"attention": AttentionShape(norm="head")}),
    "qwen3_moe": FamilyDefaults(shape={"attention": AttentionShape(norm="head")}),
    "gemma2": FamilyDefaults(
        shape={
            **_GEMMA,
            "attention": AttentionShape(softcap=50.0, window=4096, full_every=2),
            "logit_softcap": 30.0,
        },
        ffn=(4, 1),
        scaled_embedding=True,
    ),
    "gemma3": FamilyDefaults(
        shape={
            **_GEMMA,
            "attention": AttentionShape(norm="head", window=512, full_every=6, local_theta=10000.0),
        },
        ffn=(6, 1),
        scaled_embedding=True,
    ),
    "gpt_oss": FamilyDefaults(
        shape={
            "attention": AttentionShape(sinks=True, window=128, full_every=2),
            "mlp": "swiglu_clamped",
            "bias": True,
        },
        experts={"router_bias": True},
        ffn=(1, 1),
    ),
    "deepseek_v2": FamilyDefaults(shape=_DEEPSEEK, experts={"normalise": False, "dense_layers": 1}),
    "deepseek_v3": FamilyDefaults(
        shape=_DEEPSEEK,
        experts={
            "score": "sigmoid",
            "correction": True,
            "group_score": "top2",
            "dense_layers": 3,
        },
    ),
    "t5": FamilyDefaults(
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
    "bart": FamilyDefaults(
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
FAMILIES: tuple[Family, ...] = tuple(FAMILY_DEFAULTS)
