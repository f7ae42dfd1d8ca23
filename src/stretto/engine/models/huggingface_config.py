"""Sizes to and from the `config.json` of Hugging Face's GPT2LMHeadModel, LlamaForCausalLM and
MixtralForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.engine.models.huggingface import check_mixtral
from stretto.errors import StrettoError, nearest
from stretto.spec.experts import ExpertShape
from stretto.spec.huggingface import rope_of
from stretto.spec.huggingface import shape_from_huggingface as planned
from stretto.spec.shape import ModelShape, check_built

Config = Mapping[str, Any]
_KINDS = ("gpt2", "llama", "mixtral")


def shape_from_huggingface(config: Config) -> ModelShape:
    """The shape that a `config.json`, read into a dictionary, describes, of a model that can be built here
    and gives the same logits with the same weights; `stretto.spec.huggingface` reads all others.

    Raises:
        StrettoError: another kind of model, or one with parts that the models here do not have.
    """
    kind = config.get("model_type")
    if kind not in _KINDS:
        near = nearest(str(kind), _KINDS)
        hint = f"did you mean {near!r}?" if near else None
        raise StrettoError(f"model_type {kind!r} is not one of {', '.join(_KINDS)}", hint=hint)
    if kind == "gpt2":
        _check_gpt(config)
    else:
        _check_llama(config)
    if kind == "mixtral":
        _require(config, "sliding_window", None)
        _require(config, "router_jitter_noise", 0, 0.0)
    shape = planned(config)
    check_built(shape)
    return shape


def config_to_huggingface(shape: ModelShape) -> dict[str, Any]:
    """A `config.json` for `to_huggingface`'s weights; token ids are the tokeniser's to add.

    Raises:
        StrettoError: experts that MixtralForCausalLM cannot have.
    """
    if shape.moe is not None:
        check_mixtral(shape)
        return _mixtral_config(shape, shape.moe)
    return _gpt_config(shape) if shape.family == "gpt" else _llama_config(shape)


def _check_gpt(config: Config) -> None:
    _require(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _require(config, "scale_attn_weights", True)
    _require(config, "scale_attn_by_inverse_layer_idx", False)
    _require(config, "add_cross_attention", False)
    rates = {name: config.get(name, 0.1) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if len(set(rates.values())) > 1:
        said = ", ".join(f"{name} {rate}" for name, rate in rates.items())
        raise StrettoError(f"{said}: there is one dropout here", hint="make the three equal")


def _check_llama(config: Config) -> None:
    _require(config, "hidden_act", "silu", "swish")
    _require(config, "attention_dropout", 0, 0.0)
    _, kind = rope_of(config)
    if kind != "default":
        raise StrettoError(
            f"rope_type {kind!r}: rotary positions are plain here, stretched ones would give other logits",
            hint="models with plain rotary positions are those before Llama 3.1",
        )


def _require(config: Config, name: str, *allowed: object) -> None:
    """A field must say what the models here do; left out, it means the first of `allowed`."""
    value = config.get(name, allowed[0])
    if value not in allowed:
        raise StrettoError(
            f"{name} {value!r} is not what the model here does",
            hint=f"only {name}: {allowed[0]!r} can be taken",
        )


def _gpt_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": shape.layers,
        "n_embd": shape.hidden,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "vocab_size": shape.vocab,
        "n_positions": shape.sequence,
        "tie_word_embeddings": shape.tied,
        "activation_function": "gelu_new",
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "layer_norm_epsilon": shape.norm_eps,
    }


def _mixtral_config(shape: ModelShape, moe: ExpertShape) -> dict[str, Any]:
    plain = _llama_config(shape)
    del plain["attention_bias"], plain["mlp_bias"]
    return plain | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": shape.expert_ffn,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _llama_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.sequence,
        "tie_word_embeddings": shape.tied,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
    }
