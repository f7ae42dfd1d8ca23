from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from model_shapes import EXPERTS, SHAPES

from stretto.engine.models.huggingface import config_to_huggingface, shape_from_huggingface
from stretto.errors import StrettoError
from stretto.spec.experts import ExpertShape
from stretto.spec.presets import preset
from stretto.spec.shape import ModelShape


@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back(name: str):
    shape = SHAPES[name]
    back = shape_from_huggingface(config_to_huggingface(shape))
    assert back == (replace(shape, bias=True) if shape.family == "gpt" else shape)


def test_experts_there_and_back():
    shape = EXPERTS["mixtral"]
    assert shape_from_huggingface(config_to_huggingface(shape)) == shape
    # an expert's own width is the only one there; what matters in training only is lost
    wide = replace(
        shape, moe=ExpertShape(experts=8, top_k=3, ffn=56, balance=0.5, z=0.1, capacity=1.25, drop="position")
    )
    back = shape_from_huggingface(config_to_huggingface(wide))
    assert back == replace(shape, ffn=56, moe=ExpertShape(experts=8, top_k=3, balance=0.5))


def test_dropout_survives_the_config_round_trip():
    shape = ModelShape(family="gpt", layers=1, hidden=8, heads=2, vocab=9, sequence=8, dropout=0.2)
    assert shape_from_huggingface(config_to_huggingface(shape)) == shape


GPT2: dict[str, Any] = {  # the facts of the published config.json of gpt2
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
}
LLAMA2: dict[str, Any] = {  # and of Llama-2-70b, whose keys are those of older versions
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

MIXTRAL: dict[str, Any] = {  # and of Mixtral-8x7B-v0.1
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def test_published_configurations():
    assert shape_from_huggingface(GPT2) == replace(preset("gpt2"), dropout=0.1)
    assert shape_from_huggingface(LLAMA2) == preset("llama2-70b")
    assert shape_from_huggingface(MIXTRAL) == preset("mixtral-8x7b")
    usual = {"rope_theta": None, "rms_norm_eps": None, "num_local_experts": None, "num_experts_per_tok": None}
    bare = {name: value for name, value in MIXTRAL.items() if name not in usual}
    assert shape_from_huggingface(bare) == preset("mixtral-8x7b")
    assert shape_from_huggingface(LLAMA2 | {"rope_theta": 500000}).rope_theta == 500000


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "model_type 'lama'"),
        ({}, "model_type None"),
        ({**GPT2, "n_layer": None}, "n_layer is missing"),
        ({**GPT2, "activation_function": "relu"}, "activation_function 'relu'"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({**GPT2, "attn_pdrop": 0.0}, "attn_pdrop 0.0"),
        ({**LLAMA2, "attention_bias": True}, "attention_bias True with mlp_bias False"),
        ({**LLAMA2, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3'"),
        ({**LLAMA2, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({**LLAMA2, "rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({**MIXTRAL, "sliding_window": 4096}, "sliding_window 4096"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "top_k is 9: there are 8 experts"),
        ({**LLAMA2, "num_attention_heads": 63}, "hidden is 8192: it must be a multiple of heads"),
    ],
)
def test_configs_of_other_models_are_refused(config: dict[str, Any], says: str):
    with pytest.raises(StrettoError, match=re.escape(says)):
        shape_from_huggingface(config)
