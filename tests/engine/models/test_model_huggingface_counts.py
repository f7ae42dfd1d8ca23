"""Every kind of `config.json` that can be planned has as many parameters as the model that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.engine.models import build
from stretto.errors import StrettoError
from stretto.job.huggingface import shape_from_huggingface
from stretto.job.parameters import count_parameters

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 24, "mlp_only_layers": [0]}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
    "nemotron": ("nemotron", {}),
    "gpt_neox": ("gpt_neox", {}),
}
# of these the published files have what the module has as a buffer: a correction for every routed expert
BUFFERS = {"deepseek_v3": 3 * 8}


@pytest.mark.parametrize("name", KINDS)
def test_counted_parameters_are_those_of_the_transformers_module(name: str) -> None:
    kind, more = KINDS[name]
    config = AutoConfig.for_model(kind, **{**BASE, **more})
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    results = sum(parameter.numel() for parameter in module.parameters()) + BUFFERS.get(name, 0)
    shape = shape_from_huggingface(config.to_dict())
    assert count_parameters(shape).total == results
    if shape.unsupported_parts:
        with pytest.raises(StrettoError, match="can be planned, not yet built"):
            build(shape)
    else:
        assert sum(parameter.numel() for parameter in build(shape).parameters()) == results
