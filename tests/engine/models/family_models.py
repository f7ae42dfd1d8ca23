"""Small models of every kind with everything special about it switched on, in `transformers` and here."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.engine.models import LanguageModel, build
from stretto.engine.models.huggingface import from_huggingface
from stretto.job.huggingface import shape_from_huggingface

if TYPE_CHECKING:
    from collections.abc import Generator

    from stretto.job.shape import ModelShape

SEQUENCE = 24  # beyond the original 16 positions of scaled ones, and beyond every window
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "rms_norm_eps": 1e-6,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0, **values}}


_ORIGINAL = {"original_max_position_embeddings": 16}
_LLAMA3 = _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_ORIGINAL)
_YARN = _rope("yarn", beta_fast=8.0, beta_slow=0.5, **_ORIGINAL)
_MSCALE = _rope("yarn", mscale=0.7, mscale_all_dim=0.9, **_ORIGINAL)

# name: model_type, and its config.json
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        {
            "n_layer": 3,
            "n_embd": 48,
            "n_head": 4,
            "n_inner": 100,
            "n_positions": 32,
            "vocab_size": 67,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "llama": ("llama", {**_SIZES, "head_dim": 20, "attention_bias": True, "tie_word_embeddings": True}),
    "llama, llama3 positions": ("llama", {**_SIZES, **_LLAMA3}),
    "llama, linear positions": ("llama", {**_SIZES, "mlp_bias": True, **_rope("linear")}),
    "llama, dynamic positions": ("llama", {**_SIZES, "max_position_embeddings": 16, **_rope("dynamic")}),
    "llama, yarn positions": ("llama", {**_SIZES, **_YARN}),
    "mistral": ("mistral", {**_SIZES, "head_dim": 16, "sliding_window": 7}),
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen2": (
        "qwen2",
        {**_SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0, **_YARN},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **_SIZES,
            **_EXPERTS,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3": ("qwen3", {**_SIZES, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**_SIZES, **_EXPERTS, "head_dim": 16, "mlp_only_layers": [0]}),
    "gemma2": (
        "gemma2",
        {
            **_SIZES,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_SIZES,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            **_rope("yarn", truncate=False, **_ORIGINAL),
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_experts_per_tok": 3,  # of 2 groups: the best 2 would be theirs without groups too
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            **_MSCALE,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**_LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "attention_bias": True, **_MSCALE},
    ),
}


@contextmanager
def in_float64() -> Generator[None]:
    """Compute in float64 what `transformers` always computes in float32 (angles, norms, routers)."""
    float32 = {alias: getattr(torch, alias) for alias in ("float32", "float")}
    to_float, default = Tensor.float, torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for alias in float32:
            setattr(torch, alias, torch.float64)
        Tensor.float = Tensor.double  # type: ignore[method-assign]
        yield
    finally:
        for alias, dtype in float32.items():
            setattr(torch, alias, dtype)
        Tensor.float = to_float  # type: ignore[method-assign]
        torch.set_default_dtype(default)


def their_config(name: str) -> Any:
    """The configuration of a case, with attention in plain operations."""
    kind, values = CASES[name]
    config = AutoConfig.for_model(kind, **values, attn_implementation="eager")
    config._experts_implementation = "eager"  # their loop, which takes every type
    return config


def their_model(config: Any, dtype: torch.dtype) -> Any:
    """Their model with every weight random, biases, sinks, gains and corrections too, so that none can be
    swapped or lost unseen.
    """
    model = AutoModelForCausalLM.from_config(config).to(dtype).train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, weight in model.state_dict(keep_vars=True).items():
            weight.copy_(torch.empty(weight.shape).normal_(std=0.2, generator=generator))
            if "norm" in key and key.endswith("weight") and not config.model_type.startswith("gemma"):
                weight += 1
    return model


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest differences, each relative to the largest value there; of gradients the worst tensor's."""

    logits: float
    loss: float
    gradients: float
    worst: str  # the tensor with the worst gradient
    parameters: int
    transformers_parameters: int


def compare(name: str, dtype: torch.dtype) -> Comparison:
    """Run both models of a case on the same weights and tokens."""
    if dtype == torch.float64:
        with in_float64():
            return _compare(name, dtype)
    return _compare(name, dtype)


def loaded(transformers_model: Any, shape: ModelShape, dtype: torch.dtype) -> LanguageModel:
    """Our model with the weights of theirs."""
    model = build(shape).to(dtype)
    model.load_state_dict(from_huggingface(transformers_model.state_dict(), shape), strict=False)
    model.tie()
    return model.train()


def _compare(name: str, dtype: torch.dtype) -> Comparison:
    config = their_config(name)
    transformers_model = their_model(config, dtype)
    shape = shape_from_huggingface(config.to_dict())
    model = loaded(transformers_model, shape, dtype)
    ids = torch.randint(0, shape.vocab, (3, SEQUENCE), generator=torch.Generator().manual_seed(4))
    expected = transformers_model(ids, use_cache=False)
    logits = model(ids)
    targets = torch.cat([ids[:, 1:], torch.full((3, 1), -100)], dim=1)
    their_loss = torch.nn.functional.cross_entropy(expected.logits.flatten(0, 1), targets.flatten())
    loss = model.loss(logits, targets) / (targets != -100).sum()
    their_loss.backward()
    loss.backward()
    gradients = _gradients(model, transformers_model, shape)
    worst = max(gradients, key=gradients.__getitem__)
    tied = {id(p): p for p in transformers_model.parameters()}
    return Comparison(
        logits=_difference(logits, expected.logits),
        loss=_difference(loss, their_loss),
        gradients=gradients[worst],
        worst=worst,
        parameters=sum(p.numel() for p in model.parameters()),
        transformers_parameters=sum(p.numel() for p in tied.values())
        + sum(b.numel() for b in _corrections(transformers_model)),
    )


def _corrections(transformers_model: Any) -> list[Tensor]:
    """DeepSeek-V3's corrections of its router: tensors of published files, buffers of the module."""
    return [
        buffer
        for key, buffer in transformers_model.named_buffers()
        if key.endswith("e_score_correction_bias")
    ]


def _gradients(model: LanguageModel, transformers_model: Any, shape: ModelShape) -> dict[str, float]:
    state = transformers_model.state_dict(keep_vars=True)
    there = {key: torch.zeros_like(w) if w.grad is None else w.grad for key, w in state.items()}
    expected = from_huggingface(there, shape)
    return {
        key: _difference(parameter.grad, expected[key])
        for key, parameter in model.named_parameters()
        if parameter.grad is not None or bool(expected[key].any())
    }


def _difference(gradient: Tensor | None, reference: Tensor) -> float:
    assert gradient is not None, "no gradient"
    largest = reference.detach().abs().max()
    return float((gradient.detach() - reference.detach()).abs().max() / largest) if largest > 0 else 0.0
