"""The model's sizes in Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.spec.attention import AttentionShape, RopeScaling
from stretto.spec.initial import Initial
from stretto.spec.presets import preset
from stretto_interop.frameworks.fields import (
    ATTENTION,
    JOB,
    KV_RANK,
    LATENT,
    LORA,
    LORA_RANK,
    MODEL,
    ROPE,
    ROPE_TYPE,
    RUN,
    JobValues,
    name_of,
)
from stretto_interop.frameworks.mapping import (
    Rule,
    Settings,
    Values,
    absent,
    flag,
    refused,
    renamed,
    restricted,
    rule,
    without_encoder,
)
from stretto_interop.frameworks.megatron.experts import EXPERT_RULES, ffn_of

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


def _family_notes(values: JobValues) -> Iterable[str]:
    yield f"model.family={values['model.family']}: a name for usual values, which are written one by one"


def _write_positions(values: JobValues) -> Settings:
    rotary = values[MODEL.position_embedding] == "rotary"
    base = {"rotary-base": int(values[MODEL.rope_theta])} if rotary else {}
    yarn = values[ROPE_TYPE] == "yarn" and values[KV_RANK] is None
    kind = "yarn" if yarn else "rope"
    return {"position-embedding-type": kind if rotary else "learned_absolute", **base}


def _read_positions(settings: Settings) -> Values:
    kind = positions_of(settings)
    return {
        MODEL.family: _FAMILIES[kind],
        MODEL.position_embedding: kind,
        MODEL.rope_theta: float(settings.get("rotary-base", 10000)),
    }


def _write_rope(values: JobValues) -> Settings:
    """Scaled rotary positions: Llama 3.1's with its usual bounds, and yarn's, of latent attention too."""
    kind = values[ROPE_TYPE]
    if kind is None:
        return {}
    instead = "Megatron-LM scales rotary positions as Llama 3.1, or by yarn"
    if kind == "llama3":
        for name, usual in _LLAMA3.items():
            if values[getattr(ROPE, name)] != usual:
                raise refused(getattr(ROPE, name), values[getattr(ROPE, name)], instead, (usual,))
        return {"use-rope-scaling": True, "rope-scaling-factor": values[ROPE.factor]}
    if kind != "yarn":
        raise refused(ROPE.type, kind, instead, ("llama3", "yarn"))
    if values[KV_RANK] is None:
        return _write_yarn(values)
    fixed = {
        "original_positions": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
    }
    for name, usual in fixed.items():
        if values[getattr(ROPE, name)] != usual:
            raise refused(getattr(ROPE, name), values[getattr(ROPE, name)], instead, (usual,))
    return {
        "rope-type": "yarn",
        "rotary-scaling-factor": values[ROPE.factor],
        "mscale": 1.0 if values[ROPE.mscale] is None else values[ROPE.mscale],
        "mscale-all-dim": values[ROPE.mscale_all_dim] or 0.0,
    }


def _write_yarn(values: JobValues) -> Settings:
    """Yarn's bounds and factors, of attention whose keys are not latent."""
    if values[ROPE.attention_factor] is not None:
        instead = "Megatron-LM's yarn multiplies by 0.1 ln(factor) + 1, or as --mscale says"
        raise refused(ROPE.attention_factor, values[ROPE.attention_factor], instead, (None,))
    scales = values[ROPE.mscale], values[ROPE.mscale_all_dim]
    return {
        "rotary-scaling-factor": values[ROPE.factor],
        "yarn-original-max-position-embeddings": values[ROPE.original_positions],
        "yarn-beta-fast": values[ROPE.beta_fast],
        "yarn-beta-slow": values[ROPE.beta_slow],
        _ROUND if values[ROPE.truncate] else f"no-{_ROUND}": True,
        **({"mscale": scales[0], "mscale-all-dim": scales[1]} if all(scales) else {}),
    }


def _read_yarn(settings: Settings) -> Values:
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


def _read_rope(settings: Settings) -> Values:
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


def _write_mlp(values: JobValues) -> Settings:
    kinds: dict[str, dict[str, Any]] = {
        "swiglu": {"swiglu": True},
        "relu2": {"squared-relu": True},
        "gelu": {},
        "swiglu_clamped": {"quick-geglu": True, **_QUICK},
    }
    kind = values[MODEL.mlp]
    if kind not in kinds:
        raise refused(MODEL.mlp, kind, "Megatron-LM's arguments have no such gate", kinds)
    return kinds[kind]


def _read_mlp(settings: Settings) -> Values:
    offset, bound = settings.get("glu-linear-offset", 0.0), settings.get("activation-func-clamp-value")
    quick = "quick-geglu" in settings
    if (offset, bound) != (tuple(_QUICK.values()) if quick else (0.0, None)):
        raise StrettoError(
            f"--glu-linear-offset {offset}, --activation-func-clamp-value {bound}: no such gate is here",
            hint="what is: --swiglu without them, or gpt-oss's, --quick-geglu with 1.0 and 7.0",
        )
    kinds = {"swiglu_clamped": quick, "swiglu": "swiglu" in settings, "relu2": "squared-relu" in settings}
    return {MODEL.mlp: next((kind for kind, there in kinds.items() if there), "gelu")}


def _write_ffn(values: JobValues) -> Settings:
    return {"ffn-hidden-size": values[MODEL.ffn]}


def _read_ffn(settings: Settings) -> Values:
    return {MODEL.ffn: ffn_of(settings)}


def _write_bias(values: JobValues) -> Settings:
    bias, of_norm = values[MODEL.bias], values[MODEL.norm] == "layer"
    if not bias and of_norm and values[MODEL.position_embedding] == "learned":
        instead = "Megatron-LM's LayerNorm always has a bias"
        raise refused(MODEL.bias, False, instead, (True,))
    return {} if bias else {"disable-bias-linear": True}


def _read_bias(settings: Settings) -> Values:
    return {MODEL.bias: "disable-bias-linear" not in settings}


def _write_norm(values: JobValues) -> Settings:
    kind = values[MODEL.norm]
    gain = {"apply-layernorm-1p": True} if kind == "rms1p" else {}
    return {"normalization": "LayerNorm" if kind == "layer" else "RMSNorm", **gain}


def _read_norm(settings: Settings) -> Values:
    if settings.get("normalization", "LayerNorm") != "RMSNorm":
        return {MODEL.norm: "layer"}
    return {MODEL.norm: "rms1p" if "apply-layernorm-1p" in settings else "rms"}


def _write_proj_bias(values: JobValues) -> Settings:
    chosen, bias = values[ATTENTION.proj_bias], values[MODEL.bias]
    if chosen not in (None, bias):
        instead = "Megatron-LM's projection has a bias where all linear layers have one"
        raise refused(ATTENTION.proj_bias, chosen, instead, (bias,))
    return {}


def _write_qkv_bias(values: JobValues) -> Settings:
    chosen, bias = values[ATTENTION.qkv_bias], values[MODEL.bias]
    if chosen is False and bias:
        instead = "with biases in linear layers Megatron-LM has them in queries, keys and values too"
        raise refused(ATTENTION.qkv_bias, False, instead, (True,))
    return {"add-qkv-bias": True} if chosen and not bias else {}


def _read_qkv_bias(settings: Settings) -> Values:
    alone = "add-qkv-bias" in settings and "disable-bias-linear" in settings
    return {ATTENTION.qkv_bias: True if alone else None}


# ------------------------------------------------------------------ sizes


def _write_dropout(values: JobValues) -> Settings:
    return dict.fromkeys(("hidden-dropout", "attention-dropout"), values[MODEL.dropout])


def _read_dropout(settings: Settings) -> Values:
    rotary = positions_of(settings) == "rotary"
    return {MODEL.dropout: 0.0 if rotary else settings.get("hidden-dropout", 0.1)}


def _write_vocabulary(values: JobValues) -> Settings:
    """Without a tokenizer it is that of Megatron's NullTokenizer, which adds one for the end of a document; a
    plan says no more.
    """
    vocab = values[MODEL.vocab]
    if values[RUN.data.tokenizer] is not None:
        return {"vocab-size": vocab}
    return {"tokenizer-type": "NullTokenizer", "vocab-size": vocab - 1}


def _read_vocabulary(settings: Settings) -> Values:
    kind, model = _tokenizer_type(settings), settings.get("tokenizer-model", "")
    if "padded-vocab-size" in settings:
        return {MODEL.vocab: settings["padded-vocab-size"]}
    if "vocab-size" in settings:
        return {MODEL.vocab: settings["vocab-size"] + (kind == "NullTokenizer")}
    if kind in _VOCABULARIES:
        return {MODEL.vocab: _VOCABULARIES[kind]}
    try:
        return {MODEL.vocab: preset(model).vocab}
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


def _write_tokenizer(values: JobValues) -> Settings:
    tokenizer = values[RUN.data.tokenizer]
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, list | tuple):
        vocab, merges = tokenizer  # pyright: ignore[reportUnknownVariableType]
        return {"tokenizer-type": "GPT2BPETokenizer", "vocab-file": vocab, "merge-file": merges}
    return {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": tokenizer}


def _read_tokenizer(settings: Settings) -> Values:
    """A file, a vocab.json with the merges.txt beside it (or any beginning of both names), or two files of
    other names.
    """
    kind, model = _tokenizer_type(settings), settings.get("tokenizer-model")
    if kind in (None, "NullTokenizer"):
        return {name_of(RUN.data.tokenizer): None}
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
            return {name_of(RUN.data.tokenizer): files}
        return {name_of(RUN.data.tokenizer): str(vocab)}
    if kind not in _FILES:
        why = f": {_UNREAD[kind]}" if kind in _UNREAD else ""
        raise StrettoError(
            f"--tokenizer-type is {kind}: such a tokenizer is not read here{why}",
            hint="text that is tokenised already needs none: --data-path PREFIX"
            f" (what is read: {', '.join(_FILES)}, GPT2BPETokenizer, NullTokenizer)",
        )
    return {name_of(RUN.data.tokenizer): model}


def _write_heads(values: JobValues) -> Settings:
    heads, groups = values[MODEL.heads], values[MODEL.kv_heads]
    grouped = {"group-query-attention": True, "num-query-groups": groups} if groups != heads else {}
    return {"num-attention-heads": heads, **grouped}


def _read_heads(settings: Settings) -> Values:
    heads = settings["num-attention-heads"]
    grouped = "group-query-attention" in settings
    return {
        MODEL.heads: heads,
        MODEL.kv_heads: settings.get("num-query-groups", 1) if grouped else heads,
    }


# ------------------------------------------------------------------ attention

_LATENT = "model.attention.latent"


def _write_latent(values: JobValues) -> Settings:
    """Queries and keys of latent attention have the features without and with positions apart."""
    head, rank = values[MODEL.head_dim], values[KV_RANK]
    if rank is None:
        return {"kv-channels": head}
    rope, queries = values[LATENT.rope_dim], values[LATENT.q_rank]
    return {
        "multi-latent-attention": True,
        "kv-lora-rank": rank,
        **({} if queries is None else {"q-lora-rank": queries}),
        "qk-head-dim": head - rope,
        "qk-pos-emb-head-dim": rope,
        "v-head-dim": values[LATENT.value_dim],
        "qk-layernorm": True,  # the norms of the narrow vectors
    }


def _read_latent(settings: Settings) -> Values:
    if "multi-latent-attention" not in settings:
        usual = settings["hidden-size"] // settings["num-attention-heads"]
        return {MODEL.head_dim: settings.get("kv-channels", usual)}
    rope = settings.get("qk-pos-emb-head-dim", 64)
    return {
        MODEL.head_dim: settings.get("qk-head-dim", 128) + rope,
        LATENT.kv_rank: settings.get("kv-lora-rank", 32),
        LATENT.rope_dim: rope,
        LATENT.value_dim: settings.get("v-head-dim", 128),
        LATENT.q_rank: settings.get("q-lora-rank"),
    }


def _write_head_norm(values: JobValues) -> Settings:
    norm = values[ATTENTION.norm]
    if norm == "all" or (norm is not None and values[KV_RANK] is not None):
        instead = "Megatron-LM's --qk-layernorm is over the features of one head, or of latent vectors"
        raise refused(ATTENTION.norm, norm, instead, ("head",) if norm == "all" else (None,))
    return {} if norm is None else {"qk-layernorm": True}


def _read_head_norm(settings: Settings) -> Values:
    there = "qk-layernorm" in settings and "multi-latent-attention" not in settings
    return {ATTENTION.norm: "head" if there else None}


def _write_sinks(values: JobValues) -> Settings:
    return {"softmax-type": "learnable"} if values[ATTENTION.sinks] else {}


def _read_sinks(settings: Settings) -> Values:
    if settings.get("softmax-type") == "off-by-one":
        hint = "what is: vanilla, or learnable as gpt-oss's sinks"
        raise StrettoError("--softmax-type is off-by-one: such a softmax is not built here", hint=hint)
    return {ATTENTION.sinks: settings.get("softmax-type") == "learnable"}


def _write_window(values: JobValues) -> Settings:
    window, every = values[ATTENTION.window], values[ATTENTION.full_every]
    if window is None:
        if every:
            raise refused(ATTENTION.full_every, every, "Megatron-LM skips a window only", (0,))
        return {}
    skipped = {"window-attn-skip-freq": str(every)} if every else {}
    return {"window-size": f"{window - 1},0", **skipped}


def _read_window(settings: Settings) -> Values:
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
    return {ATTENTION.window: int(left) + 1, ATTENTION.full_every: int(every)}


def _beyond_notes(values: JobValues) -> Iterable[str]:
    for words in values[MODEL.beyond]:
        yield f"the model also has {words}: no size depends on it, and no argument is written for it"


MODEL_RULES: tuple[Rule, ...] = (
    renamed("num-layers", MODEL.layers),
    renamed("hidden-size", MODEL.hidden),
    rule(
        MODEL.heads,
        MODEL.kv_heads,
        settings="num-attention-heads group-query-attention num-query-groups",
        write=_write_heads,
        read=_read_heads,
    ),
    rule(
        MODEL.head_dim,
        *(f"{_LATENT}.{name}" for name in ("kv_rank", "rope_dim", "value_dim", "q_rank")),
        settings=(
            "kv-channels multi-latent-attention kv-lora-rank q-lora-rank qk-head-dim "
            "qk-pos-emb-head-dim v-head-dim"
        ),
        write=_write_latent,
        read=_read_latent,
    ),
    rule(MODEL.ffn, settings="ffn-hidden-size", write=_write_ffn, read=_read_ffn),
    rule(
        MODEL.mlp,
        settings=("swiglu", "squared-relu", "quick-geglu", *_QUICK),
        write=_write_mlp,
        read=_read_mlp,
    ),
    rule(
        MODEL.vocab, settings="vocab-size padded-vocab-size", write=_write_vocabulary, read=_read_vocabulary
    ),
    rule(
        RUN.data.tokenizer,
        settings="tokenizer-type tokenizer-model vocab-file merge-file",
        write=_write_tokenizer,
        read=_read_tokenizer,
    ),
    renamed("max-position-embeddings", MODEL.sequence),
    flag("untie-embeddings-and-output-weights", MODEL.tied, when=False),
    rule(
        MODEL.dropout, settings="hidden-dropout attention-dropout", write=_write_dropout, read=_read_dropout
    ),
    renamed("init-method-std", JOB.initial.init_std, default=Initial.init_std),
    restricted(
        JOB.initial.scaled_init, (True,), "Megatron-LM divides by sqrt(2 layers) in output projections"
    ),
    renamed("norm-epsilon", MODEL.norm_eps, default=1e-5),
    rule(MODEL.family, notes=_family_notes),
    rule(
        MODEL.position_embedding,
        MODEL.rope_theta,
        settings="position-embedding-type use-rotary-position-embeddings rotary-base",
        write=_write_positions,
        read=_read_positions,
    ),
    rule(
        *tuple(f"{_ROPE}.{one.name}" for one in fields(RopeScaling)),
        settings=(
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
        write=_write_rope,
        read=_read_rope,
    ),
    flag("rotary-interleaved", ATTENTION.interleaved),
    without_encoder("pretrain_gpt.py trains decoders", MODEL.encoder_layers),
    restricted(ATTENTION.causal, (AttentionShape.causal,), "pretrain_gpt.py trains decoders"),
    restricted(ATTENTION.buckets, (AttentionShape.buckets,), "Megatron-LM has no relative positions"),
    restricted(
        ATTENTION.max_distance, (AttentionShape.max_distance,), "Megatron-LM has no relative positions"
    ),
    restricted(MODEL.embedding_norm, (False,), "Megatron-LM's arguments have no norm of embeddings"),
    restricted(MODEL.logit_scale, (1.0,), "Megatron-LM's arguments have no scale of the logits"),
    restricted(MODEL.block_norms, ("pre",), "Megatron-LM's arguments have no norms after attention and MLP"),
    restricted(MODEL.embedding_scale, (1.0,), "Megatron-LM's arguments have no scale of the embedding"),
    restricted(MODEL.logit_softcap, (0.0,), "Megatron-LM's arguments have no bound of the logits"),
    restricted(ATTENTION.softcap, (None,), "Megatron-LM's arguments have no bound of the scores"),
    restricted(ATTENTION.query_scale, (None,), "Megatron-LM divides scores by the root of a head's width"),
    restricted(ATTENTION.local_theta, (None,), "Megatron-LM has one base of rotary frequencies"),
    absent(
        "Megatron-LM's arguments have no adapters",
        LORA_RANK,
        LORA.alpha,
        LORA.dropout,
        LORA.targets,
        LORA.rslora,
    ),
    restricted(JOB.trained.freeze, ((),), "Megatron-LM's arguments freeze no weights"),
    rule(ATTENTION.proj_bias, write=_write_proj_bias),
    rule(MODEL.bias, settings="disable-bias-linear", write=_write_bias, read=_read_bias),
    rule(MODEL.norm, settings="normalization apply-layernorm-1p", write=_write_norm, read=_read_norm),
    rule(MODEL.beyond, notes=_beyond_notes),
    rule(ATTENTION.norm, settings="qk-layernorm", write=_write_head_norm, read=_read_head_norm),
    rule(ATTENTION.qkv_bias, settings="add-qkv-bias", write=_write_qkv_bias, read=_read_qkv_bias),
    rule(ATTENTION.sinks, settings="softmax-type", write=_write_sinks, read=_read_sinks),
    rule(
        ATTENTION.window,
        ATTENTION.full_every,
        settings="window-size window-attn-skip-freq",
        write=_write_window,
        read=_read_window,
    ),
    *EXPERT_RULES,
)
