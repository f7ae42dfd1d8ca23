"""The model in Megatron-LM's arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.job.attention import AttentionShape, RopeScaling
from stretto.job.initial import Initial
from stretto.job.presets import preset
from stretto_interop.frameworks.fields import (
    ATTENTION,
    EXPERTS,
    JOB,
    KV_RANK,
    LATENT,
    LORA,
    LORA_RANK,
    MODEL,
    MOE,
    ROPE,
    ROPE_TYPE,
    RUN,
    JobValues,
    name_of,
)
from stretto_interop.frameworks.mapping import (
    Reader,
    Rule,
    Settings,
    Values,
    Writer,
    absent,
    flag,
    refused,
    renamed,
    require,
    restricted,
    rule,
    without_encoder,
)

# entries of tokenizers that come without --vocab-size; others are looked up by the model's name
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
# tokenizers of one file, or a folder
_FILES = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
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
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
_YARN = {"original_positions": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_QUICK = {"glu-linear-offset": 1.0, "activation-func-clamp-value": 7.0}  # of gpt-oss's gate, as here
_SCALE = "moe-router-topk-scaling-factor"
_ROUND = "yarn-correction-range-round-to-int"


# ------------------------------------------------------------------ positions


def _write_positions(values: JobValues) -> Settings:
    if values[MODEL.position_embedding] != "rotary":
        return {"position-embedding-type": "learned_absolute"}
    yarn = values[ROPE_TYPE] == "yarn" and values[KV_RANK] is None
    return {
        "position-embedding-type": "yarn" if yarn else "rope",
        "rotary-base": int(values[MODEL.rope_theta]),
    }


def _read_positions(settings: Settings) -> Values:
    kind = positions_of(settings)
    return {
        MODEL.family: _FAMILIES[kind],
        MODEL.position_embedding: kind,
        MODEL.rope_theta: float(settings.get("rotary-base", 10000)),
    }


def positions_of(settings: Settings) -> str:
    """Return the kind of positions that the arguments choose: learned or rotary.

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


def _write_rope(values: JobValues) -> Settings:
    """Scaled rotary positions: Llama 3.1's with its default bounds, and yarn's, of latent attention too."""
    kind, scale = values[ROPE_TYPE], values[ROPE.mscale]
    if kind is None:
        return {}
    instead = "Megatron-LM scales rotary positions as Llama 3.1, or by yarn"
    latent = values[KV_RANK] is not None
    fixed = _LLAMA3 if kind == "llama3" else _YARN if latent else {}
    require(values, ROPE.type, ("llama3", "yarn"), instead)
    for name, only in fixed.items():
        require(values, getattr(ROPE, name), (only,), instead)
    if kind == "llama3":
        return {"use-rope-scaling": True, "rope-scaling-factor": values[ROPE.factor]}
    instead = "Megatron-LM's yarn multiplies by 0.1 ln(factor) + 1, or as --mscale says"
    require(values, ROPE.attention_factor, (None,), instead)
    if latent:
        return {
            "rope-type": "yarn",
            "rotary-scaling-factor": values[ROPE.factor],
            "mscale": 1.0 if scale is None else scale,
            "mscale-all-dim": values[ROPE.mscale_all_dim] or 0.0,
        }
    both = scale and values[ROPE.mscale_all_dim]
    return {
        "rotary-scaling-factor": values[ROPE.factor],
        "yarn-original-max-position-embeddings": values[ROPE.original_positions],
        "yarn-beta-fast": values[ROPE.beta_fast],
        "yarn-beta-slow": values[ROPE.beta_slow],
        _ROUND if values[ROPE.truncate] else f"no-{_ROUND}": True,
        **({"mscale": scale, "mscale-all-dim": values[ROPE.mscale_all_dim]} if both else {}),
    }


def _read_rope(settings: Settings) -> Values:
    factor = settings.get("rotary-scaling-factor", 1.0)
    scales = settings.get("mscale", 1.0), settings.get("mscale-all-dim", 0.0)
    if "use-rope-scaling" in settings:
        values = {"type": "llama3", "factor": settings.get("rope-scaling-factor", 8.0), **_LLAMA3}
        return {getattr(ROPE, name): value for name, value in values.items()}
    if "multi-latent-attention" in settings and settings.get("rope-type", "yarn") == "yarn":
        if factor == 1.0:
            return {}
        yarn = {ROPE.original_positions: 4096, ROPE.mscale: scales[0], ROPE.mscale_all_dim: scales[1]}
        return {ROPE.type: "yarn", ROPE.factor: factor, **yarn}
    if settings.get("position-embedding-type") != "yarn" or factor == 1:
        return {}
    if _ROUND in settings and f"no-{_ROUND}" in settings:
        raise StrettoError(f"--{_ROUND} is said and denied", hint="leave out one of them")
    if scales != (1.0, 0.0) and not all(scales):
        raise StrettoError(
            f"--mscale {scales[0]} with --mscale-all-dim {scales[1]}: such a factor is not modelled here",
            hint="what is: neither of them, or both above 0",
        )
    return {
        ROPE.type: "yarn",
        ROPE.factor: factor,
        ROPE.original_positions: settings.get("yarn-original-max-position-embeddings", 4096),
        ROPE.beta_fast: settings.get("yarn-beta-fast", 32.0),
        ROPE.beta_slow: settings.get("yarn-beta-slow", 1.0),
        ROPE.truncate: f"no-{_ROUND}" not in settings,
        **({ROPE.mscale: scales[0], ROPE.mscale_all_dim: scales[1]} if all(scales) else {}),
    }


# ------------------------------------------------------------------ MLP, norm, biases


def _write_mlp(values: JobValues) -> Settings:
    kinds: dict[str, dict[str, Any]] = {
        "swiglu": {"swiglu": True},
        "relu2": {"squared-relu": True},
        "gelu": {},
        "swiglu_clamped": {"quick-geglu": True, **_QUICK},
    }
    require(values, MODEL.mlp, kinds, "Megatron-LM's arguments have no such gate")
    return kinds[values[MODEL.mlp]]


def _read_mlp(settings: Settings) -> Values:
    offset, bound = settings.get("glu-linear-offset", 0.0), settings.get("activation-func-clamp-value")
    quick = "quick-geglu" in settings
    if (offset, bound) != (tuple(_QUICK.values()) if quick else (0.0, None)):
        raise StrettoError(
            f"--glu-linear-offset {offset}, --activation-func-clamp-value {bound}: no such gate is here",
            hint="what is: --swiglu without them, or gpt-oss's, --quick-geglu with 1.0 and 7.0",
        )
    if quick:
        return {MODEL.mlp: "swiglu_clamped"}
    return {
        MODEL.mlp: "swiglu" if "swiglu" in settings else "relu2" if "squared-relu" in settings else "gelu"
    }


def ffn_of(settings: Settings) -> int:
    """Return the inner width of the MLP, and of experts without one of their own."""
    hidden = settings["hidden-size"]
    default = int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in settings else 4 * hidden
    return settings.get("ffn-hidden-size", default)


def _write_bias(values: JobValues) -> Settings:
    if values[MODEL.bias]:
        return {}
    if values[MODEL.norm] == "layer" and values[MODEL.position_embedding] == "learned":
        raise refused(MODEL.bias, False, "Megatron-LM's LayerNorm always has a bias", (True,))
    return {"disable-bias-linear": True}


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


# ------------------------------------------------------------------ vocabulary and tokenizer


def _write_vocabulary(values: JobValues) -> Settings:
    """Without a tokenizer, write Megatron's NullTokenizer, which adds one entry for the end of a document; a
    plan has no tokenizer.
    """
    if values[RUN.data.tokenizer] is not None:
        return {"vocab-size": values[MODEL.vocab]}
    return {"tokenizer-type": "NullTokenizer", "vocab-size": values[MODEL.vocab] - 1}


def _tokenizer_type(settings: Settings) -> str | None:
    """Return the tokenizer's type: GPT-2's if its two files are given and no other is chosen."""
    return settings.get("tokenizer-type", "GPT2BPETokenizer" if "merge-file" in settings else None)


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
        named = f"--tokenizer-type {kind}" + f" with --tokenizer-model {model}" * bool(model)
        raise StrettoError(
            f"nothing tells how many entries the vocabulary has: {named}",
            hint="add --vocab-size, as in 128256",
        ) from None


def _write_tokenizer(values: JobValues) -> Settings:
    tokenizer = values[RUN.data.tokenizer]
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, list | tuple):
        vocab, merges = tokenizer
        return {"tokenizer-type": "GPT2BPETokenizer", "vocab-file": vocab, "merge-file": merges}
    return {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": tokenizer}


def _read_tokenizer(settings: Settings) -> Values:
    """Read a file, a vocab.json with its merges.txt (or the same names with a prefix), or two files of other
    names.
    """
    kind, model = _tokenizer_type(settings), settings.get("tokenizer-model")
    field = name_of(RUN.data.tokenizer)
    if kind in (None, "NullTokenizer"):
        return {field: None}
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
        paired = vocab.name.removesuffix(_PAIR[0]) + _PAIR[1] == merges.name and vocab.parent == merges.parent
        return {field: str(vocab) if paired else files}
    if kind not in _FILES:
        reason = f": {_UNREAD[kind]}" if kind in _UNREAD else ""
        raise StrettoError(
            f"--tokenizer-type is {kind}: such a tokenizer is not read here{reason}",
            hint="text that is tokenised already needs none: --data-path PREFIX"
            f" (what is read: {', '.join(_FILES)}, GPT2BPETokenizer, NullTokenizer)",
        )
    return {field: model}


# ------------------------------------------------------------------ attention


def _write_heads(values: JobValues) -> Settings:
    heads, groups = values[MODEL.heads], values[MODEL.kv_heads]
    grouped = {"group-query-attention": True, "num-query-groups": groups} if groups != heads else {}
    return {"num-attention-heads": heads, **grouped}


def _read_heads(settings: Settings) -> Values:
    heads = settings["num-attention-heads"]
    groups = settings.get("num-query-groups", 1) if "group-query-attention" in settings else heads
    return {MODEL.heads: heads, MODEL.kv_heads: groups}


def _write_latent(values: JobValues) -> Settings:
    """Latent attention has separate features with and without positions in queries and keys."""
    head, rank = values[MODEL.head_dim], values[KV_RANK]
    if rank is None:
        return {"kv-channels": head}
    return {
        "multi-latent-attention": True,
        "kv-lora-rank": rank,
        **({} if values[LATENT.q_rank] is None else {"q-lora-rank": values[LATENT.q_rank]}),
        "qk-head-dim": head - values[LATENT.rope_dim],
        "qk-pos-emb-head-dim": values[LATENT.rope_dim],
        "v-head-dim": values[LATENT.value_dim],
        "qk-layernorm": True,  # the norms of the narrow vectors
    }


def _read_latent(settings: Settings) -> Values:
    if "multi-latent-attention" not in settings:
        default = settings["hidden-size"] // settings["num-attention-heads"]
        return {MODEL.head_dim: settings.get("kv-channels", default)}
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
    of_heads = "qk-layernorm" in settings and "multi-latent-attention" not in settings
    return {ATTENTION.norm: "head" if of_heads else None}


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


# ------------------------------------------------------------------ experts


def _expert_rule(fields: tuple[object, ...], settings: str, write: Writer, read: Reader) -> Rule:
    """Return a rule that does not apply to a model without experts."""
    return rule(
        fields,
        settings,
        lambda values: {} if values[EXPERTS] is None else write(values),
        lambda settings: read(settings) if settings.get("num-experts") else {},
    )


def _write_experts(values: JobValues) -> Settings:
    shared = values[MOE.shared_ffn]
    return {
        "num-experts": values[EXPERTS],
        "moe-router-topk": values[MOE.top_k],
        "moe-ffn-hidden-size": values[MODEL.ffn] if values[MOE.ffn] is None else values[MOE.ffn],
        **({"moe-shared-expert-intermediate-size": shared} if shared else {}),
        **({"moe-shared-expert-gate": True} if values[MOE.shared_gate] else {}),
        "moe-grouped-gemm": True,
        "moe-token-dispatcher-type": "alltoall",
    }


def _read_experts(settings: Settings) -> Values:
    width = settings.get("moe-ffn-hidden-size")
    return {
        MOE.experts: settings["num-experts"],
        MOE.top_k: settings.get("moe-router-topk", 2),
        MOE.ffn: None if width == ffn_of(settings) else width,
        MOE.shared_ffn: settings.get("moe-shared-expert-intermediate-size", 0),
        MOE.shared_gate: "moe-shared-expert-gate" in settings,
    }


def _write_scores(values: JobValues) -> Settings:
    """Write how logits become weights: by a softmax of the chosen ones, or of all before the choice."""
    normalise, single = values[MOE.normalise], values[MOE.top_k] == 1
    if values[MOE.score] == "sigmoid":
        if not normalise and not single:
            instead = "with sigmoid scores Megatron-LM always normalises the weights of several experts"
            raise refused(MOE.normalise, False, instead, (True,))
        return {"moe-router-score-function": "sigmoid"}
    if normalise and single:
        instead = "the normalised weight of a single expert is always 1, so Megatron-LM does not offer it"
        raise refused(MOE.normalise, True, instead, (False,))
    before = {} if normalise else {"moe-router-pre-softmax": True}
    return {"moe-router-score-function": "softmax", **before}


def _read_scores(settings: Settings) -> Values:
    score = settings.get("moe-router-score-function", "softmax")
    if score not in ("softmax", "sigmoid"):
        message = f"--moe-router-score-function is {score}: not modelled here"
        raise StrettoError(message, hint="what is: softmax, sigmoid")
    single = settings.get("moe-router-topk", 2) == 1
    normalise = not single if score == "sigmoid" else "moe-router-pre-softmax" not in settings
    return {MOE.score: score, MOE.normalise: normalise}


def _write_losses(values: JobValues) -> Settings:
    balance, z = values[MOE.balance], values[MOE.z]
    return {
        # of each sequence, as here
        "moe-router-load-balancing-type": ["seq_aux_loss" if balance else "none"],
        **({"moe-aux-loss-coeff": [balance]} if balance else {}),
        **({"moe-z-loss-coeff": z} if z else {}),
    }


def _read_losses(settings: Settings) -> Values:
    kinds = settings.get("moe-router-load-balancing-type", ["aux_loss"])
    if "sinkhorn" in kinds:
        raise StrettoError(
            "--moe-router-load-balancing-type is sinkhorn, which is not priced",
            hint="what is: aux_loss, seq_aux_loss, global_aux_loss, none",
        )
    balance = 0.0 if kinds == ["none"] else settings.get("moe-aux-loss-coeff", [0.0])[0]
    return {MOE.balance: balance, MOE.z: settings.get("moe-z-loss-coeff", 0.0)}


def _write_capacity(values: JobValues) -> Settings:
    capacity, drop = values[MOE.capacity], values[MOE.drop]
    if capacity is None:
        return {} if drop != "position" else {"moe-token-drop-policy": drop}
    return {"moe-expert-capacity-factor": capacity, "moe-token-drop-policy": drop}


def _read_capacity(settings: Settings) -> Values:
    if not settings.get("num-experts"):
        return {}
    factor = settings.get("moe-expert-capacity-factor")
    return {
        MOE.capacity: factor if factor is not None and factor > 0 else None,
        MOE.drop: settings.get("moe-token-drop-policy", "probs"),
    }


def _capacity_notes(values: JobValues) -> Iterable[str]:
    if values[MOE.capacity] is not None:
        yield "model.moe.capacity: of each sequence here, of a rank's whole microbatch in Megatron-LM"


def _write_layers_with_experts(values: JobValues) -> Settings:
    """Write which blocks have experts, as a list of ones and zeros."""
    layers, dense = values[MODEL.layers], values[MOE.dense_layers]
    every = values[MOE.every]
    if every == 1:
        return {"moe-layer-freq": f"([0]*{dense}+[1]*{layers - dense})"} if dense else {}
    blocks = [int(i >= dense and (i + 1) % every == 0) for i in range(layers)]
    return {"moe-layer-freq": f"({blocks})".replace(" ", "")}


def _read_layers_with_experts(settings: Settings) -> Values:
    """Read a number n (each n-th block from the first on), or a list such as "([0]*3+[1]*58)"."""
    text, layers = settings.get("moe-layer-freq"), settings["num-layers"]
    if text is None:
        return {}
    if text.strip().isdecimal():
        blocks = [int(i % int(text) == 0) for i in range(layers)]
    else:
        try:
            blocks = _listed(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, ValueError):
            blocks = []
        if len(blocks) != layers or not set(blocks) <= {0, 1}:
            raise StrettoError(
                f"--moe-layer-freq {text!r} gives no 0 or 1 for each of {layers} layers",
                hint=f"as in ([0]*1+[1]*{layers - 1})",
            )
    first = blocks.index(1) if 1 in blocks else layers
    for every in range(1, layers + 1):
        for dense in (0, first):
            if blocks == [int(i >= dense and (i + 1) % every == 0) for i in range(layers)]:
                return {MOE.dense_layers: dense, MOE.every: every}
    raise StrettoError(
        f"--moe-layer-freq {text}: such a pattern of blocks is not priced",
        hint="what is: leading blocks without experts, and of the others every n-th",
    )


def _listed(node: ast.expr) -> list[int]:
    """Return the value of an expression of lists of numbers, `+` and `*`; raise ValueError for any other."""
    match node:
        case ast.List(elts=items):
            numbers = [item.value for item in items if isinstance(item, ast.Constant)]
            if len(numbers) == len(items):
                return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _listed(left) + _listed(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int() as times)) if times <= 10_000:
            return _listed(left) * times
        case _:
            pass
    raise ValueError(node)


def _write_router_bias(values: JobValues) -> Settings:
    if values[MOE.router_bias] and not values[MODEL.bias]:
        instead = "Megatron-LM's router has a bias where all linear layers have one"
        raise refused(MOE.router_bias, True, instead, (False,))
    return {}


def _read_router_bias(settings: Settings) -> Values:
    return {MOE.router_bias: "disable-bias-linear" not in settings} if settings.get("num-experts") else {}


def _write_correction(values: JobValues) -> Settings:
    """Write the biases that balance experts; Megatron-LM always updates them."""
    if not values[MOE.correction]:
        return {}
    if values[MOE.score] != "sigmoid":
        raise refused(MOE.correction, True, "Megatron-LM corrects sigmoid scores alone", (False,))
    return {"moe-router-enable-expert-bias": True, "moe-router-bias-update-rate": values[MOE.correction_rate]}


def _read_correction(settings: Settings) -> Values:
    if "moe-router-enable-expert-bias" not in settings:
        return {}
    rate = settings.get("moe-router-bias-update-rate", 1e-3)
    return {MOE.correction: True, MOE.correction_rate: rate}


def _write_groups(values: JobValues) -> Settings:
    """A group's score is the sum of its best experts there, as many as a token takes of each group."""
    groups, kind = values[MOE.groups], values[MOE.group_score]
    if groups == 1:
        return {}
    each = values[MOE.top_k] // values[MOE.top_groups]
    if each != (2 if kind == "top2" else 1):
        instead = f"Megatron-LM scores a group by its top_k / top_groups = {each} best experts"
        raise refused(MOE.group_score, kind, instead, ("top2" if each == 2 else "max",))
    return {"moe-router-num-groups": groups, "moe-router-group-topk": values[MOE.top_groups]}


def _read_groups(settings: Settings) -> Values:
    groups, top = settings.get("moe-router-num-groups"), settings.get("moe-router-group-topk")
    if groups is None or top is None:
        return {}
    score = "top2" if settings.get("moe-router-topk", 2) // top == 2 else "max"
    return {MOE.groups: groups, MOE.top_groups: top, MOE.group_score: score}


_EXPERTS: tuple[Rule, ...] = (
    _expert_rule(
        (MOE.experts, MOE.top_k, MOE.ffn, MOE.shared_ffn, MOE.shared_gate),
        "num-experts moe-router-topk moe-ffn-hidden-size moe-shared-expert-gate moe-grouped-gemm "
        "moe-shared-expert-intermediate-size moe-token-dispatcher-type",
        _write_experts,
        _read_experts,
    ),
    _expert_rule(
        (MOE.score, MOE.normalise),
        "moe-router-score-function moe-router-pre-softmax",
        _write_scores,
        _read_scores,
    ),
    _expert_rule(
        (MOE.balance, MOE.z),
        "moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff",
        _write_losses,
        _read_losses,
    ),
    rule(
        (MOE.capacity, MOE.drop),
        "moe-expert-capacity-factor moe-token-drop-policy",
        _write_capacity,
        _read_capacity,
        notes=_capacity_notes,
    ),
    _expert_rule(
        (MOE.dense_layers, MOE.every), "moe-layer-freq", _write_layers_with_experts, _read_layers_with_experts
    ),
    rule(MOE.router_bias, write=_write_router_bias, read=_read_router_bias),
    rule(
        (MOE.correction, MOE.correction_rate),
        "moe-router-enable-expert-bias moe-router-bias-update-rate",
        _write_correction,
        _read_correction,
    ),
    rule(
        (MOE.groups, MOE.top_groups, MOE.group_score),
        "moe-router-num-groups moe-router-group-topk",
        lambda values: {} if values[EXPERTS] is None else _write_groups(values),
        _read_groups,
    ),
    _expert_rule(
        (MOE.scale,),
        _SCALE,
        lambda values: {} if values[MOE.scale] == 1.0 else {_SCALE: values[MOE.scale]},
        lambda settings: {MOE.scale: settings[_SCALE]} if _SCALE in settings else {},
    ),
)


# ------------------------------------------------------------------ all of it


def _family_notes(values: JobValues) -> Iterable[str]:
    yield f"model.family={values[MODEL.family]}: a name for usual values, which are written one by one"


def _beyond_notes(values: JobValues) -> Iterable[str]:
    for feature in values[MODEL.unmodelled_features]:
        yield f"the model also has {feature}: no size depends on it, and no argument is written for it"


_DECODERS = "pretrain_gpt.py trains decoders"
MODEL_RULES: tuple[Rule, ...] = (
    renamed("num-layers", MODEL.layers),
    renamed("hidden-size", MODEL.hidden),
    rule(
        (MODEL.heads, MODEL.kv_heads),
        "num-attention-heads group-query-attention num-query-groups",
        _write_heads,
        _read_heads,
    ),
    rule(
        (MODEL.head_dim, LATENT.kv_rank, LATENT.rope_dim, LATENT.value_dim, LATENT.q_rank),
        "kv-channels multi-latent-attention kv-lora-rank q-lora-rank qk-head-dim "
        "qk-pos-emb-head-dim v-head-dim",
        _write_latent,
        _read_latent,
    ),
    rule(
        MODEL.ffn,
        "ffn-hidden-size",
        lambda values: {"ffn-hidden-size": values[MODEL.ffn]},
        lambda settings: {MODEL.ffn: ffn_of(settings)},
    ),
    rule(MODEL.mlp, ("swiglu", "squared-relu", "quick-geglu", *_QUICK), _write_mlp, _read_mlp),
    rule(MODEL.vocab, "vocab-size padded-vocab-size", _write_vocabulary, _read_vocabulary),
    rule(
        RUN.data.tokenizer,
        "tokenizer-type tokenizer-model vocab-file merge-file",
        _write_tokenizer,
        _read_tokenizer,
    ),
    renamed("max-position-embeddings", MODEL.sequence),
    flag("untie-embeddings-and-output-weights", MODEL.tied, when=False),
    rule(
        MODEL.dropout,
        "hidden-dropout attention-dropout",
        lambda values: dict.fromkeys(("hidden-dropout", "attention-dropout"), values[MODEL.dropout]),
        lambda settings: {
            MODEL.dropout: 0.0 if positions_of(settings) == "rotary" else settings.get("hidden-dropout", 0.1)
        },
    ),
    renamed("init-method-std", JOB.initial.init_std, default=Initial.init_std),
    restricted(
        JOB.initial.scaled_init, (True,), "Megatron-LM divides by sqrt(2 layers) in output projections"
    ),
    renamed("norm-epsilon", MODEL.norm_eps, default=1e-5),
    rule(MODEL.family, notes=_family_notes),
    rule(
        (MODEL.position_embedding, MODEL.rope_theta),
        "position-embedding-type use-rotary-position-embeddings rotary-base",
        _write_positions,
        _read_positions,
    ),
    rule(
        tuple(getattr(ROPE, entry.name) for entry in fields(RopeScaling)),
        "use-rope-scaling rope-scaling-factor rope-type rotary-scaling-factor mscale mscale-all-dim "
        f"yarn-original-max-position-embeddings yarn-beta-fast yarn-beta-slow {_ROUND} no-{_ROUND}",
        _write_rope,
        _read_rope,
    ),
    flag("rotary-interleaved", ATTENTION.interleaved),
    without_encoder(_DECODERS, MODEL.encoder_layers),
    restricted(ATTENTION.causal, (AttentionShape.causal,), _DECODERS),
    restricted(ATTENTION.buckets, (AttentionShape.buckets,), _DECODERS),
    restricted(ATTENTION.max_distance, (AttentionShape.max_distance,), _DECODERS),
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
        (LORA.alpha, LORA.dropout, LORA.targets, LORA.rslora),
    ),
    restricted(JOB.trained.freeze, ((),), "Megatron-LM's arguments freeze no weights"),
    rule(ATTENTION.proj_bias, write=_write_proj_bias),
    rule(
        MODEL.bias,
        "disable-bias-linear",
        _write_bias,
        lambda settings: {MODEL.bias: "disable-bias-linear" not in settings},
    ),
    rule(MODEL.norm, "normalization apply-layernorm-1p", _write_norm, _read_norm),
    rule(MODEL.unmodelled_features, notes=_beyond_notes),
    rule(ATTENTION.norm, "qk-layernorm", _write_head_norm, _read_head_norm),
    rule(ATTENTION.qkv_bias, "add-qkv-bias", _write_qkv_bias, _read_qkv_bias),
    rule(
        ATTENTION.sinks,
        "softmax-type",
        lambda values: {"softmax-type": "learnable"} if values[ATTENTION.sinks] else {},
        _read_sinks,
    ),
    rule(
        (ATTENTION.window, ATTENTION.full_every),
        "window-size window-attn-skip-freq",
        _write_window,
        _read_window,
    ),
    *_EXPERTS,
)
