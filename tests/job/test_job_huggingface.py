"""Hugging Face's `config.json` and our shapes: published ones, both directions, and hostile ones."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import scaled
from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, LatentShape, RopeScaling
from stretto.job.experts import ExpertShape
from stretto.job.families import FAMILIES, FAMILY_DEFAULTS, Family
from stretto.job.huggingface import (
    config_to_huggingface,
    differences,
    kind_of,
    read_config,
    read_file,
    shape_from_huggingface,
)
from stretto.job.presets import preset
from stretto.job.shape import ModelShape

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


LLAMA31: dict[str, Any] = {  # and of Llama-3.1-8B
    **LLAMA2,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
QWEN2: dict[str, Any] = {  # and of Qwen2.5-7B, whose window is switched off
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GEMMA3: dict[str, Any] = {  # and of gemma-3-4b-it, with most of its language model's fields left to be usual
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GPT_OSS: dict[str, Any] = {  # and of gpt-oss-20b
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
DEEPSEEK_V3: dict[str, Any] = {  # and of DeepSeek-V3
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_published_configurations() -> None:
    assert shape_from_huggingface(GPT2) == replace(preset("gpt2"), dropout=0.1)
    assert not differences(shape_from_huggingface(LLAMA2), preset("llama2-70b"))
    assert not differences(shape_from_huggingface(MIXTRAL), preset("mixtral-8x7b"))
    with_defaults = {"rope_theta", "rms_norm_eps"}
    bare = {name: value for name, value in MIXTRAL.items() if name not in with_defaults}
    assert not differences(shape_from_huggingface(bare), preset("mixtral-8x7b"))
    assert shape_from_huggingface(LLAMA2 | {"rope_theta": 500000}).rope_theta == 500000


def test_llama31_has_scaled_positions() -> None:
    shape = shape_from_huggingface(LLAMA31)
    scaling = RopeScaling(type="llama3", factor=8.0, original_positions=8192)
    assert (shape.rope, shape.rope_theta, shape.sequence) == (scaling, 500000.0, 131072)


def test_a_window_that_is_switched_off() -> None:
    assert shape_from_huggingface(QWEN2).attention == AttentionShape(qkv_bias=True)
    assert read_config(QWEN2).unknown == ("use_mrope",)
    windowed = shape_from_huggingface({**QWEN2, "use_sliding_window": True, "max_window_layers": 0})
    assert windowed.attention == AttentionShape(qkv_bias=True, window=131072)


def test_the_language_model_of_one_that_sees_pictures() -> None:
    reading = read_config(GEMMA3)
    shape = reading.shape
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab) == (8, 4, 256, 262208)
    assert shape.attention == AttentionShape(norm="head", window=1024, full_every=6, local_theta=10000.0)
    assert shape.rope == RopeScaling(type="linear", factor=8.0)
    assert (shape.rope_theta, shape.embedding_scale, shape.tied) == (1e6, 2560**0.5, True)
    assert reading.kind == "gemma3_text"
    assert reading.notes == ("the language model only: its vision tower and projector are left out",)
    assert reading.unknown == ()


def test_gpt_oss_as_published() -> None:
    reading = read_config(GPT_OSS)
    assert reading.shape.attention == AttentionShape(sinks=True, window=128, full_every=2)
    assert reading.shape.rope is not None
    assert not reading.shape.rope.truncate
    assert reading.notes == ("the weights are quantised ('mxfp4')",)
    assert reading.unknown == ()


def test_deepseek_v3_as_published() -> None:
    reading = read_config(DEEPSEEK_V3)
    shape, moe = reading.shape, reading.shape.moe
    assert moe == ExpertShape(
        experts=256,
        top_k=8,
        ffn=2048,
        shared_ffn=2048,
        score="sigmoid",
        balance=0.001,
        dense_layers=3,
        correction=True,
        groups=8,
        top_groups=4,
        group_score="top2",
        scale=2.5,
    )
    latent = LatentShape(kv_rank=512, rope_dim=64, value_dim=128, q_rank=1536)
    assert shape.attention == AttentionShape(latent=latent, interleaved=True)
    assert shape.rope is not None
    assert (shape.rope.magnitude, round(shape.rope.score_factor, 6)) == (1.0, 1.873854)
    assert reading.unknown == ()
    assert "further tokens" in reading.notes[1]


PUBLISHED = (GPT2, LLAMA2, MIXTRAL, LLAMA31, QWEN2, GEMMA3["text_config"], GPT_OSS, DEEPSEEK_V3)


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["model_type"])
def test_every_key_that_counts_survives(config: dict[str, Any]) -> None:
    """config -> shape -> config: what is written says the same as what was read, key for key."""
    shape = shape_from_huggingface(config)
    written = config_to_huggingface(shape)
    assert written["model_type"] == config["model_type"]
    older = {"rope_scaling", "rope_theta", "sliding_window", "experts_per_token", "tie_word_embeddings"}
    compared = {key: value for key, value in config.items() if key in written and key not in older}
    assert {key: written[key] for key in compared} == compared
    assert shape_from_huggingface(json.loads(json.dumps(written))) == shape


# shapes of every family, with values that one of its models could have
_FLAG = st.booleans()
_RATE = st.sampled_from([1e-6, 1e-5, 3e-5])


@st.composite
def ropes(draw: st.DrawFn, sequence: int) -> RopeScaling | None:
    kind = draw(st.sampled_from([None, "linear", "dynamic", "yarn", "llama3"]))
    if kind is None:
        return None
    values: dict[str, Any] = {"type": kind, "factor": draw(st.sampled_from([1.0, 4.0, 8.5]))}
    if kind != "linear":
        values["original_positions"] = sequence if kind == "dynamic" else draw(st.integers(1, 99))
    if kind == "llama3":
        values |= {"low_freq_factor": 0.5, "high_freq_factor": draw(st.sampled_from([1.0, 4.0]))}
    if kind == "yarn":
        values |= {"beta_fast": draw(st.sampled_from([16.0, 32.0])), "truncate": draw(_FLAG)}
        values |= draw(
            st.sampled_from([{}, {"attention_factor": 1.5}, {"mscale": 0.7, "mscale_all_dim": 0.9}])
        )
    return RopeScaling(**values)


@st.composite
def experts(draw: st.DrawFn, family: Family, ffn: int) -> ExpertShape:
    own_width = family not in ("mixtral", "gpt_oss")
    values: dict[str, Any] = {
        **FAMILY_DEFAULTS[family].experts,
        "experts": 8,
        "top_k": draw(st.integers(1, 4)),
    }
    values |= {
        "balance": draw(_RATE),
        "dense_layers": 0,
        "ffn": 8 * draw(st.integers(1, 3)) if own_width else None,
    }
    if family.startswith("qwen"):
        values |= {"normalise": draw(_FLAG), "dense_layers": draw(st.integers(0, 2))}
        values["every"] = draw(st.integers(1, 2))
        values["dense_layers"] = 0 if values["every"] > 1 else values["dense_layers"]
    if family == "qwen2_moe":
        values["shared_ffn"] = draw(st.integers(1, 99))
    if family.startswith("deepseek"):
        values |= {
            "shared_ffn": values["ffn"] * draw(st.integers(0, 2)),
            "scale": draw(st.sampled_from([1.0, 2.5])),
        }
        values |= {"dense_layers": draw(st.integers(0, 2)), "groups": draw(st.sampled_from([1, 4]))}
        values["top_groups"] = draw(st.integers(2, 3)) if values["groups"] > 1 else 1
    if family == "deepseek_v3":
        values["normalise"] = draw(_FLAG)
    return ExpertShape(**values)


@st.composite
def stacks(draw: st.DrawFn, family: Family) -> ModelShape:
    """Models with an encoder."""
    heads, hidden = draw(st.sampled_from([2, 4])), 12 * draw(st.integers(1, 4))
    special: dict[str, Any] = {"embedding_scale": draw(st.sampled_from([1.0, hidden**0.5]))}
    if family == "t5":
        buckets = 2 * draw(st.integers(2, 9))
        special = {
            "head_dim": draw(st.integers(1, 9)),
            "norm_eps": draw(_RATE),
            "mlp": draw(st.sampled_from(["relu", "gelu", "geglu"])),
            "attention": AttentionShape(query_scale=1.0, buckets=buckets, max_distance=buckets + 1),
            "logit_scale": draw(st.sampled_from([1.0, hidden**-0.5])),
        }
    return ModelShape(
        family=family,
        layers=draw(st.integers(1, 4)),
        encoder_layers=draw(st.integers(1, 4)),
        hidden=hidden,
        heads=heads,
        ffn=draw(st.integers(1, 99)),
        vocab=draw(st.integers(1, 99)),
        sequence=draw(st.integers(1, 99)),
        tied=draw(_FLAG),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        **special,
    )


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    family = draw(st.sampled_from(FAMILIES))
    heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (6, 1)]))
    hidden, ffn = 12 * draw(st.integers(1, 4)), draw(st.integers(1, 99))
    sequence = draw(st.integers(1, 99))
    values: dict[str, Any] = {
        "layers": draw(st.integers(1, 7)),
        "vocab": draw(st.integers(1, 99)),
        "tied": draw(_FLAG),
        "norm_eps": draw(_RATE),
    }
    if family == "gpt":
        return ModelShape(
            family=family,
            hidden=hidden,
            heads=heads,
            ffn=ffn,
            sequence=sequence,
            **values,
            dropout=draw(st.sampled_from([0.0, 0.1])),
            bias=draw(_FLAG),
        )
    if family in ("t5", "bart"):
        return draw(stacks(family))
    default: AttentionShape = FAMILY_DEFAULTS[family].attention
    attention: dict[str, Any] = {}
    if default.latent is not None:
        kv_heads, head_dim = heads, 2 * draw(st.integers(5, 9))
        latent = LatentShape(kv_rank=9, rope_dim=4, value_dim=7, q_rank=draw(st.sampled_from([None, 5])))
        attention |= {"latent": latent, "interleaved": family == "deepseek_v2" or draw(_FLAG)}
    else:
        head_dim = 2 * draw(st.integers(1, 9))
    if family in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss"):
        attention["window"] = draw(st.sampled_from([None, 3]))
        alternating = attention["window"] is not None and family.startswith(
            ("gemma", "gpt", "qwen2", "qwen3")
        )
        if alternating and family != "qwen3_moe":
            attention["full_every"] = draw(st.integers(0, 3))
        if family == "gemma3":
            attention["local_theta"] = 7.0 if attention["window"] is not None else None
    if family.startswith("gemma"):
        attention |= {"query_scale": float(draw(st.integers(1, 99)))}
        values["logit_softcap"] = draw(st.sampled_from([0.0, 30.0]))
    if family == "gemma2":
        attention["softcap"] = draw(st.sampled_from([None, 50.0]))
    if family in ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "deepseek_v2", "deepseek_v3"):
        biased = draw(_FLAG)
        attention |= {"qkv_bias": biased, "proj_bias": biased}
    if family == "llama":
        values["bias"] = draw(_FLAG)
    sparse = bool(FAMILY_DEFAULTS[family].experts) or family in ("mixtral", "qwen3_moe")
    return ModelShape(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        sequence=sequence,
        rope_theta=draw(st.sampled_from([1e4, 5e5])),
        rope=draw(ropes(sequence)),
        attention=replace(
            default, **{"window": None, "full_every": 0, "local_theta": None, "softcap": None} | attention
        ),
        moe=draw(experts(family, ffn)) if sparse else None,
        **values,
    )


@settings(max_examples=scaled(300))
@given(shape=shapes())
def test_shape_to_config_to_shape_is_the_identity(shape: ModelShape) -> None:
    written = json.loads(json.dumps(config_to_huggingface(shape)))
    reading = read_config(written)
    lost = differences(shape, reading.shape)
    if shape.family == "gpt":  # theirs always has biases, which are zero for a model without
        lost = {name: values for name, values in lost.items() if not name.endswith("bias")}
    assert not lost
    assert reading.shape.family == shape.family
    assert reading.unknown == ()
    assert kind_of(reading.shape).name == reading.kind


def test_the_first_kind_that_expresses_a_shape() -> None:
    """Where that of its family does not."""
    plain = ModelShape(family="llama", layers=2, hidden=16, heads=2, vocab=9, sequence=8)
    shapes_by_kind = {
        "llama": plain,
        "mistral": replace(plain, attention=AttentionShape(window=4)),
        "qwen2": replace(plain, attention=AttentionShape(qkv_bias=True)),
        "qwen3": replace(plain, attention=AttentionShape(norm="head")),
        "mixtral": replace(plain, moe=ExpertShape(experts=4)),
        "qwen3_moe": replace(plain, attention=AttentionShape(norm="head"), moe=ExpertShape(experts=4)),
    }
    assert {name: kind_of(shape).name for name, shape in shapes_by_kind.items()} == {
        name: name for name in shapes_by_kind
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention": AttentionShape(sinks=True)}, "attention.sinks True has no counterpart"),
        ({"attention": AttentionShape(window=4, norm="all")}, "attention.norm 'all' has no counterpart"),
        ({"embedding_scale": 3.0}, "embedding_scale 3.0 has no counterpart in LlamaForCausalLM"),
        ({"moe": ExpertShape(experts=4, score="sigmoid")}, "moe.score 'sigmoid' has no counterpart"),
        ({"block_norms": "sandwich"}, "block_norms 'sandwich' has no counterpart"),
    ],
)
def test_what_no_kind_can_express(change: dict[str, Any], says: str) -> None:
    plain = ModelShape(family="llama", layers=2, hidden=16, heads=2, vocab=9, sequence=8)
    with pytest.raises(StrettoError, match=re.escape(says)):
        config_to_huggingface(replace(plain, **change))


def test_differences_see_what_changes_the_function_alone() -> None:
    mixtral = preset("mixtral-8x7b")
    assert mixtral.moe is not None
    other = replace(
        mixtral, family="llama", moe=replace(mixtral.moe, balance=0.5, z=0.1, capacity=1.25, ffn=14336)
    )
    assert not differences(mixtral, other)
    changed = replace(other, rope_theta=10000.0, moe=replace(mixtral.moe, normalise=False))
    assert differences(mixtral, changed) == {"rope_theta": (1e6, 10000.0), "moe.normalise": (True, False)}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "model_type 'lama'"),
        ({"model_type": ["llama"]}, "model_type a list of 1"),
        ({}, "model_type None"),
        ({**GPT2, "n_layer": None}, "n_layer is missing"),
        ({**GPT2, "n_layer": 10**9}, "n_layer is 1000000000: it must be a whole number from 1 to 10000"),
        ({**GPT2, "n_layer": 10**5000}, "n_layer is a number of 16610 bits"),
        ({**GPT2, "n_embd": True}, "n_embd is True: it must be a whole number"),
        (
            {**GPT2, "layer_norm_epsilon": float("nan")},
            "layer_norm_epsilon is nan: it must be",
        ),
        (
            {**GPT2, "layer_norm_epsilon": -1.0},
            "layer_norm_epsilon is -1.0: it must be a finite number above 0",
        ),
        ({**GPT2, "activation_function": "relu"}, "activation_function is 'relu': our modules compute only"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({**GPT2, "attn_pdrop": 0.0}, "attn_pdrop 0.0"),
        ({**LLAMA2, "vocab_size": "many"}, "vocab_size is 'many': it must be a whole number from 1"),
        ({**LLAMA2, "vocab_size": "x" * 10**6}, "vocab_size is 'xxxxx"),
        ({**LLAMA2, "hidden_act": "gelu"}, "hidden_act is 'gelu': our modules compute only silu or swish"),
        ({**LLAMA2, "rope_scaling": 8}, "rope_scaling is 8: it must be a mapping"),
        ({**LLAMA2, "rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type is 'longrope'"),
        ({**LLAMA2, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        (
            {**LLAMA2, "rope_scaling": {"type": "linear", "factor": 0.5}},
            "rope_scaling.factor is 0.5: it must be at least 1",
        ),
        ({**LLAMA2, "rope_theta": -1}, "rope_theta is -1: it must be a finite number above 0"),
        ({**LLAMA2, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: our modules rotate all"),
        ({**LLAMA2, "num_attention_heads": 63}, "hidden (hidden_size in config.json) is 8192"),
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "top_k (num_experts_per_tok in config.json) is 9"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "layer_types is a list of 1: there must be one"),
        ({**QWEN2, "layer_types": 3}, "layer_types is 3: it must be a list of words"),
        ({**QWEN2, "layer_types": ["chunked_attention"] * 28}, "layer_types is a list of 28: our modules"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 5}, "max_window_layers is 5"),
        ({**GEMMA3, "text_config": [1]}, "text_config is a list of 1: it must be a mapping"),
        ({**DEEPSEEK_V3, "num_key_value_heads": 8}, "num_key_value_heads is 8: latent attention has as many"),
        ({**DEEPSEEK_V3, "topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({**DEEPSEEK_V3, "n_group": 7}, "groups is 7: it must divide experts"),
    ],
)
def test_a_wrong_value_is_one_clear_error(config: dict[str, Any], says: str) -> None:
    with pytest.raises(StrettoError, match=re.escape(says)) as caught:
        shape_from_huggingface(config)
    assert len(str(caught.value)) < 400


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=scaled(400))
@given(data=st.data())
def test_hostile_values_never_end_in_a_traceback(data: st.DataObject) -> None:
    config = dict(data.draw(st.sampled_from([*PUBLISHED, GEMMA3])))
    inner = config.get("text_config") or config.get("rope_scaling") or {}
    keys = data.draw(
        st.lists(st.sampled_from([*config, *inner, "layer_types", "mlp_only_layers"]), max_size=3)
    )
    for key in keys:
        where = config if key in config else inner
        where = dict(where) if where is inner else config
        where[key] = data.draw(_JUNK)
        for name in ("text_config", "rope_scaling"):
            if where is not config and name in config:
                config[name] = where
    with suppress(StrettoError):
        assert shape_from_huggingface(config).layers <= 10_000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"model_type": "gpt2", "n_layer": ' + "9" * 5000 + "}", "is not JSON"),
        ("[1]", "is not a mapping"),
        ('{"model_type": "gpt2", "n_layer": 1e999}', "n_layer is inf"),
    ],
)
def test_hostile_files(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StrettoError, match=re.escape(says)):
        read_file(tmp_path)
