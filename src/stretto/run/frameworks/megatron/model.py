"""The model's sizes in Megatron-LM's arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stretto.errors import StrettoError
from stretto.run.frameworks.choices import Choices
from stretto.run.frameworks.mapping import Rule, Settings, flag, refused, same
from stretto.spec.presets import preset

# entries of tokenizers that come without --vocab-size; others are looked up by the model's name
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_POSITIONS = {"rope": "llama", "learned_absolute": "gpt"}


# ------------------------------------------------------------------ family: positions, MLP, norm, biases


def _write_family(choices: Choices) -> Settings:
    rotary = choices["model.family"] == "llama"
    base = {"rotary-base": int(choices["model.rope_theta"])} if rotary else {}
    return {"position-embedding-type": "rope" if rotary else "learned_absolute", **base}


def _read_family(settings: Settings) -> Mapping[str, Any]:
    return {
        "model.family": family_of(settings),
        "model.rope_theta": float(settings.get("rotary-base", 10000)),
    }


def family_of(settings: Settings) -> str:
    """Which family's positions the arguments choose.

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
    }
    return kinds[choices["model.mlp"]]


def _read_mlp(settings: Settings) -> Mapping[str, Any]:
    return {
        "model.mlp": "swiglu" if "swiglu" in settings else "relu2" if "squared-relu" in settings else "gelu"
    }


def _write_ffn(choices: Choices) -> Settings:
    return {"ffn-hidden-size": choices["model.ffn"]}


def _read_ffn(settings: Settings) -> Mapping[str, Any]:
    hidden = settings["hidden-size"]
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in settings else 4 * hidden
    return {"model.ffn": settings.get("ffn-hidden-size", usual)}


def _write_bias(choices: Choices) -> Settings:
    bias, of_norm = choices["model.bias"], choices["model.norm"] == "layer"
    if not bias and of_norm and choices["model.family"] == "gpt":
        instead = "Megatron-LM's LayerNorm always has a bias"
        raise refused("model.bias", False, instead, (True,))
    return {} if bias else {"disable-bias-linear": True}


def _read_bias(settings: Settings) -> Mapping[str, Any]:
    return {"model.bias": "disable-bias-linear" not in settings}


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
    rotary = family_of(settings) == "llama"
    return {"model.dropout": 0.0 if rotary else settings.get("hidden-dropout", 0.1)}


def _write_vocabulary(choices: Choices) -> Settings:
    vocab, tokenizer = choices["model.vocab"], choices["data.tokenizer"]
    if tokenizer is None:  # Megatron's NullTokenizer adds one entry, for the end of a document
        return {"tokenizer-type": "NullTokenizer", "vocab-size": vocab - 1}
    return {"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": tokenizer, "vocab-size": vocab}


def _read_vocabulary(settings: Settings) -> Mapping[str, Any]:
    kind, model = settings.get("tokenizer-type"), settings.get("tokenizer-model", "")
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


# ------------------------------------------------------------------ experts


def _write_experts(choices: Choices) -> Settings:
    if choices["model.moe.experts"] is None:
        return {}
    shared, ffn = choices["model.moe.shared_ffn"], choices["model.moe.ffn"]
    return {
        "num-experts": choices["model.moe.experts"],
        "moe-router-topk": choices["model.moe.top_k"],
        "moe-ffn-hidden-size": choices["model.ffn"] if ffn is None else ffn,
        **({"moe-shared-expert-intermediate-size": shared} if shared else {}),
        **({"moe-shared-expert-gate": True} if choices["model.moe.shared_gate"] else {}),
        "moe-grouped-gemm": True,
        "moe-token-dispatcher-type": "alltoall",
    }


def _read_experts(settings: Settings) -> Mapping[str, Any]:
    if not settings.get("num-experts"):
        return {}
    width = settings.get("moe-ffn-hidden-size")
    return {
        "model.moe.experts": settings["num-experts"],
        "model.moe.top_k": settings.get("moe-router-topk", 2),
        "model.moe.ffn": None if width == _read_ffn(settings)["model.ffn"] else width,
        "model.moe.shared_ffn": settings.get("moe-shared-expert-intermediate-size", 0),
        "model.moe.shared_gate": "moe-shared-expert-gate" in settings,
    }


def _write_scores(choices: Choices) -> Settings:
    """How logits become weights: the softmax of the chosen ones, or of all before the choice."""
    if choices["model.moe.experts"] is None:
        return {}
    score, normalise = choices["model.moe.score"], choices["model.moe.normalise"]
    one = choices["model.moe.top_k"] == 1
    if score == "sigmoid":
        if not normalise and not one:
            instead = "with sigmoid scores Megatron-LM always normalises the weights of several experts"
            raise refused("model.moe.normalise", False, instead, (True,))
        return {"moe-router-score-function": "sigmoid"}
    if normalise and one:
        instead = "the normalised weight of a single expert is always 1, so Megatron-LM does not offer it"
        raise refused("model.moe.normalise", True, instead, (False,))
    before = {} if normalise else {"moe-router-pre-softmax": True}
    return {"moe-router-score-function": "softmax", **before}


def _read_scores(settings: Settings) -> Mapping[str, Any]:
    if not settings.get("num-experts"):
        return {}
    score = settings.get("moe-router-score-function", "softmax")
    one = settings.get("moe-router-topk", 2) == 1
    whole = not one if score == "sigmoid" else "moe-router-pre-softmax" not in settings
    return {"model.moe.score": score, "model.moe.normalise": whole}


def _write_losses(choices: Choices) -> Settings:
    if choices["model.moe.experts"] is None:
        return {}
    balance, z = choices["model.moe.balance"], choices["model.moe.z"]
    kind = "seq_aux_loss" if balance else "none"  # of each sequence, as ours
    return {
        "moe-router-load-balancing-type": [kind],
        **({"moe-aux-loss-coeff": [balance]} if balance else {}),
        **({"moe-z-loss-coeff": z} if z else {}),
    }


def _read_losses(settings: Settings) -> Mapping[str, Any]:
    if not settings.get("num-experts"):
        return {}
    kinds = settings.get("moe-router-load-balancing-type", ["aux_loss"])
    if "sinkhorn" in kinds:
        raise StrettoError(
            "--moe-router-load-balancing-type is sinkhorn, which is not priced",
            hint="what is: aux_loss, seq_aux_loss, global_aux_loss, none",
        )
    balance = 0.0 if kinds == ["none"] else settings.get("moe-aux-loss-coeff", [0.0])[0]
    return {"model.moe.balance": balance, "model.moe.z": settings.get("moe-z-loss-coeff", 0.0)}


def _write_capacity(choices: Choices) -> Settings:
    capacity, drop = choices["model.moe.capacity"], choices["model.moe.drop"]
    if capacity is None:
        return {} if drop != "position" else {"moe-token-drop-policy": drop}
    return {"moe-expert-capacity-factor": capacity, "moe-token-drop-policy": drop}


def _read_capacity(settings: Settings) -> Mapping[str, Any]:
    if not settings.get("num-experts"):
        return {}
    factor = settings.get("moe-expert-capacity-factor")
    return {
        "model.moe.capacity": factor if factor is not None and factor > 0 else None,
        "model.moe.drop": settings.get("moe-token-drop-policy", "probs"),
    }


def _capacity_notes(choices: Choices) -> Iterable[str]:
    if choices["model.moe.capacity"] is not None:
        yield "model.moe.capacity: of each sequence here, of a rank's whole microbatch in Megatron-LM"


def _write_which(choices: Choices) -> Settings:
    """Which blocks have experts, as a list of ones and zeros."""
    if choices["model.moe.experts"] is None:
        return {}
    layers, dense = choices["model.layers"], choices["model.moe.dense_layers"]
    every = choices["model.moe.every"]
    if not dense and every == 1:
        return {}
    if every == 1:
        return {"moe-layer-freq": f"([0]*{dense}+[1]*{layers - dense})"}
    there = [int(i >= dense and (i + 1) % every == 0) for i in range(layers)]
    return {"moe-layer-freq": f"({there})".replace(" ", "")}


def _read_which(settings: Settings) -> Mapping[str, Any]:
    text = settings.get("moe-layer-freq")
    if not settings.get("num-experts") or text is None:
        return {}
    there = _pattern(text, settings["num-layers"])
    first = there.index(1) if 1 in there else len(there)
    for every in range(1, len(there) + 1):
        for dense in (0, first):
            if there == [int(i >= dense and (i + 1) % every == 0) for i in range(len(there))]:
                return {"model.moe.dense_layers": dense, "model.moe.every": every}
    raise StrettoError(
        f"--moe-layer-freq {text}: such a pattern of blocks is not priced",
        hint="what is: leading blocks without experts, and of the others every n-th",
    )


def _pattern(text: str, layers: int) -> list[int]:
    """The blocks with experts of a number n (each n-th from the first on), or of a list such as
    "([0]*3+[1]*58)".
    """
    if text.strip().isdecimal():
        every = int(text)
        return [int(i % every == 0) for i in range(layers)]
    try:
        there = _listed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        there = []
    if len(there) != layers or not set(there) <= {0, 1}:
        raise StrettoError(
            f"--moe-layer-freq {text!r} gives no 0 or 1 for each of {layers} layers",
            hint=f"as in ([0]*1+[1]*{layers - 1})",
        )
    return there


def _listed(node: ast.expr) -> list[int]:
    """The value of an expression of lists of numbers, `+` and `*`."""
    match node:
        case ast.List(elts=items):
            return [_number(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _listed(left) + _listed(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            times = _number(right)
            if times > 10_000:
                raise ValueError(times)
            return _listed(left) * times
        case _:
            raise ValueError(node)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(node)


def _write_router_bias(choices: Choices) -> Settings:
    """A bias that is learnt comes with those of all linears; one that only balances, with sigmoid scores."""
    if not choices["model.moe.router_bias"]:
        return {}
    if choices["model.moe.score"] == "sigmoid":
        return {"moe-router-enable-expert-bias": True}
    if not choices["model.bias"]:
        instead = "Megatron-LM's router has a bias where all linear layers have one"
        raise refused("model.moe.router_bias", True, instead, (False,))
    return {}


def _read_router_bias(settings: Settings) -> Mapping[str, Any]:
    if not settings.get("num-experts"):
        return {}
    bias = "moe-router-enable-expert-bias" in settings or "disable-bias-linear" not in settings
    return {"model.moe.router_bias": bias}


def _beyond_notes(choices: Choices) -> Iterable[str]:
    for words in choices["model.beyond"]:
        yield f"the model also has {words}: no size depends on it, and no argument is written for it"


def _rule(choices: Sequence[str], settings: Sequence[str], write: Any, read: Any, notes: Any = None) -> Rule:
    more = {} if notes is None else {"notes": notes}
    return Rule(choices=tuple(choices), settings=tuple(settings), write=write, read=read, **more)


MODEL: tuple[Rule, ...] = (
    same("num-layers", "model.layers"),
    same("hidden-size", "model.hidden"),
    _rule(
        ("model.heads", "model.kv_heads"),
        ("num-attention-heads", "group-query-attention", "num-query-groups"),
        _write_heads,
        _read_heads,
    ),
    _rule(
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
    _rule(("model.ffn",), ("ffn-hidden-size",), _write_ffn, _read_ffn),
    _rule(("model.mlp",), ("swiglu", "squared-relu"), _write_mlp, _read_mlp),
    _rule(
        ("model.vocab", "data.tokenizer"),
        ("tokenizer-type", "tokenizer-model", "vocab-size", "padded-vocab-size"),
        _write_vocabulary,
        _read_vocabulary,
    ),
    same("max-position-embeddings", "model.positions"),
    flag("untie-embeddings-and-output-weights", "model.tied", when=False),
    _rule(("model.dropout",), ("hidden-dropout", "attention-dropout"), _write_dropout, _read_dropout),
    same("norm-epsilon", "model.norm_eps", usual=1e-5),
    _rule(
        ("model.family", "model.rope_theta"),
        ("position-embedding-type", "use-rotary-position-embeddings", "rotary-base"),
        _write_family,
        _read_family,
    ),
    _rule(("model.bias",), ("disable-bias-linear",), _write_bias, _read_bias),
    same(
        "normalization",
        "model.norm",
        usual="LayerNorm",
        to=lambda norm: "RMSNorm" if norm == "rms" else "LayerNorm",
        back=lambda norm: "rms" if norm == "RMSNorm" else "layer",
    ),
    Rule(choices=("model.beyond",), write=lambda _: {}, notes=_beyond_notes),
    _rule(("model.attention.norm",), ("qk-layernorm",), _write_head_norm, _read_head_norm),
    _rule(("model.attention.qkv_bias",), ("add-qkv-bias",), _write_qkv_bias, _read_qkv_bias),
    _rule(("model.attention.sinks",), ("softmax-type",), _write_sinks, _read_sinks),
    _rule(
        ("model.attention.window", "model.attention.full_every"),
        ("window-size", "window-attn-skip-freq"),
        _write_window,
        _read_window,
    ),
    _rule(
        tuple(f"model.moe.{name}" for name in ("experts", "top_k", "ffn", "shared_ffn", "shared_gate")),
        (
            "num-experts",
            "moe-router-topk",
            "moe-ffn-hidden-size",
            "moe-shared-expert-gate",
            "moe-shared-expert-intermediate-size",
            "moe-grouped-gemm",
            "moe-token-dispatcher-type",
        ),
        _write_experts,
        _read_experts,
    ),
    _rule(
        ("model.moe.score", "model.moe.normalise"),
        ("moe-router-score-function", "moe-router-pre-softmax"),
        _write_scores,
        _read_scores,
    ),
    _rule(
        ("model.moe.balance", "model.moe.z"),
        ("moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-z-loss-coeff"),
        _write_losses,
        _read_losses,
    ),
    _rule(
        ("model.moe.capacity", "model.moe.drop"),
        ("moe-expert-capacity-factor", "moe-token-drop-policy"),
        _write_capacity,
        _read_capacity,
        _capacity_notes,
    ),
    _rule(("model.moe.dense_layers", "model.moe.every"), ("moe-layer-freq",), _write_which, _read_which),
    _rule(
        ("model.moe.router_bias",), ("moe-router-enable-expert-bias",), _write_router_bias, _read_router_bias
    ),
)
