"""Sizes from a `config.json` of Hugging Face, of every kind of model that can be planned.

What changes no size and hardly a cost, as stretched positions, goes into the shape's `beyond` in words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from stretto.errors import StrettoError, nearest
from stretto.spec.attention import AttentionShape, LatentShape
from stretto.spec.experts import ExpertShape
from stretto.spec.shape import ModelShape

Config = Mapping[str, Any]


def shape_from_huggingface(config: Config) -> ModelShape:
    """The shape that a `config.json`, read into a dictionary, describes.

    Raises:
        StrettoError: a kind of model, or a part of one, that has no costs here.
    """
    kind = config.get("model_type")
    if kind not in _KINDS:
        near = nearest(str(kind), _KINDS)
        hint = f"did you mean {near!r}?" if near else None
        raise StrettoError(f"model_type {kind!r} is not one of {', '.join(_KINDS)}", hint=hint)
    return _KINDS[kind](config)


def read_shape(path: Path) -> ModelShape:
    """The shape of a `config.json`, or of the folder that it is in.

    Raises:
        StrettoError: no such file, no JSON, or a model that has no costs here.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise StrettoError(f"cannot read {file}: {error.strerror}", hint="check the file's name") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise StrettoError(f"{file} is not JSON", hint="a config.json of Hugging Face is wanted") from None
    if not isinstance(values, dict):
        raise StrettoError(f"{file} is no mapping", hint="a config.json of Hugging Face is wanted")
    try:
        return shape_from_huggingface(cast(dict[str, Any], values))
    except StrettoError as error:
        raise StrettoError(f"{file}: {error.message}", hint=error.hint) from None


def rope_of(config: Config) -> tuple[float, str]:
    """Base of the rotary frequencies and the kind of positions, from `rope_parameters`, or from `rope_theta`
    and `rope_scaling` of older files.
    """
    rope: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0))), kind


def need(config: Config, name: str) -> Any:
    """A field that must be there.

    Raises:
        StrettoError: it is not.
    """
    if config.get(name) is None:
        raise StrettoError(f"{name} is missing in the model's config.json")
    return config[name]


def _gpt2(config: Config) -> ModelShape:
    return ModelShape(
        family="gpt",
        layers=need(config, "n_layer"),
        hidden=need(config, "n_embd"),
        heads=need(config, "n_head"),
        ffn=config.get("n_inner"),
        vocab=need(config, "vocab_size"),
        sequence=need(config, "n_positions"),
        tied=config.get("tie_word_embeddings", True),
        dropout=config.get("resid_pdrop", 0.1),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
    )


def _rotary(config: Config, **beside: Any) -> ModelShape:
    """What all models with rotary positions name alike; `beside` wins."""
    theta, kind = rope_of(config)
    said = () if kind == "default" else (f"rotary positions stretched by {kind}",)
    values: dict[str, Any] = {
        "family": "llama",
        "layers": need(config, "num_hidden_layers"),
        "hidden": need(config, "hidden_size"),
        "heads": need(config, "num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn": need(config, "intermediate_size"),
        "vocab": need(config, "vocab_size"),
        "sequence": config.get("max_position_embeddings", 2048),
        "tied": config.get("tie_word_embeddings", False),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "bias": False,
    }
    fields: dict[str, Any] = {**values, **beside, "beyond": (*said, *beside.get("beyond", ()))}
    return ModelShape(**fields)


def _llama(config: Config, **beside: Any) -> ModelShape:
    bias = config.get("attention_bias", False)
    if config.get("mlp_bias", False) != bias:
        raise StrettoError(f"attention_bias {bias} with mlp_bias {not bias}: here all have it or none")
    return _rotary(config, **{"bias": bias, **beside})


def _no_biases(config: Config) -> None:
    if config.get("attention_bias", False):
        raise StrettoError("attention_bias true of this kind of model has no count here")


def _mistral(config: Config) -> ModelShape:
    return _rotary(config, attention=_attention(config))


def _mixtral(config: Config) -> ModelShape:
    """The coefficient of the balance loss is taken as it stands, though theirs is of means over all layers at
    once, and ours a sum over layers and samples.
    """
    moe = ExpertShape(
        experts=config.get("num_local_experts", 8),
        top_k=config.get("num_experts_per_tok", 2),
        balance=float(config.get("router_aux_loss_coef", 0.001)),
    )
    usual = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072}
    return _llama({**usual, **config}, moe=moe, attention=_attention(config))


def _qwen2(config: Config, **beside: Any) -> ModelShape:
    qkv_bias = config.get("qkv_bias", True)
    return _rotary(config, attention=_attention(config, qkv_bias=qkv_bias), **beside)


def _qwen3(config: Config, **beside: Any) -> ModelShape:
    _no_biases(config)
    usual = {"head_dim": 128}
    return _rotary({**usual, **config}, attention=_attention(config, norm="head"), **beside)


def _qwen_experts(config: Config, **shared: Any) -> ExpertShape:
    return ExpertShape(
        experts=config.get("num_local_experts") or need(config, "num_experts"),
        top_k=need(config, "num_experts_per_tok"),
        ffn=need(config, "moe_intermediate_size"),
        normalise=config.get("norm_topk_prob", False),
        balance=float(config.get("router_aux_loss_coef", 0.001)),
        dense_layers=_leading(config.get("mlp_only_layers") or []),
        every=config.get("decoder_sparse_step", 1),
        **shared,
    )


def _qwen2_moe(config: Config) -> ModelShape:
    shared = need(config, "shared_expert_intermediate_size")
    return _qwen2(config, moe=_qwen_experts(config, shared_ffn=shared, shared_gate=True))


def _qwen3_moe(config: Config) -> ModelShape:
    return _qwen3(config, moe=_qwen_experts(config))


def _deepseek(config: Config) -> ModelShape:
    _no_biases(config)
    if config.get("moe_layer_freq", 1) != 1:
        raise StrettoError(
            f"moe_layer_freq {config['moe_layer_freq']} is not 1, as all published models have"
        )
    sigmoid = config["model_type"] == "deepseek_v3"
    width, rope = need(config, "moe_intermediate_size"), need(config, "qk_rope_head_dim")
    moe = ExpertShape(
        experts=need(config, "n_routed_experts"),
        top_k=need(config, "num_experts_per_tok"),
        ffn=width,
        shared_ffn=width * (config.get("n_shared_experts") or 0),
        score="sigmoid" if sigmoid else "softmax",
        normalise=config.get("norm_topk_prob", sigmoid),
        dense_layers=config.get("first_k_dense_replace", 0),
        router_bias=sigmoid,
    )
    latent = LatentShape(
        kv_rank=need(config, "kv_lora_rank"),
        rope_dim=rope,
        value_dim=need(config, "v_head_dim"),
        q_rank=config.get("q_lora_rank"),
    )
    grouped = (config.get("n_group") or 1) > 1
    return _rotary(
        config,
        kv_heads=None,
        head_dim=need(config, "qk_nope_head_dim") + rope,
        moe=moe,
        attention=AttentionShape(latent=latent),
        beyond=("experts of some groups only",) if grouped else (),
    )


def _gpt_oss(config: Config) -> ModelShape:
    moe = ExpertShape(
        experts=need(config, "num_local_experts"),
        top_k=config.get("num_experts_per_tok", config.get("experts_per_token", 4)),
        router_bias=True,
    )
    attention = _attention(config, sinks=True)
    return _rotary(config, bias=True, moe=moe, attention=attention, beyond=("a clamped gate",))


def _olmo2(config: Config) -> ModelShape:
    _no_biases(config)
    after = ("norms after each half of a block",)
    return _rotary(config, attention=AttentionShape(norm="all"), beyond=after)


def _smollm3(config: Config) -> ModelShape:
    return _llama(config, attention=_attention(config), beyond=("some blocks without positions",))


def _nemotron(config: Config) -> ModelShape:
    part = config.get("partial_rotary_factor", 0.5)
    said = () if part == 1 else (f"rotary positions of {part} of a head",)
    usual = {"rms_norm_eps": config.get("norm_eps", 1e-5)}
    return _llama({**usual, **config}, mlp="relu2", norm="layer", beyond=said)


def _gpt_neox(config: Config) -> ModelShape:
    if not config.get("attention_bias", True):
        raise StrettoError("attention_bias false of gpt_neox has no count here")
    part = config.get("rotary_pct", 0.25)
    said = ["attention beside the MLP"] * bool(config.get("use_parallel_residual", True))
    said += [f"rotary positions of {part} of a head"] * (part != 1)
    usual = {"rms_norm_eps": config.get("layer_norm_eps", 1e-5)}
    config_with_norm = {**usual, **config}
    return _rotary(config_with_norm, kv_heads=None, bias=True, mlp="gelu", norm="layer", beyond=said)


def _attention(config: Config, **beside: Any) -> AttentionShape:
    """With the window that the config has, if it uses one."""
    window = config.get("sliding_window")
    kinds: Sequence[str] | None = config.get("layer_types")
    if window is None or not config.get("use_sliding_window", True):
        return AttentionShape(**beside)
    if kinds is None:
        if (config.get("max_window_layers") or 0) > 0:
            raise StrettoError("a window in the blocks after max_window_layers has no cost here")
        return AttentionShape(
            window=window, full_every=2 if config["model_type"] == "gpt_oss" else 0, **beside
        )
    whole = [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"]
    if len(whole) == len(kinds):
        return AttentionShape(**beside)
    every = whole[0] if whole else 0
    if whole != [i + 1 for i in range(len(kinds)) if every and (i + 1) % every == 0]:
        raise StrettoError("layer_types have no regular order of full and sliding attention")
    return AttentionShape(window=window, full_every=every, **beside)


def _leading(dense: list[int]) -> int:
    """How many leading blocks these are."""
    if sorted(dense) != list(range(len(dense))):
        raise StrettoError(f"mlp_only_layers {dense} are not the first blocks, which alone can be planned")
    return len(dense)


_KINDS: dict[str, Callable[[Config], ModelShape]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "nemotron": _nemotron,
    "gpt_neox": _gpt_neox,
}
