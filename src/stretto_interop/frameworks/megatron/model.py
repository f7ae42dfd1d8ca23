"""The model's sizes in Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.spec.attention import RopeScaling
from stretto.spec.initial import Initial
from stretto.spec.lora import LoraShape
from stretto.spec.presets import preset
from stretto_interop.frameworks.choices import Choices
from stretto_interop.frameworks.mapping import (
    Rule,
    Settings,
    flag,
    only,
    refused,
    rule,
    same,
    without,
    without_encoder,
)
from stretto_interop.frameworks.megatron.experts import EXPERTS, ffn_of

# entries of tokenizers that come without --vocab-size; others are looked up by the model's name
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
# tokenizers of one file, or a folder
_FILES = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
)
# why others are not read
_UNREAD = {
    "TikTokenizer": "its JSON of ranks says neither the special tokens before them nor the expression that"
    " cuts text into words",
    **dict.fromkeys(
        ("BertWordPieceLowerCase", "BertWordPieceCase"), "a vocab.txt does not say how text is cleaned"
    ),
    **dict.fromkeys(("MultimodalTokenizer", "NullMultimodalTokenizer"), "it is for text with images"),
    "SFTTokenizer": "its chat templates are Megatron-LM's own; data.chat takes that of a tokenizer.json",
}
_PAIR = ("vocab.json", "merges.txt")
_POSITIONS = {"rope": "rotary", "yarn": "rotary", "learned_absolute": "learned"}
_FAMILIES = {"rotary": "llama", "learned": "gpt"}
_ROPE = "model.rope"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
_QUICK = {"glu-linear-offset": 1.0, "activation-func-clamp-value": 7.0}  # of gpt-oss's gate, as ours
_ROUND = "yarn-correction-range-round-to-int"


# ------------------------------------------------------------------ family: positions, MLP, norm, biases


def _family_notes(choices: Choices) -> Iterable[str]:
    yield f"model.family={choices['model.family']}: a name for usual values, which are written one by one"


def _write_positions(choices: Choices) -> Settings:
    rotary = choices["model.position_embedding"] == "rotary"
    base = {"rotary-base": int(choices["model.rope_theta"])} if rotary else {}
    yarn = choices[f"{_ROPE}.type"] == "yarn" and choices[f"{_LATENT}.kv_rank"] is None
    kind = "yarn" if yarn else "rope"
    return {"position-embedding-type": kind if rotary else "learned_absolute", **base}


def _read_positions(settings: Settings) -> Mapping[str, Any]:
    kind = positions_of(settings)
    return {
        "model.family": _FAMILIES[kind],
        "model.position_embedding": kind,
        "model.rope_theta": float(settings.get("rotary-base", 10000)),
    }


def _write_rope(choices: Choices) -> Settings:
    """Scaled rotary positions: Llama 3.1's with its usual bounds, and yarn's, of latent attention too."""
    kind = choices[f"{_ROPE}.type"]
    if kind is None:
        return {}
    instead = "Megatron-LM scales rotary positions as Llama 3.1, or by yarn"
    if kind == "llama3":
        for name, usual in _LLAMA3.items():
            if choices[f"{_ROPE}.{name}"] != usual:
                raise refused(f"{_ROPE}.{name}", choices[f"{_ROPE}.{name}"], instead, (usual,))
        return {"use-rope-scaling": True, "rope-scaling-factor": choices[f"{_ROPE}.factor"]}
    if kind != "yarn":
        raise refused(f"{_ROPE}.type", kind, instead, ("llama3", "yarn"))
    if choices[f"{_LATENT}.kv_rank"] is None:
        return _write_yarn(choices)
    fixed = {
        "original_positions": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
    }
    for name, usual in fixed.items():
        if choices[f"{_ROPE}.{name}"] != usual:
            raise refused(f"{_ROPE}.{name}", choices[f"{_ROPE}.{name}"], instead, (usual,))
    return {
        "rope-type": "yarn",
        "rotary-scaling-factor": choices[f"{_ROPE}.factor"],
        "mscale": 1.0 if choices[f"{_ROPE}.mscale"] is None else choices[f"{_ROPE}.mscale"],
        "mscale-all-dim": choices[f"{_ROPE}.mscale_all_dim"] or 0.0,
    }


def _write_yarn(choices: Choices) -> Settings:
    """Yarn's bounds and factors, of attention whose keys are not latent."""
    if choices[f"{_ROPE}.attention_factor"] is not None:
        instead = "Megatron-LM's yarn multiplies by 0.1 ln(factor) + 1, or as --mscale says"
        raise refused(f"{_ROPE}.attention_factor", choices[f"{_ROPE}.attention_factor"], instead, (None,))
    scales = choices[f"{_ROPE}.mscale"], choices[f"{_ROPE}.mscale_all_dim"]
    return {
        "rotary-scaling-factor": choices[f"{_ROPE}.factor"],
        "yarn-original-max-position-embeddings": choices[f"{_ROPE}.original_positions"],
        "yarn-beta-fast": choices[f"{_ROPE}.beta_fast"],
        "yarn-beta-slow": choices[f"{_ROPE}.beta_slow"],
        _ROUND if choices[f"{_ROPE}.truncate"] else f"no-{_ROUND}": True,
        **({"mscale": scales[0], "mscale-all-dim": scales[1]} if all(scales) else {}),
    }


def _read_yarn(settings: Settings) -> Mapping[str, Any]:
    if _ROUND in settings and f"no-{_ROUND}" in settings:
        raise StrettoError(f"--{_ROUND} is said and denied", hint="leave out one of them")
    scales = settings.get("mscale", 1.0), settings.get("mscale-all-dim", 0.0)
    if scales != (1.0, 0.0) and not all(scales):
        raise StrettoError(
            f"--mscale {scales[0]} with --mscale-all-dim {scales[1]}: such a factor is not modelled here",
            hint="what is: neither of them, or both above 0",
        )
    return {
        "type": "yarn",
        "factor": settings.get("rotary-scaling-factor", 1.0),
        "original_positions": settings.get("yarn-original-max-position-embeddings", 4096),
        "beta_fast": settings.get("yarn-beta-fast", 32.0),
        "beta_slow": settings.get("yarn-beta-slow", 1.0),
        "truncate": f"no-{_ROUND}" not in settings,
        **({"mscale": scales[0], "mscale_all_dim": scales[1]} if all(scales) else {}),
    }


def _read_rope(settings: Settings) -> Mapping[str, Any]:
    if "use-rope-scaling" in settings:
        values = {"type": "llama3", "factor": settings.get("rope-scaling-factor", 8.0), **_LLAMA3}
    elif "multi-latent-attention" in settings and settings.get("rope-type", "yarn") == "yarn":
        factor = settings.get("rotary-scaling-factor", 1.0)
        if factor == 1.0:
            return {}
        values = {
            "type": "yarn",
            "factor": factor,
            "original_positions": 4096,
            "mscale": settings.get("mscale", 1.0),
            "mscale_all_dim": settings.get("mscale-all-dim", 0.0),
        }
    elif settings.get("position-embedding-type") == "yarn" and settings.get("rotary-scaling-factor", 1) != 1:
        values = _read_yarn(settings)
    else:
        return {}
    return {f"{_ROPE}.{name}": value for name, value in values.items()}


def positions_of(settings: Settings) -> str:
    """Which kind of positions the arguments choose: learned or rotary.

    Raises:
        StrettoError: positions of a kind that has no costs here.
    """
    legacy = "rope" if "use-rotary-position-embeddings" in settings else "learned_absolute"
    kind = settings.get("position-embedding-type", legacy)
    if kind not in _POSITIONS:
        raise StrettoError(
            f"--position-embedding-type is {kind}: models of such positions are not priced",
            hint=f"what is: {', '.join(_POSITIONS)}",
        )
    return _POSITIONS[kind]


def _write_mlp(choices: Choices) -> Settings:
    kinds: dict[str, dict[str, Any]] = {
        "swiglu": {"swiglu": True},
        "relu2": {"squared-relu": True},
        "gelu": {},
        "swiglu_clamped": {"quick-geglu": True, **_QUICK},
    }
    kind = choices["model.mlp"]
    if kind not in kinds:
        raise refused("model.mlp", kind, "Megatron-LM's arguments have no such gate", kinds)
    return kinds[kind]


def _read_mlp(settings: Settings) -> Mapping[str, Any]:
    offset, bound = settings.get("glu-linear-offset", 0.0), settings.get("activation-func-clamp-value")
    quick = "quick-geglu" in settings
    if (offset, bound) != (tuple(_QUICK.values()) if quick else (0.0, None)):
        raise StrettoError(
            f"--glu-linear-offset {offset}, --activation-func-clamp-value {bound}: no such gate is here",
            hint="what is: --swiglu without them, or gpt-oss's, --quick-geglu with 1.0 and 7.0",
        )
    kinds = {"swiglu_clamped": quick, "swiglu": "swiglu" in settings, "relu2": "squared-relu" in settings}
    return {"model.mlp": next((kind for kind, there in kinds.items() if there), "gelu")}


def _write_ffn(choices: Choices) -> Settings:
    return {"ffn-hidden-size": choices["model.ffn"]}


def _read_ffn(settings: Settings) -> Mapping[str, Any]:
    return {"model.ffn": ffn_of(settings)}


def _write_bias(choices: Choices) -> Settings:
    bias, of_norm = choices["model.bias"], choices["model.norm"] == "layer"
    if not bias and of_norm and choices["model.position_embedding"] == "learned":
        instead = "Megatron-LM's LayerNorm always has a bias"
        raise refused("model.bias", False, instead, (True,))
    return {} if bias else {"disable-bias-linear": True}


def _read_bias(settings: Settings) -> Mapping[str, Any]:
    return {"model.bias": "disable-bias-linear" not in settings}


def _write_norm(choices: Choices) -> Settings:
    kind = choices["model.norm"]
    gain = {"apply-layernorm-1p": True} if kind == "rms1p" else {}
    return {"normalization": "LayerNorm" if kind == "layer" else "RMSNorm", **gain}


def _read_norm(settings: Settings) -> Mapping[str, Any]:
    if settings.get("normalization", "LayerNorm") != "RMSNorm":
        return {"model.norm": "layer"}
    return {"model.norm": "rms1p" if "apply-layernorm-1p" in settings else "rms"}


def _write_proj_bias(choices: Choices) -> Settings:
    chosen, bias = choices["model.attention.proj_bias"], choices["model.bias"]
    if chosen not in (None, bias):
        instead = "Megatron-LM's projection has a bias where all linear layers have one"
        raise refused("model.attention.proj_bias", chosen, instead, (bias,))
    return {}


def _write_qkv_bias(choices: Choices) -> Settings:
    chosen, bias = choices["model.attention.qkv_bias"], choices["model.bias"]
    if chosen is False and bias:
        instead = "with biases in linear layers Megatron-LM has them in queries, keys and values too"
        raise refused("model.attention.qkv_bias", False, instead, (True,))
    return {"add-qkv-bias": True} if chosen and not bias else {}


def _read_qkv_bias(settings: Settings) -> Mapping[str, Any]:
    alone = "add-qkv-bias" in settings and "disable-bias-linear" in settings
    return {"model.attention.qkv_bias": True if alone else None}


# ------------------------------------------------------------------ sizes


def _write_dropout(choices: Choices) -> Settings:
    return dict.fromkeys(("hidden-dropout", "attention-dropout"), choices["model.dropout"])


def _read_dropout(settings: Settings) -> Mapping[str, Any]:
    rotary = positions_of(settings) == "rotary"
    return {"model.dropout": 0.0 if rotary else settings.get("hidden-dropout", 0.1)}


def _write_vocabulary(choices: Choices) -> Settings:
    """Without a tokenizer it is that of Megatron's NullTokenizer, which adds one for the end of a document; a
    plan says no more.
    """
    vocab = choices["model.vocab"]
    if choices["data.tokenizer"] is not None:
        return {"vocab-size": vocab}
    return {"tokenizer-type": "NullTokenizer", "vocab-size": vocab - 1}


def _read_vocabulary(settings: Settings) -> Mapping[str, Any]:
    kind, model = _tokenizer_type(settings), settings.get("tokenizer-model", "")
    if "padded-vocab-size" in settings:
        return {"model.vocab": settings["padded-vocab-size"]}
    if "vocab-size" in settings:
        return {"model.vocab": settings["vocab-size"] + (kind == "NullTokenizer")}
    if kind in _VOCABULARIES:
        return {"model.vocab": _VOCABULARIES[kind]}
    try:
        return {"model.vocab": preset(model).vocab}
    except StrettoError:
        what = f"--tokenizer-type {kind}" + f" with --tokenizer-model {model}" * bool(model)
        raise StrettoError(
            f"nothing tells how many entries the vocabulary has: {what}",
            hint="add --vocab-size, as in 128256",
        ) from None


def _tokenizer_type(settings: Settings) -> str | None:
    """GPT-2's, where its two files are there and no other is chosen."""
    pair = "GPT2BPETokenizer" if "merge-file" in settings else None
    return settings.get("tokenizer-type", pair)


def _write_tokenizer(choices: Choices) -> Settings:
    tokenizer = choices["data.tokenizer"]
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, list | tuple):
        vocab, merges = tokenizer  # pyright: ignore[reportUnknownVariableType]
        return {"tokenizer-type": "GPT2BPETokenizer", "vocab-file": vocab, "merge-file": merges}
    return {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": tokenizer}


def _read_tokenizer(settings: Settings) -> Mapping[str, Any]:
    """A file, a vocab.json with the merges.txt beside it (or any beginning of both names), or two files of
    other names.
    """
    kind, model = _tokenizer_type(settings), settings.get("tokenizer-model")
    if kind in (None, "NullTokenizer"):
        return {"data.tokenizer": None}
    if kind in ("GPT2BPETokenizer", "GPTSentencePieceTokenizer") and model is None:
        files = [settings[name] for name in ("vocab-file", "merge-file") if name in settings]
        if not files:
            return {}
        if len(files) == 1:
            raise StrettoError(
                "GPT-2's tokenizer is two files, and one of them is not said",
                hint="--vocab-file vocab.json --merge-file merges.txt",
            )
        vocab, merges = (Path(file) for file in files)
        if vocab.name.removesuffix(_PAIR[0]) + _PAIR[1] != merges.name or vocab.parent != merges.parent:
            return {"data.tokenizer": files}
        return {"data.tokenizer": str(vocab)}
    if kind not in _FILES:
        why = f": {_UNREAD[kind]}" if kind in _UNREAD else ""
        raise StrettoError(
            f"--tokenizer-type is {kind}: such a tokenizer is not read here{why}",
            hint="text that is tokenised already needs none: --data-path PREFIX"
            f" (what is read: {', '.join(_FILES)}, GPT2BPETokenizer, NullTokenizer)",
        )
    return {"data.tokenizer": model}


def _write_heads(choices: Choices) -> Settings:
    heads, groups = choices["model.heads"], choices["model.kv_heads"]
    grouped = {"group-query-attention": True, "num-query-groups": groups} if groups != heads else {}
    return {"num-attention-heads": heads, **grouped}


def _read_heads(settings: Settings) -> Mapping[str, Any]:
    heads = settings["num-attention-heads"]
    grouped = "group-query-attention" in settings
    return {
        "model.heads": heads,
        "model.kv_heads": settings.get("num-query-groups", 1) if grouped else heads,
    }


# ------------------------------------------------------------------ attention

_LATENT = "model.attention.latent"


def _write_latent(choices: Choices) -> Settings:
    """Queries and keys of latent attention have the features without and with positions apart."""
    head, rank = choices["model.head_dim"], choices[f"{_LATENT}.kv_rank"]
    if rank is None:
        return {"kv-channels": head}
    rope, queries = choices[f"{_LATENT}.rope_dim"], choices[f"{_LATENT}.q_rank"]
    return {
        "multi-latent-attention": True,
        "kv-lora-rank": rank,
        **({} if queries is None else {"q-lora-rank": queries}),
        "qk-head-dim": head - rope,
        "qk-pos-emb-head-dim": rope,
        "v-head-dim": choices[f"{_LATENT}.value_dim"],
        "qk-layernorm": True,  # the norms of the narrow vectors
    }


def _read_latent(settings: Settings) -> Mapping[str, Any]:
    if "multi-latent-attention" not in settings:
        usual = settings["hidden-size"] // settings["num-attention-heads"]
        return {"model.head_dim": settings.get("kv-channels", usual)}
    rope = settings.get("qk-pos-emb-head-dim", 64)
    return {
        "model.head_dim": settings.get("qk-head-dim", 128) + rope,
        f"{_LATENT}.kv_rank": settings.get("kv-lora-rank", 32),
        f"{_LATENT}.rope_dim": rope,
        f"{_LATENT}.value_dim": settings.get("v-head-dim", 128),
        f"{_LATENT}.q_rank": settings.get("q-lora-rank"),
    }


def _write_head_norm(choices: Choices) -> Settings:
    norm = choices["model.attention.norm"]
    if norm == "all" or (norm is not None and choices[f"{_LATENT}.kv_rank"] is not None):
        instead = "Megatron-LM's --qk-layernorm is over the features of one head, or of latent vectors"
        raise refused("model.attention.norm", norm, instead, ("head",) if norm == "all" else (None,))
    return {} if norm is None else {"qk-layernorm": True}


def _read_head_norm(settings: Settings) -> Mapping[str, Any]:
    there = "qk-layernorm" in settings and "multi-latent-attention" not in settings
    return {"model.attention.norm": "head" if there else None}


def _write_sinks(choices: Choices) -> Settings:
    return {"softmax-type": "learnable"} if choices["model.attention.sinks"] else {}


def _read_sinks(settings: Settings) -> Mapping[str, Any]:
    if settings.get("softmax-type") == "off-by-one":
        hint = "what is: vanilla, or learnable as gpt-oss's sinks"
        raise StrettoError("--softmax-type is off-by-one: such a softmax is not built here", hint=hint)
    return {"model.attention.sinks": settings.get("softmax-type") == "learnable"}


def _write_window(choices: Choices) -> Settings:
    window, every = choices["model.attention.window"], choices["model.attention.full_every"]
    if window is None:
        if every:
            raise refused("model.attention.full_every", every, "Megatron-LM skips a window only", (0,))
        return {}
    skipped = {"window-attn-skip-freq": str(every)} if every else {}
    return {"window-size": f"{window - 1},0", **skipped}


def _read_window(settings: Settings) -> Mapping[str, Any]:
    text = settings.get("window-size")
    if text is None:
        return {}
    left, _, right = text.strip("() ").partition(",")
    every = settings.get("window-attn-skip-freq", "0")
    if not left.strip().isdecimal() or right.strip(" )") != "0" or not every.isdecimal():
        raise StrettoError(
            f"--window-size {text} with --window-attn-skip-freq {every}: such windows are not priced",
            hint="what is: --window-size N,0 and --window-attn-skip-freq N",
        )
    return {"model.attention.window": int(left) + 1, "model.attention.full_every": int(every)}


def _beyond_notes(choices: Choices) -> Iterable[str]:
    for words in choices["model.beyond"]:
        yield f"the model also has {words}: no size depends on it, and no argument is written for it"


MODEL: tuple[Rule, ...] = (
    same("num-layers", "model.layers"),
    same("hidden-size", "model.hidden"),
    rule(
        ("model.heads", "model.kv_heads"),
        ("num-attention-heads", "group-query-attention", "num-query-groups"),
        _write_heads,
        _read_heads,
    ),
    rule(
        ("model.head_dim", *(f"{_LATENT}.{name}" for name in ("kv_rank", "rope_dim", "value_dim", "q_rank"))),
        (
            "kv-channels",
            "multi-latent-attention",
            "kv-lora-rank",
            "q-lora-rank",
            "qk-head-dim",
            "qk-pos-emb-head-dim",
            "v-head-dim",
        ),
        _write_latent,
        _read_latent,
    ),
    rule(("model.ffn",), ("ffn-hidden-size",), _write_ffn, _read_ffn),
    rule(("model.mlp",), ("swiglu", "squared-relu", "quick-geglu", *_QUICK), _write_mlp, _read_mlp),
    rule(("model.vocab",), ("vocab-size", "padded-vocab-size"), _write_vocabulary, _read_vocabulary),
    rule(
        ("data.tokenizer",),
        ("tokenizer-type", "tokenizer-model", "vocab-file", "merge-file"),
        _write_tokenizer,
        _read_tokenizer,
    ),
    same("max-position-embeddings", "model.positions"),
    flag("untie-embeddings-and-output-weights", "model.tied", when=False),
    rule(("model.dropout",), ("hidden-dropout", "attention-dropout"), _write_dropout, _read_dropout),
    same("init-method-std", "model.init_std", usual=Initial.init_std),
    only("model.scaled_init", (True,), "Megatron-LM divides by sqrt(2 layers) in output projections"),
    same("norm-epsilon", "model.norm_eps", usual=1e-5),
    Rule(choices=("model.family",), write=lambda _: {}, notes=_family_notes),
    rule(
        ("model.position_embedding", "model.rope_theta"),
        ("position-embedding-type", "use-rotary-position-embeddings", "rotary-base"),
        _write_positions,
        _read_positions,
    ),
    rule(
        tuple(f"{_ROPE}.{one.name}" for one in fields(RopeScaling)),
        (
            "use-rope-scaling",
            "rope-scaling-factor",
            "rope-type",
            "rotary-scaling-factor",
            "mscale",
            "mscale-all-dim",
            "yarn-original-max-position-embeddings",
            "yarn-beta-fast",
            "yarn-beta-slow",
            _ROUND,
            f"no-{_ROUND}",
        ),
        _write_rope,
        _read_rope,
    ),
    flag("rotary-interleaved", "model.attention.interleaved"),
    without_encoder(
        "pretrain_gpt.py trains decoders",
        "model.encoder_layers",
        "model.attention.causal",
        "model.attention.buckets",
        "model.attention.max_distance",
    ),
    only("model.embedding_norm", (False,), "Megatron-LM's arguments have no norm of embeddings"),
    only("model.logit_scale", (1.0,), "Megatron-LM's arguments have no scale of the logits"),
    only("model.block_norms", ("pre",), "Megatron-LM's arguments have no norms after attention and MLP"),
    only("model.embedding_scale", (1.0,), "Megatron-LM's arguments have no scale of the embedding"),
    only("model.logit_softcap", (0.0,), "Megatron-LM's arguments have no bound of the logits"),
    only("model.attention.softcap", (None,), "Megatron-LM's arguments have no bound of the scores"),
    only("model.attention.query_scale", (None,), "Megatron-LM divides scores by the root of a head's width"),
    only("model.attention.local_theta", (None,), "Megatron-LM has one base of rotary frequencies"),
    without("lora", LoraShape, "rank", "Megatron-LM's arguments have no adapters"),
    only("finetune.freeze", ((),), "Megatron-LM's arguments freeze no weights"),
    rule(("model.attention.proj_bias",), (), _write_proj_bias, None),
    rule(("model.bias",), ("disable-bias-linear",), _write_bias, _read_bias),
    rule(("model.norm",), ("normalization", "apply-layernorm-1p"), _write_norm, _read_norm),
    Rule(choices=("model.beyond",), write=lambda _: {}, notes=_beyond_notes),
    rule(("model.attention.norm",), ("qk-layernorm",), _write_head_norm, _read_head_norm),
    rule(("model.attention.qkv_bias",), ("add-qkv-bias",), _write_qkv_bias, _read_qkv_bias),
    rule(("model.attention.sinks",), ("softmax-type",), _write_sinks, _read_sinks),
    rule(
        ("model.attention.window", "model.attention.full_every"),
        ("window-size", "window-attn-skip-freq"),
        _write_window,
        _read_window,
    ),
    *EXPERTS,
)
