"""Every kind of model at Hugging Face that can be planned, and the meaning of its `config.json`, as data.

Defaults are those that `transformers` 5.23 takes for absent keys (its `configuration_*.py`); sizes that every
published file has are required.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.job.families import Family
from stretto.job.huggingface.fields import ShapeFields
from stretto.job.huggingface.keys import COUNT, EXPERTS, FLAG, LAYERS, NUMBER, POSITIVE, WORD, ConfigKeys
from stretto.job.huggingface.positions import Rope, Windows
from stretto.job.huggingface.rules import (
    Derived,
    Dropout,
    EqualSize,
    ExpertGroups,
    Fixed,
    HiddenScale,
    Key,
    KeyRule,
    LatentAttentionRule,
    SharedExperts,
    SparseBlocks,
)
from stretto.job.huggingface.silent import BART, T5


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """A kind of model.

    Attributes:
        name: the `model_type`.
        family: the family of the shapes that are read.
        architecture: the class in `transformers`.
        rules: the rules of its keys; later rules may use fields of earlier ones.
        implied: fields without a key, the same in all models of the kind.
        silent: keys of published files that do not affect the computation.
        planned_only: the model has parts that Stretto has no module for.
        also: additional keys to write, for generation.
    """

    name: str = field(kw_only=False)
    family: Family = field(kw_only=False)
    architecture: str = field(kw_only=False)
    rules: tuple[KeyRule, ...]
    implied: Mapping[str, Any] = field(default_factory=dict[str, Any])
    silent: frozenset[str] = frozenset()
    planned_only: bool = False
    also: Mapping[str, Any] = field(default_factory=dict[str, Any])


_NO_DROPOUT = Fixed("attention_dropout", (0.0, None))


def _sizes(*changed: Key) -> tuple[KeyRule, ...]:
    """Return the keys of sizes that all kinds with rotary positions share; a key in `changed` replaces the
    one of the same field.
    """
    keys = (
        Key("num_hidden_layers", "layers", LAYERS),
        Key("hidden_size", "hidden"),
        Key("num_attention_heads", "heads", EXPERTS),
        Key("intermediate_size", "ffn"),
        Key("vocab_size", "vocab"),
        Key("max_position_embeddings", "sequence", default=2048),
        Key("tie_word_embeddings", "tied", FLAG, default=False),
        Key("rms_norm_eps", "norm_eps", POSITIVE, default=1e-6),
    )
    by_field = {key.field: key for key in changed}
    return tuple(by_field.get(key.field, key) for key in keys)


def _head_dim(config: ConfigKeys, fields: ShapeFields) -> ShapeFields:
    """Return hidden / heads if a file has no `head_dim`, or None if that is not a whole number, which the
    shape reports.
    """
    divides = fields["hidden"] % fields["heads"] == 0
    return {"head_dim": fields["head_dim"] or (fields["hidden"] // fields["heads"] if divides else None)}


def _llama(
    *changed: Key, rope: Rope | None = None, activations: tuple[str, ...] = ("silu", "swish")
) -> tuple[KeyRule, ...]:
    """Return the keys of a model like Llama, without those of biases and windows.

    Args:
        changed: as in `_sizes`.
        activations: allowed values of `hidden_act`; if empty, the key is not read.
    """
    by_field = {key.field: key for key in changed}
    heads = (
        Key("num_key_value_heads", "kv_heads", EXPERTS, default=None, null=None),
        Key("head_dim", "head_dim", EXPERTS, default=None, null=None),
    )
    return (
        *_sizes(*changed),
        *(by_field.get(key.field, key) for key in heads),
        Derived(_head_dim),
        rope or Rope(),
        *([Fixed("hidden_act", activations)] if activations else ()),
        _NO_DROPOUT,
    )


def _positions(default: int) -> Key:
    return Key("max_position_embeddings", "sequence", default=default)


def _kv_heads(default: int) -> Key:
    return Key("num_key_value_heads", "kv_heads", EXPERTS, default=default, null=None)


def _head_width(default: int) -> Key:
    return Key("head_dim", "head_dim", EXPERTS, default=default, null=None)


def _norm_eps(key: str) -> Key:
    return Key(key, "norm_eps", POSITIVE, default=1e-5)


def _experts(count: str, *, ffn: str, balance: tuple[str, float]) -> tuple[KeyRule, ...]:
    """Return the keys of the number and width of routed experts, and of the balance loss. Its coefficient is
    taken unchanged, although transformers takes means over all layers at once, and Stretto a sum over layers
    and samples.
    """
    other = "num_experts" if count != "num_experts" else "num_local_experts"
    return (
        Key(count, "moe.experts", EXPERTS, other=other),
        Key("num_experts_per_tok", "moe.top_k", EXPERTS, other="experts_per_token"),
        Key(ffn, "moe.ffn"),
        Key(balance[0], "moe.balance", NUMBER, default=balance[1]),
    )


def _normalise(default: bool) -> Key:
    return Key("norm_topk_prob", "moe.normalise", FLAG, default=default)


def _attention_bias(default: bool) -> tuple[KeyRule, ...]:
    """Return the rules of the one key for biases of queries, keys, values and attention's projection."""
    fields = ("attention.qkv_bias", "attention.proj_bias")
    return tuple(Key("attention_bias", name, FLAG, default=default) for name in fields)


def _more_unbuilt(fields: ShapeFields, *features: str) -> ShapeFields:
    """Return the features that Stretto has no module for, with these added."""
    return {"unmodelled_features": (*fields.get("unmodelled_features", ()), *features)}


def _without_positions(config: ConfigKeys, fields: ShapeFields) -> ShapeFields:
    config.numbers("no_rope_layers")
    config.get("no_rope_layer_interval", COUNT, 4, 0)
    return _more_unbuilt(fields, "some blocks without positions")


def _parallel_residual(config: ConfigKeys, fields: ShapeFields) -> ShapeFields:
    parallel = config.get("use_parallel_residual", FLAG, True)
    return _more_unbuilt(fields, *(["attention parallel to the MLP"] if parallel else []))


_ALL_BIASES = (Key("mlp_bias", "bias", FLAG, default=False), *_attention_bias(False))
_QWEN_WINDOWS = Windows(
    default=4096, switched=True, by_block=True, pattern=lambda index, bound: index >= bound, layers_with=28
)
_QWEN_EXPERTS: tuple[KeyRule, ...] = (
    *_experts("num_experts", ffn="moe_intermediate_size", balance=("router_aux_loss_coef", 0.001)),
    _normalise(False),
    SparseBlocks(),
)
_LOCAL_EXPERTS = _experts(
    "num_local_experts", ffn="intermediate_size", balance=("router_aux_loss_coef", 0.001)
)
_GEMMA_SIZES = (
    Key("num_attention_heads", "heads", EXPERTS, default=8),
    Key("tie_word_embeddings", "tied", FLAG, default=True),
    _kv_heads(4),
    _head_width(256),
)
_GEMMA: tuple[KeyRule, ...] = (
    Key("query_pre_attn_scalar", "attention.query_scale", default=256),
    *_attention_bias(False),
    Fixed("hidden_activation", ("gelu_pytorch_tanh", "gelu_new")),
    Fixed("use_bidirectional_attention", (None, False)),
    Derived(lambda config, fields: {"embedding_scale": fields["hidden"] ** 0.5}),
)
_GEMMA_FIELDS = {"mlp": "geglu", "norm": "rms1p", "block_norms": "sandwich"}
_DEEPSEEK: tuple[KeyRule, ...] = (
    *_sizes(),
    LatentAttentionRule(),
    Rope(),
    Fixed("hidden_act", ("silu", "swish")),
    _NO_DROPOUT,
    *_attention_bias(False),
    Fixed("moe_layer_freq", (1,)),
    Fixed("seq_aux", (True,)),
    *_experts("n_routed_experts", ffn="moe_intermediate_size", balance=("aux_loss_alpha", 0.0)),
)
_DEEPSEEK_SILENT = frozenset({"ep_size", "num_nextn_predict_layers", "num_mtp_layers"})

_TYPES = (
    ModelType(
        "gpt2",
        "gpt",
        "GPT2LMHeadModel",
        rules=(
            Key("n_layer", "layers", LAYERS, other="num_hidden_layers"),
            Key("n_embd", "hidden", other="hidden_size"),
            Key("n_head", "heads", EXPERTS, other="num_attention_heads"),
            Key("n_inner", "ffn", default=None, null=None),
            Key("vocab_size", "vocab"),
            Key("n_positions", "sequence", other="max_position_embeddings"),
            Key("tie_word_embeddings", "tied", FLAG, default=True),
            Key("layer_norm_epsilon", "norm_eps", POSITIVE, default=1e-5),
            Dropout(("resid_pdrop", "embd_pdrop", "attn_pdrop")),
            Fixed("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
            Fixed("scale_attn_weights", (True,)),
            Fixed("scale_attn_by_inverse_layer_idx", (False,)),
            Fixed("add_cross_attention", (False,)),
        ),
        implied={"position_embedding": "learned", "mlp": "gelu", "norm": "layer", "bias": True},
        silent=frozenset({"reorder_and_upcast_attn"}),
    ),
    ModelType("llama", "llama", "LlamaForCausalLM", rules=(*_llama(), *_ALL_BIASES)),
    ModelType(
        "mistral",
        "mistral",
        "MistralForCausalLM",
        rules=(*_llama(_positions(131072), _kv_heads(8)), Windows(default=4096)),
    ),
    ModelType(
        "qwen2",
        "qwen2",
        "Qwen2ForCausalLM",
        rules=(*_llama(_positions(32768)), _QWEN_WINDOWS),
        implied={"attention.qkv_bias": True},
    ),
    ModelType(
        "qwen3",
        "qwen3",
        "Qwen3ForCausalLM",
        rules=(*_llama(_positions(32768), _head_width(128)), _QWEN_WINDOWS, *_attention_bias(False)),
        implied={"attention.norm": "head"},
    ),
    ModelType(
        "mixtral",
        "mixtral",
        "MixtralForCausalLM",
        rules=(
            *_llama(_positions(131072), _norm_eps("rms_norm_eps"), _kv_heads(8), rope=Rope(theta=1e6)),
            Windows(),
            *_LOCAL_EXPERTS,
            Fixed("router_jitter_noise", (0.0,)),
        ),
    ),
    ModelType(
        "qwen2_moe",
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        rules=(
            *_llama(_positions(32768), _kv_heads(16)),
            replace(_QWEN_WINDOWS, pattern=lambda index, bound: index % 2 == 0 and index < bound),
            Key("qkv_bias", "attention.qkv_bias", FLAG, default=True),
            *_QWEN_EXPERTS,
            Key("shared_expert_intermediate_size", "moe.shared_ffn", COUNT),
        ),
        implied={"moe.shared_gate": True},
    ),
    ModelType(
        "qwen3_moe",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        rules=(
            *_llama(_positions(32768), _kv_heads(4)),
            Windows(default=4096, switched=True),
            *_attention_bias(False),
            *_QWEN_EXPERTS,
        ),
        implied={"attention.norm": "head"},
        silent=frozenset({"max_window_layers"}),  # transformers' class does without
    ),
    ModelType(
        "gemma2",
        "gemma2",
        "Gemma2ForCausalLM",
        rules=(
            *_llama(*_GEMMA_SIZES, _positions(8192), activations=()),
            Windows(default=4096, by_block=True, pattern=lambda index, bound: index % 2 == 0),
            Key("final_logit_softcapping", "logit_softcap", NUMBER, default=30.0, null=0.0),
            Key("attn_logit_softcapping", "attention.softcap", NUMBER, default=50.0, null=None),
            *_GEMMA,
        ),
        implied=_GEMMA_FIELDS,
        silent=frozenset({"hidden_act"}),  # `hidden_activation` counts
    ),
    ModelType(
        "gemma3_text",
        "gemma3",
        "Gemma3ForCausalLM",
        rules=(
            *_llama(
                *_GEMMA_SIZES,
                _positions(131072),
                Key("vocab_size", "vocab", default=262208),
                rope=Rope(theta=1e6, local=10000.0),
                activations=(),
            ),
            Windows(
                default=4096, by_block=True, pattern=lambda index, bound: (index + 1) % bound != 0, period=6
            ),
            Key("final_logit_softcapping", "logit_softcap", NUMBER, default=None, null=0.0),
            Fixed("attn_logit_softcapping", (None,)),  # transformers' attention of Gemma 3 does without
            *_GEMMA,
        ),
        implied={**_GEMMA_FIELDS, "attention.norm": "head"},
        silent=frozenset({"hidden_act"}),
    ),
    ModelType(
        "gpt_oss",
        "gpt_oss",
        "GptOssForCausalLM",
        rules=(
            *_llama(
                _positions(131072),
                _norm_eps("rms_norm_eps"),
                _kv_heads(8),
                _head_width(64),
                rope=Rope(
                    theta=150000.0,
                    scaling={
                        "rope_type": "yarn",
                        "factor": 32.0,
                        "original_max_position_embeddings": 4096,
                        "truncate": False,
                    },
                ),
            ),
            Windows(default=128, by_block=True, pattern=lambda index, bound: index % 2 == 0),
            *_attention_bias(True),
            *_LOCAL_EXPERTS,
            Fixed("swiglu_limit", (7.0,)),
            Fixed("swiglu_alpha", (1.702,)),
        ),
        implied={"mlp": "swiglu_clamped", "bias": True, "attention.sinks": True, "moe.router_bias": True},
        silent=frozenset({"initial_context_length"}),
    ),
    ModelType(
        "deepseek_v2",
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        rules=(
            *_DEEPSEEK,
            SharedExperts(2),
            ExpertGroups(switch=True, default=(1, 1)),
            Key("first_k_dense_replace", "moe.dense_layers", COUNT, default=0),
            Key("routed_scaling_factor", "moe.scale", NUMBER, default=1.0),
            Fixed("scoring_func", ("softmax",)),
            Fixed("norm_topk_prob", (False, None)),  # transformers' router never scales weights to sum to one
            Fixed("mlp_bias", (False,)),
        ),
        implied={"attention.interleaved": True, "moe.normalise": False},
        silent=_DEEPSEEK_SILENT,
    ),
    ModelType(
        "deepseek_v3",
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        rules=(
            *_DEEPSEEK,
            SharedExperts(1),
            ExpertGroups(switch=False, default=(8, 4)),
            Key("first_k_dense_replace", "moe.dense_layers", COUNT, default=3, null=0),
            Key("routed_scaling_factor", "moe.scale", NUMBER, default=2.5),
            Key("rope_interleave", "attention.interleaved", FLAG, default=True, null=False),
            _normalise(True),
            Fixed("scoring_func", ("sigmoid",)),
        ),
        implied={"moe.score": "sigmoid", "moe.correction": True},
        silent=_DEEPSEEK_SILENT,
    ),
    ModelType(
        "t5",
        "t5",
        "T5ForConditionalGeneration",
        rules=(
            Key("num_layers", "encoder_layers", LAYERS),
            Key("num_decoder_layers", "layers", LAYERS, default=None, null=None),
            Derived(lambda config, fields: {"layers": fields["layers"] or fields["encoder_layers"]}),
            Key("d_model", "hidden"),
            Key("num_heads", "heads", EXPERTS),
            Key("d_kv", "head_dim", EXPERTS, default=64),
            Key("d_ff", "ffn"),
            Key("vocab_size", "vocab"),
            Key("n_positions", "sequence", default=512),
            Key("tie_word_embeddings", "tied", FLAG, default=True),
            Key("layer_norm_epsilon", "norm_eps", POSITIVE, default=1e-6),
            Key("relative_attention_num_buckets", "attention.buckets", default=32),
            Key("relative_attention_max_distance", "attention.max_distance", default=128),
            Key(
                "feed_forward_proj",
                "mlp",
                WORD,
                values={"relu": "relu", "gated-gelu": "geglu", "gated-gelu_new": "geglu", "gelu_new": "gelu"},
                default="relu",
            ),
            Dropout(("dropout_rate",)),
            HiddenScale("scale_decoder_outputs", "logit_scale", -0.5, None),  # which transformers 5 writes
        ),
        implied={"position_embedding": "relative", "attention.query_scale": 1.0},
        silent=T5,
        also={"is_encoder_decoder": True, "pad_token_id": 0, "decoder_start_token_id": 0},
    ),
    ModelType(
        "bart",
        "bart",
        "BartForConditionalGeneration",
        rules=(
            Key("encoder_layers", "encoder_layers", LAYERS),
            Key("decoder_layers", "layers", LAYERS),
            Key("d_model", "hidden"),
            Key("decoder_attention_heads", "heads", EXPERTS),
            EqualSize("encoder_attention_heads", "heads"),
            Key("decoder_ffn_dim", "ffn"),
            EqualSize("encoder_ffn_dim", "ffn"),
            Key("vocab_size", "vocab"),
            Key("max_position_embeddings", "sequence", default=1024),
            Key("tie_word_embeddings", "tied", FLAG, default=True),
            Dropout(("dropout",)),
            Fixed("activation_function", ("gelu",)),
            Fixed("normalize_before", (False,)),
            Fixed("add_final_layer_norm", (False,)),
            Fixed("normalize_embedding", (True,)),
            Fixed("static_position_embeddings", (False,)),
            HiddenScale("scale_embedding", "embedding_scale", 0.5, False),
        ),
        implied={
            "position_embedding": "learned",
            "mlp": "gelu_exact",
            "norm": "layer",
            "norm_eps": 1e-5,
            "block_norms": "post",
            "bias": True,
            "embedding_norm": True,
        },
        silent=BART,
        also={"is_encoder_decoder": True, "pad_token_id": 1, "decoder_start_token_id": 2},
    ),
    # Stretto has costs of these, but no modules
    ModelType(
        "olmo2",
        "llama",
        "Olmo2ForCausalLM",
        rules=(*_llama(_norm_eps("rms_norm_eps")), Fixed("attention_bias", (False,))),
        implied={"attention.norm": "all", "unmodelled_features": ("norms after each half of a block",)},
        planned_only=True,
    ),
    ModelType(
        "smollm3",
        "llama",
        "SmolLM3ForCausalLM",
        rules=(
            *_llama(_positions(32768), _kv_heads(4), rope=Rope(theta=2e6)),
            Windows(switched=True, by_block=True),
            *_ALL_BIASES,
            Derived(_without_positions),
        ),
        silent=frozenset({"max_window_layers"}),
        planned_only=True,
    ),
    ModelType(
        "nemotron",
        "llama",
        "NemotronForCausalLM",
        rules=(
            *_llama(_norm_eps("norm_eps"), _positions(4096), rope=Rope(partial=0.5), activations=("relu2",)),
            *_ALL_BIASES,
        ),
        implied={"mlp": "relu2", "norm": "layer"},
        planned_only=True,
    ),
    ModelType(
        "gpt_neox",
        "llama",
        "GPTNeoXForCausalLM",
        rules=(
            *_sizes(_norm_eps("layer_norm_eps")),
            Rope(partial=0.25),
            Fixed("hidden_act", ("gelu", "gelu_new", "gelu_fast")),
            Fixed("attention_bias", (True,)),
            _NO_DROPOUT,
            Fixed("hidden_dropout", (0.0,)),
            Derived(_parallel_residual),
        ),
        implied={"mlp": "gelu", "norm": "layer", "bias": True},
        silent=frozenset({"classifier_dropout", "rotary_emb_base", "rotary_pct"}),
        planned_only=True,
    ),
)
MODEL_TYPES: Mapping[str, ModelType] = {model_type.name: model_type for model_type in _TYPES}
