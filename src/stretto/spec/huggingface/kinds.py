"""Every kind of model at Hugging Face that can be planned, and what its `config.json` says, as data.

Usual values are those that `transformers` 5.23 takes where a key is absent (its `configuration_*.py`); sizes
that every published file has must be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.spec.families import Family
from stretto.spec.huggingface.facts import Facts
from stretto.spec.huggingface.fields import COUNT, EXPERTS, FLAG, LAYERS, NUMBER, POSITIVE, Fields
from stretto.spec.huggingface.parts import (
    Always,
    Biases,
    Computed,
    Dropout,
    ExpertGroups,
    Implied,
    Key,
    LatentAttention,
    Noted,
    Part,
    Same,
    ScaledEmbedding,
    ScaledLogits,
    SharedExperts,
    SparseBlocks,
    Word,
)
from stretto.spec.huggingface.positions import Rope, Windows


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    name: its `model_type`.
    family: of the shapes that are read from it.
    architecture: the class in `transformers`.
    parts: what its keys say; later parts may use facts of earlier ones.
    silent: keys of its published files that change nothing that is computed.
    planned_only: it has parts without a module here.
    also: keys that are written beside those of the parts, for generation.
    """

    name: str
    family: Family
    architecture: str
    parts: tuple[Part, ...]
    silent: frozenset[str] = frozenset()
    planned_only: bool = False
    also: Mapping[str, Any] = field(default_factory=dict[str, Any])


_SILU = Always("hidden_act", ("silu", "swish"))
_NO_DROPOUT = Always("attention_dropout", (0.0, None))
_UNBIASED = Always("attention_bias", (False, None))


def _sizes(**changed: Key) -> tuple[Part, ...]:
    """The sizes that all kinds with rotary positions name alike; `changed` are other keys, or other usual
    values, by the fact that they say.
    """
    keys = (
        Key(theirs="num_hidden_layers", ours="layers", type=LAYERS),
        Key(theirs="hidden_size", ours="hidden"),
        Key(theirs="num_attention_heads", ours="heads", type=EXPERTS),
        Key(theirs="intermediate_size", ours="ffn"),
        Key(theirs="vocab_size", ours="vocab"),
        Key(theirs="max_position_embeddings", ours="sequence", usual=2048),
        Key(theirs="tie_word_embeddings", ours="tied", type=FLAG, usual=False),
        Key(theirs="rms_norm_eps", ours="norm_eps", type=POSITIVE, usual=1e-6),
    )
    return tuple(changed.get(key.ours, key) for key in keys)


def _heads(**changed: Key) -> tuple[Part, ...]:
    """Heads of keys and values, and the features of each."""
    keys = (
        Key(theirs="num_key_value_heads", ours="kv_heads", type=EXPERTS, usual=None, null=None),
        Key(theirs="head_dim", ours="head_dim", type=EXPERTS, usual=None, null=None),
    )
    heads = tuple(changed.get(key.ours, key) for key in keys)
    return (*heads, Computed(lambda facts: {"head_dim": facts["head_dim"] or _head_dim(facts)}))


def _head_dim(facts: Facts) -> int | None:
    divides = facts["hidden"] % facts["heads"] == 0
    return facts["hidden"] // facts["heads"] if divides else None  # None: the shape says what is wrong


def _key(theirs: str, ours: str, **more: Any) -> dict[str, Key]:
    return {ours: Key(theirs=theirs, ours=ours, **more)}


def _kv_heads(usual: int) -> dict[str, Key]:
    return _key("num_key_value_heads", "kv_heads", type=EXPERTS, usual=usual, null=None)


def _head_dims(usual: int) -> dict[str, Key]:
    return _key("head_dim", "head_dim", type=EXPERTS, usual=usual, null=None)


def _positions(usual: int) -> dict[str, Key]:
    return _key("max_position_embeddings", "sequence", usual=usual)


def _norm_eps(key: str) -> dict[str, Key]:
    return _key(key, "norm_eps", type=POSITIVE, usual=1e-5)


def _experts(count: str, *, ffn: str, balance: tuple[str, float]) -> tuple[Part, ...]:
    """Routed experts: the keys of their number and width, and of the balance loss. Its coefficient is taken
    as it stands, though theirs is of means over all layers at once, ours a sum over layers and samples.
    """
    other = "num_experts" if count != "num_experts" else "num_local_experts"
    return (
        Key(theirs=count, ours="moe.experts", type=EXPERTS, other=other),
        Key(theirs="num_experts_per_tok", ours="moe.top_k", type=EXPERTS, other="experts_per_token"),
        Key(theirs=ffn, ours="moe.ffn"),
        Key(theirs=balance[0], ours="moe.balance", type=NUMBER, usual=balance[1]),
    )


def _normalised(usual: bool) -> Key:
    return Key(theirs="norm_topk_prob", ours="moe.normalise", type=FLAG, usual=usual)


_GPT2 = Kind(
    name="gpt2",
    family="gpt",
    architecture="GPT2LMHeadModel",
    parts=(
        Key(theirs="n_layer", ours="layers", type=LAYERS, other="num_hidden_layers"),
        Key(theirs="n_embd", ours="hidden", other="hidden_size"),
        Key(theirs="n_head", ours="heads", type=EXPERTS, other="num_attention_heads"),
        Key(theirs="n_inner", ours="ffn", usual=None, null=None),
        Key(theirs="vocab_size", ours="vocab"),
        Key(theirs="n_positions", ours="sequence", other="max_position_embeddings"),
        Key(theirs="tie_word_embeddings", ours="tied", type=FLAG, usual=True),
        Key(theirs="layer_norm_epsilon", ours="norm_eps", type=POSITIVE, usual=1e-5),
        Dropout(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
        Always("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        Always("scale_attn_weights", (True,)),
        Always("scale_attn_by_inverse_layer_idx", (False,)),
        Always("add_cross_attention", (False,)),
        Implied({"position_embedding": "learned", "mlp": "gelu", "norm": "layer", "bias": True}),
    ),
    silent=frozenset({"reorder_and_upcast_attn"}),
)
_ATTENTION_BIAS = Biases(qkv=("attention_bias", False), proj=("attention_bias", False))
_ALL_BIASES = replace(_ATTENTION_BIAS, mlp=("mlp_bias", False))
_QWEN_WINDOWS = Windows(
    usual=4096, switched=True, by_block=True, pattern=lambda index, bound: index >= bound, layers_with=28
)
_QWEN_EXPERTS: tuple[Part, ...] = (
    *_experts("num_experts", ffn="moe_intermediate_size", balance=("router_aux_loss_coef", 0.001)),
    _normalised(False),
    SparseBlocks(),
)
_LLAMA = Kind(
    name="llama",
    family="llama",
    architecture="LlamaForCausalLM",
    parts=(*_sizes(), *_heads(), Rope(), _SILU, _NO_DROPOUT, _ALL_BIASES),
)
_MISTRAL = Kind(
    name="mistral",
    family="mistral",
    architecture="MistralForCausalLM",
    parts=(
        *_sizes(**_positions(131072)),
        *_heads(**_kv_heads(8)),
        Rope(),
        Windows(usual=4096),
        _SILU,
        _NO_DROPOUT,
    ),
)
_QWEN2 = Kind(
    name="qwen2",
    family="qwen2",
    architecture="Qwen2ForCausalLM",
    parts=(
        *_sizes(**_positions(32768)),
        *_heads(),
        Rope(),
        _QWEN_WINDOWS,
        _SILU,
        _NO_DROPOUT,
        Biases(qkv=True),
    ),
)
_QWEN3 = Kind(
    name="qwen3",
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    parts=(
        *_sizes(**_positions(32768)),
        *_heads(**_head_dims(128)),
        Rope(),
        _QWEN_WINDOWS,
        _SILU,
        _NO_DROPOUT,
        _ATTENTION_BIAS,
        Implied({"attention.norm": "head"}),
    ),
)
_MIXTRAL = Kind(
    name="mixtral",
    family="mixtral",
    architecture="MixtralForCausalLM",
    parts=(
        *_sizes(**_positions(131072), **_norm_eps("rms_norm_eps")),
        *_heads(**_kv_heads(8)),
        Rope(theta=1e6),
        Windows(),
        _SILU,
        _NO_DROPOUT,
        *_experts("num_local_experts", ffn="intermediate_size", balance=("router_aux_loss_coef", 0.001)),
        Always("router_jitter_noise", (0.0,)),
    ),
)
_QWEN2_MOE = Kind(
    name="qwen2_moe",
    family="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    parts=(
        *_sizes(**_positions(32768)),
        *_heads(**_kv_heads(16)),
        Rope(),
        replace(_QWEN_WINDOWS, pattern=lambda index, bound: index % 2 == 0 and index < bound),
        _SILU,
        _NO_DROPOUT,
        Biases(qkv=("qkv_bias", True)),
        *_QWEN_EXPERTS,
        Key(theirs="shared_expert_intermediate_size", ours="moe.shared_ffn", type=COUNT),
        Implied({"moe.shared_gate": True}),
    ),
)
_QWEN3_MOE = Kind(
    name="qwen3_moe",
    family="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    parts=(
        *_sizes(**_positions(32768)),
        *_heads(**_kv_heads(4)),
        Rope(),
        Windows(usual=4096, switched=True),
        _SILU,
        _NO_DROPOUT,
        _ATTENTION_BIAS,
        Implied({"attention.norm": "head"}),
        *_QWEN_EXPERTS,
    ),
    silent=frozenset({"max_window_layers"}),  # transformers' class does without
)
_GEMMA: tuple[Part, ...] = (
    Key(theirs="query_pre_attn_scalar", ours="attention.query_scale", usual=256),
    _ATTENTION_BIAS,
    Always("hidden_activation", ("gelu_pytorch_tanh", "gelu_new")),
    Always("use_bidirectional_attention", (None, False)),
    _NO_DROPOUT,
    Implied({"mlp": "geglu", "norm": "rms1p", "block_norms": "sandwich"}),
    Computed(lambda facts: {"embedding_scale": facts["hidden"] ** 0.5}),
)
_GEMMA_SIZES = {
    **_key("num_attention_heads", "heads", type=EXPERTS, usual=8),
    **_key("tie_word_embeddings", "tied", type=FLAG, usual=True),
}
_GEMMA_HEADS = _heads(**_kv_heads(4), **_head_dims(256))
_OF_GEMMA = frozenset({"hidden_act"})  # `hidden_activation` counts
_GEMMA2 = Kind(
    name="gemma2",
    family="gemma2",
    architecture="Gemma2ForCausalLM",
    parts=(
        *_sizes(**_GEMMA_SIZES, **_positions(8192)),
        *_GEMMA_HEADS,
        Rope(),
        Windows(usual=4096, by_block=True, pattern=lambda index, bound: index % 2 == 0),
        Key(theirs="final_logit_softcapping", ours="logit_softcap", type=NUMBER, usual=30.0, null=0.0),
        Key(theirs="attn_logit_softcapping", ours="attention.softcap", type=NUMBER, usual=50.0, null=None),
        *_GEMMA,
    ),
    silent=_OF_GEMMA,
)
_GEMMA3 = Kind(
    name="gemma3_text",
    family="gemma3",
    architecture="Gemma3ForCausalLM",
    parts=(
        *_sizes(**_GEMMA_SIZES, **_positions(131072), **_key("vocab_size", "vocab", usual=262208)),
        *_GEMMA_HEADS,
        Rope(theta=1e6, local=10000.0),
        Windows(usual=4096, by_block=True, pattern=lambda index, bound: (index + 1) % bound != 0, period=6),
        Key(theirs="final_logit_softcapping", ours="logit_softcap", type=NUMBER, usual=None, null=0.0),
        Always("attn_logit_softcapping", (None,)),  # transformers' attention of Gemma 3 does without
        Implied({"attention.norm": "head"}),
        *_GEMMA,
    ),
    silent=_OF_GEMMA,
)
_GPT_OSS = Kind(
    name="gpt_oss",
    family="gpt_oss",
    architecture="GptOssForCausalLM",
    parts=(
        *_sizes(**_positions(131072), **_norm_eps("rms_norm_eps")),
        *_heads(**_kv_heads(8), **_head_dims(64)),
        Rope(
            theta=150000.0,
            scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        ),
        Windows(usual=128, by_block=True, pattern=lambda index, bound: index % 2 == 0),
        _SILU,
        _NO_DROPOUT,
        Biases(mlp=True, qkv=("attention_bias", True), proj=("attention_bias", True)),
        *_experts("num_local_experts", ffn="intermediate_size", balance=("router_aux_loss_coef", 0.001)),
        Always("swiglu_limit", (7.0,)),
        Always("swiglu_alpha", (1.702,)),
        Implied({"mlp": "swiglu_clamped", "attention.sinks": True, "moe.router_bias": True}),
    ),
    silent=frozenset({"initial_context_length"}),
)
_DEEPSEEK: tuple[Part, ...] = (
    *_sizes(),
    LatentAttention(),
    Rope(),
    _SILU,
    _NO_DROPOUT,
    _ATTENTION_BIAS,
    Always("moe_layer_freq", (1,)),
    Always("seq_aux", (True,)),
    *_experts("n_routed_experts", ffn="moe_intermediate_size", balance=("aux_loss_alpha", 0.0)),
)
_OF_DEEPSEEK = frozenset({"ep_size", "num_nextn_predict_layers", "num_mtp_layers"})
_DEEPSEEK_V2 = Kind(
    name="deepseek_v2",
    family="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    parts=(
        *_DEEPSEEK,
        SharedExperts(2),
        ExpertGroups(switch=True, usual=(1, 1)),
        Key(theirs="first_k_dense_replace", ours="moe.dense_layers", type=COUNT, usual=0),
        Key(theirs="routed_scaling_factor", ours="moe.scale", type=NUMBER, usual=1.0),
        Always("scoring_func", ("softmax",)),
        Always("norm_topk_prob", (False, None)),  # transformers' router never scales weights to sum to one
        Always("mlp_bias", (False,)),
        Implied({"attention.interleaved": True, "moe.normalise": False}),
    ),
    silent=_OF_DEEPSEEK,
)
_DEEPSEEK_V3 = Kind(
    name="deepseek_v3",
    family="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    parts=(
        *_DEEPSEEK,
        SharedExperts(1),
        ExpertGroups(switch=False, usual=(8, 4)),
        Key(theirs="first_k_dense_replace", ours="moe.dense_layers", type=COUNT, usual=3, null=0),
        Key(theirs="routed_scaling_factor", ours="moe.scale", type=NUMBER, usual=2.5),
        Key(theirs="rope_interleave", ours="attention.interleaved", type=FLAG, usual=True, null=False),
        _normalised(True),
        Always("scoring_func", ("sigmoid",)),
        Implied({"moe.score": "sigmoid", "moe.correction": True}),
    ),
    silent=_OF_DEEPSEEK,
)


_T5 = Kind(
    name="t5",
    family="t5",
    architecture="T5ForConditionalGeneration",
    parts=(
        Key(theirs="num_layers", ours="encoder_layers", type=LAYERS),
        Key(theirs="num_decoder_layers", ours="layers", type=LAYERS, usual=None, null=None),
        Computed(lambda facts: {"layers": facts["layers"] or facts["encoder_layers"]}),
        Key(theirs="d_model", ours="hidden"),
        Key(theirs="num_heads", ours="heads", type=EXPERTS),
        Key(theirs="d_kv", ours="head_dim", type=EXPERTS, usual=64),
        Key(theirs="d_ff", ours="ffn"),
        Key(theirs="vocab_size", ours="vocab"),
        Key(theirs="n_positions", ours="sequence", usual=512),
        Key(theirs="tie_word_embeddings", ours="tied", type=FLAG, usual=True),
        Key(theirs="layer_norm_epsilon", ours="norm_eps", type=POSITIVE, usual=1e-6),
        Key(theirs="relative_attention_num_buckets", ours="attention.buckets", usual=32),
        Key(theirs="relative_attention_max_distance", ours="attention.max_distance", usual=128),
        Word(
            theirs="feed_forward_proj",
            ours="mlp",
            words={"relu": "relu", "gated-gelu": "geglu", "gated-gelu_new": "geglu", "gelu_new": "gelu"},
            usual="relu",
        ),
        Dropout(("dropout_rate",), 0.1),
        ScaledLogits(),
        Implied({"position_embedding": "relative", "attention.query_scale": 1.0}),
    ),
    silent=frozenset(
        {
            "initializer_factor",
            "classifier_dropout",
            "dense_act_fn",
            "is_gated_act",
            "output_past",
            "num_hidden_layers",
        }
    ),
    also={"is_encoder_decoder": True, "pad_token_id": 0, "decoder_start_token_id": 0},
)
_BART = Kind(
    name="bart",
    family="bart",
    architecture="BartForConditionalGeneration",
    parts=(
        Key(theirs="encoder_layers", ours="encoder_layers", type=LAYERS),
        Key(theirs="decoder_layers", ours="layers", type=LAYERS),
        Key(theirs="d_model", ours="hidden"),
        Key(theirs="decoder_attention_heads", ours="heads", type=EXPERTS),
        Same(theirs="encoder_attention_heads", ours="heads"),
        Key(theirs="decoder_ffn_dim", ours="ffn"),
        Same(theirs="encoder_ffn_dim", ours="ffn"),
        Key(theirs="vocab_size", ours="vocab"),
        Key(theirs="max_position_embeddings", ours="sequence", usual=1024),
        Key(theirs="tie_word_embeddings", ours="tied", type=FLAG, usual=True),
        Dropout(("dropout",), 0.1),
        Always("activation_function", ("gelu",)),
        Always("normalize_before", (False,)),
        Always("add_final_layer_norm", (False,)),
        Always("normalize_embedding", (True,)),
        Always("static_position_embeddings", (False,)),
        ScaledEmbedding(),
        Implied(
            {
                "position_embedding": "learned",
                "mlp": "gelu_exact",
                "norm": "layer",
                "norm_eps": 1e-5,
                "block_norms": "post",
                "bias": True,
                "embedding_norm": True,
            }
        ),
    ),
    silent=frozenset(
        {
            "attention_dropout",  # in training our models have one rate, for all but activations
            "activation_dropout",
            "classifier_dropout",
            "classif_dropout",
            "encoder_layerdrop",
            "decoder_layerdrop",
            "init_std",
            "add_bias_logits",
            "extra_pos_embeddings",
            "num_hidden_layers",
            "output_past",
            "force_bos_token_to_be_generated",
        }
    ),
    also={"is_encoder_decoder": True, "pad_token_id": 1, "decoder_start_token_id": 2},
)


def _no_positions(config: Fields) -> list[str]:
    config.numbers("no_rope_layers")
    config.get("no_rope_layer_interval", COUNT, 4, 0)
    return ["some blocks without positions"]


def _beside(config: Fields) -> list[str]:
    return ["attention beside the MLP"] * bool(config.get("use_parallel_residual", FLAG, True))


# of these there are costs, and no modules
_PLANNED = (
    Kind(
        name="olmo2",
        family="llama",
        architecture="Olmo2ForCausalLM",
        parts=(
            *_sizes(**_norm_eps("rms_norm_eps")),
            *_heads(),
            Rope(),
            _SILU,
            _NO_DROPOUT,
            Always("attention_bias", (False,)),
            Implied({"attention.norm": "all"}),
            Noted(lambda config: ["norms after each half of a block"]),
        ),
        planned_only=True,
    ),
    Kind(
        name="smollm3",
        family="llama",
        architecture="SmolLM3ForCausalLM",
        parts=(
            *_sizes(**_positions(32768)),
            *_heads(**_kv_heads(4)),
            Rope(theta=2e6),
            Windows(switched=True, by_block=True),
            _SILU,
            _NO_DROPOUT,
            _ALL_BIASES,
            Noted(_no_positions),
        ),
        silent=frozenset({"max_window_layers"}),
        planned_only=True,
    ),
    Kind(
        name="nemotron",
        family="llama",
        architecture="NemotronForCausalLM",
        parts=(
            *_sizes(**_norm_eps("norm_eps"), **_positions(4096)),
            *_heads(),
            Rope(turned=0.5),
            Always("hidden_act", ("relu2",)),
            _NO_DROPOUT,
            _ALL_BIASES,
            Implied({"mlp": "relu2", "norm": "layer"}),
        ),
        planned_only=True,
    ),
    Kind(
        name="gpt_neox",
        family="llama",
        architecture="GPTNeoXForCausalLM",
        parts=(
            *_sizes(**_norm_eps("layer_norm_eps")),
            Rope(turned=0.25),
            Always("hidden_act", ("gelu", "gelu_new", "gelu_fast")),
            Always("attention_bias", (True,)),
            _NO_DROPOUT,
            Always("hidden_dropout", (0.0,)),
            Implied({"mlp": "gelu", "norm": "layer", "bias": True}),
            Noted(_beside),
        ),
        silent=frozenset({"classifier_dropout", "rotary_emb_base", "rotary_pct"}),
        planned_only=True,
    ),
)

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        _GPT2,
        _LLAMA,
        _MISTRAL,
        _QWEN2,
        _QWEN3,
        _MIXTRAL,
        _QWEN2_MOE,
        _QWEN3_MOE,
        _GEMMA2,
        _GEMMA3,
        _GPT_OSS,
        _DEEPSEEK_V2,
        _DEEPSEEK_V3,
        _T5,
        _BART,
        *_PLANNED,
    )
}
