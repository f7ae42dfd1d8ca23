"""The experts of a model in Megatron-LM's arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from stretto.errors import StrettoError
from stretto_interop.frameworks.choices import Choices
from stretto_interop.frameworks.mapping import Rule, Settings, refused, rule


def ffn_of(settings: Settings) -> int:
    """Inner width of the MLP, and of experts that have none of their own."""
    hidden = settings["hidden-size"]
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in settings else 4 * hidden
    return settings.get("ffn-hidden-size", usual)


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
        "model.moe.ffn": None if width == ffn_of(settings) else width,
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
    if score not in ("softmax", "sigmoid"):
        what = f"--moe-router-score-function is {score}: not modelled here"
        raise StrettoError(what, hint="what is: softmax, sigmoid")
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
    """Megatron-LM's router has a trained bias where all linear layers have one."""
    if choices["model.moe.router_bias"] and not choices["model.bias"]:
        instead = "Megatron-LM's router has a bias where all linear layers have one"
        raise refused("model.moe.router_bias", True, instead, (False,))
    return {}


def _read_router_bias(settings: Settings) -> Mapping[str, Any]:
    if not settings.get("num-experts"):
        return {}
    return {"model.moe.router_bias": "disable-bias-linear" not in settings}


def _write_correction(choices: Choices) -> Settings:
    """The numbers that balance experts; Megatron-LM always updates them."""
    if not choices["model.moe.correction"]:
        return {}
    if choices["model.moe.score"] != "sigmoid":
        instead = "Megatron-LM corrects sigmoid scores alone"
        raise refused("model.moe.correction", True, instead, (False,))
    return {
        "moe-router-enable-expert-bias": True,
        "moe-router-bias-update-rate": choices["model.moe.correction_rate"],
    }


def _read_correction(settings: Settings) -> Mapping[str, Any]:
    if "moe-router-enable-expert-bias" not in settings:
        return {}
    rate = settings.get("moe-router-bias-update-rate", 1e-3)
    return {"model.moe.correction": True, "model.moe.correction_rate": rate}


def _write_groups(choices: Choices) -> Settings:
    """A group's score is the sum of its best experts there, as many as a token takes of each group."""
    experts, groups = choices["model.moe.experts"], choices["model.moe.groups"]
    if experts is None or groups == 1:
        return {}
    top, kind = choices["model.moe.top_groups"], choices["model.moe.group_score"]
    each = choices["model.moe.top_k"] // top
    if each != (2 if kind == "top2" else 1):
        instead = f"Megatron-LM scores a group by its top_k / top_groups = {each} best experts"
        raise refused("model.moe.group_score", kind, instead, ("top2" if each == 2 else "max",))
    return {"moe-router-num-groups": groups, "moe-router-group-topk": top}


def _read_groups(settings: Settings) -> Mapping[str, Any]:
    groups, top = settings.get("moe-router-num-groups"), settings.get("moe-router-group-topk")
    if groups is None or top is None:
        return {}
    each = settings.get("moe-router-topk", 2) // top
    return {
        "model.moe.groups": groups,
        "model.moe.top_groups": top,
        "model.moe.group_score": "top2" if each == 2 else "max",
    }


def _write_weight_scale(choices: Choices) -> Settings:
    if choices["model.moe.experts"] is None or choices["model.moe.scale"] == 1.0:
        return {}
    return {"moe-router-topk-scaling-factor": choices["model.moe.scale"]}


def _read_weight_scale(settings: Settings) -> Mapping[str, Any]:
    scale = settings.get("moe-router-topk-scaling-factor")
    return {} if scale is None else {"model.moe.scale": scale}


EXPERTS: tuple[Rule, ...] = (
    rule(
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
    rule(
        ("model.moe.score", "model.moe.normalise"),
        ("moe-router-score-function", "moe-router-pre-softmax"),
        _write_scores,
        _read_scores,
    ),
    rule(
        ("model.moe.balance", "model.moe.z"),
        ("moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-z-loss-coeff"),
        _write_losses,
        _read_losses,
    ),
    rule(
        ("model.moe.capacity", "model.moe.drop"),
        ("moe-expert-capacity-factor", "moe-token-drop-policy"),
        _write_capacity,
        _read_capacity,
        _capacity_notes,
    ),
    rule(("model.moe.dense_layers", "model.moe.every"), ("moe-layer-freq",), _write_which, _read_which),
    rule(("model.moe.router_bias",), (), _write_router_bias, _read_router_bias),
    rule(
        ("model.moe.correction", "model.moe.correction_rate"),
        ("moe-router-enable-expert-bias", "moe-router-bias-update-rate"),
        _write_correction,
        _read_correction,
    ),
    rule(
        ("model.moe.groups", "model.moe.top_groups", "model.moe.group_score"),
        ("moe-router-num-groups", "moe-router-group-topk"),
        _write_groups,
        _read_groups,
    ),
    rule(("model.moe.scale",), ("moe-router-topk-scaling-factor",), _write_weight_scale, _read_weight_scale),
)
