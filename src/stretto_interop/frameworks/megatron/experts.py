"""The experts of a model in Megatron-LM's arguments."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from stretto.errors import StrettoError
from stretto_interop.frameworks.fields import EXPERTS, MODEL, MOE, JobValues
from stretto_interop.frameworks.mapping import Rule, Settings, Values, refused, rule


def ffn_of(settings: Settings) -> int:
    """Inner width of the MLP, and of experts that have none of their own."""
    hidden = settings["hidden-size"]
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if "swiglu" in settings else 4 * hidden
    return settings.get("ffn-hidden-size", usual)


def _write_experts(values: JobValues) -> Settings:
    if values[EXPERTS] is None:
        return {}
    shared, ffn = values[MOE.shared_ffn], values[MOE.ffn]
    return {
        "num-experts": values[EXPERTS],
        "moe-router-topk": values[MOE.top_k],
        "moe-ffn-hidden-size": values[MODEL.ffn] if ffn is None else ffn,
        **({"moe-shared-expert-intermediate-size": shared} if shared else {}),
        **({"moe-shared-expert-gate": True} if values[MOE.shared_gate] else {}),
        "moe-grouped-gemm": True,
        "moe-token-dispatcher-type": "alltoall",
    }


def _read_experts(settings: Settings) -> Values:
    if not settings.get("num-experts"):
        return {}
    width = settings.get("moe-ffn-hidden-size")
    return {
        MOE.experts: settings["num-experts"],
        MOE.top_k: settings.get("moe-router-topk", 2),
        MOE.ffn: None if width == ffn_of(settings) else width,
        MOE.shared_ffn: settings.get("moe-shared-expert-intermediate-size", 0),
        MOE.shared_gate: "moe-shared-expert-gate" in settings,
    }


def _write_scores(values: JobValues) -> Settings:
    """How logits become weights: the softmax of the chosen ones, or of all before the choice."""
    if values[EXPERTS] is None:
        return {}
    score, normalise = values[MOE.score], values[MOE.normalise]
    one = values[MOE.top_k] == 1
    if score == "sigmoid":
        if not normalise and not one:
            instead = "with sigmoid scores Megatron-LM always normalises the weights of several experts"
            raise refused(MOE.normalise, False, instead, (True,))
        return {"moe-router-score-function": "sigmoid"}
    if normalise and one:
        instead = "the normalised weight of a single expert is always 1, so Megatron-LM does not offer it"
        raise refused(MOE.normalise, True, instead, (False,))
    before = {} if normalise else {"moe-router-pre-softmax": True}
    return {"moe-router-score-function": "softmax", **before}


def _read_scores(settings: Settings) -> Values:
    if not settings.get("num-experts"):
        return {}
    score = settings.get("moe-router-score-function", "softmax")
    if score not in ("softmax", "sigmoid"):
        what = f"--moe-router-score-function is {score}: not modelled here"
        raise StrettoError(what, hint="what is: softmax, sigmoid")
    one = settings.get("moe-router-topk", 2) == 1
    whole = not one if score == "sigmoid" else "moe-router-pre-softmax" not in settings
    return {MOE.score: score, MOE.normalise: whole}


def _write_losses(values: JobValues) -> Settings:
    if values[EXPERTS] is None:
        return {}
    balance, z = values[MOE.balance], values[MOE.z]
    kind = "seq_aux_loss" if balance else "none"  # of each sequence, as ours
    return {
        "moe-router-load-balancing-type": [kind],
        **({"moe-aux-loss-coeff": [balance]} if balance else {}),
        **({"moe-z-loss-coeff": z} if z else {}),
    }


def _read_losses(settings: Settings) -> Values:
    if not settings.get("num-experts"):
        return {}
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


def _write_which(values: JobValues) -> Settings:
    """Which blocks have experts, as a list of ones and zeros."""
    if values[EXPERTS] is None:
        return {}
    layers, dense = values[MODEL.layers], values[MOE.dense_layers]
    every = values[MOE.every]
    if not dense and every == 1:
        return {}
    if every == 1:
        return {"moe-layer-freq": f"([0]*{dense}+[1]*{layers - dense})"}
    there = [int(i >= dense and (i + 1) % every == 0) for i in range(layers)]
    return {"moe-layer-freq": f"({there})".replace(" ", "")}


def _read_which(settings: Settings) -> Values:
    text = settings.get("moe-layer-freq")
    if not settings.get("num-experts") or text is None:
        return {}
    there = _pattern(text, settings["num-layers"])
    first = there.index(1) if 1 in there else len(there)
    for every in range(1, len(there) + 1):
        for dense in (0, first):
            if there == [int(i >= dense and (i + 1) % every == 0) for i in range(len(there))]:
                return {MOE.dense_layers: dense, MOE.every: every}
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


def _write_router_bias(values: JobValues) -> Settings:
    """Megatron-LM's router has a trained bias where all linear layers have one."""
    if values[MOE.router_bias] and not values[MODEL.bias]:
        instead = "Megatron-LM's router has a bias where all linear layers have one"
        raise refused(MOE.router_bias, True, instead, (False,))
    return {}


def _read_router_bias(settings: Settings) -> Values:
    if not settings.get("num-experts"):
        return {}
    return {MOE.router_bias: "disable-bias-linear" not in settings}


def _write_correction(values: JobValues) -> Settings:
    """The numbers that balance experts; Megatron-LM always updates them."""
    if not values[MOE.correction]:
        return {}
    if values[MOE.score] != "sigmoid":
        instead = "Megatron-LM corrects sigmoid scores alone"
        raise refused(MOE.correction, True, instead, (False,))
    return {
        "moe-router-enable-expert-bias": True,
        "moe-router-bias-update-rate": values[MOE.correction_rate],
    }


def _read_correction(settings: Settings) -> Values:
    if "moe-router-enable-expert-bias" not in settings:
        return {}
    rate = settings.get("moe-router-bias-update-rate", 1e-3)
    return {MOE.correction: True, MOE.correction_rate: rate}


def _write_groups(values: JobValues) -> Settings:
    """A group's score is the sum of its best experts there, as many as a token takes of each group."""
    experts, groups = values[EXPERTS], values[MOE.groups]
    if experts is None or groups == 1:
        return {}
    top, kind = values[MOE.top_groups], values[MOE.group_score]
    each = values[MOE.top_k] // top
    if each != (2 if kind == "top2" else 1):
        instead = f"Megatron-LM scores a group by its top_k / top_groups = {each} best experts"
        raise refused(MOE.group_score, kind, instead, ("top2" if each == 2 else "max",))
    return {"moe-router-num-groups": groups, "moe-router-group-topk": top}


def _read_groups(settings: Settings) -> Values:
    groups, top = settings.get("moe-router-num-groups"), settings.get("moe-router-group-topk")
    if groups is None or top is None:
        return {}
    each = settings.get("moe-router-topk", 2) // top
    return {
        MOE.groups: groups,
        MOE.top_groups: top,
        MOE.group_score: "top2" if each == 2 else "max",
    }


def _write_weight_scale(values: JobValues) -> Settings:
    if values[EXPERTS] is None or values[MOE.scale] == 1.0:
        return {}
    return {"moe-router-topk-scaling-factor": values[MOE.scale]}


def _read_weight_scale(settings: Settings) -> Values:
    scale = settings.get("moe-router-topk-scaling-factor")
    return {} if scale is None else {MOE.scale: scale}


EXPERT_RULES: tuple[Rule, ...] = (
    rule(
        *tuple(f"model.moe.{name}" for name in ("experts", "top_k", "ffn", "shared_ffn", "shared_gate")),
        settings=(
            "num-experts moe-router-topk moe-ffn-hidden-size moe-shared-expert-gate "
            "moe-shared-expert-intermediate-size moe-grouped-gemm moe-token-dispatcher-type"
        ),
        write=_write_experts,
        read=_read_experts,
    ),
    rule(
        MOE.score,
        MOE.normalise,
        settings="moe-router-score-function moe-router-pre-softmax",
        write=_write_scores,
        read=_read_scores,
    ),
    rule(
        MOE.balance,
        MOE.z,
        settings="moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff",
        write=_write_losses,
        read=_read_losses,
    ),
    rule(
        MOE.capacity,
        MOE.drop,
        settings="moe-expert-capacity-factor moe-token-drop-policy",
        write=_write_capacity,
        read=_read_capacity,
        notes=_capacity_notes,
    ),
    rule(MOE.dense_layers, MOE.every, settings="moe-layer-freq", write=_write_which, read=_read_which),
    rule(MOE.router_bias, write=_write_router_bias, read=_read_router_bias),
    rule(
        MOE.correction,
        MOE.correction_rate,
        settings="moe-router-enable-expert-bias moe-router-bias-update-rate",
        write=_write_correction,
        read=_read_correction,
    ),
    rule(
        MOE.groups,
        MOE.top_groups,
        MOE.group_score,
        settings="moe-router-num-groups moe-router-group-topk",
        write=_write_groups,
        read=_read_groups,
    ),
    rule(
        MOE.scale,
        settings="moe-router-topk-scaling-factor",
        write=_write_weight_scale,
        read=_read_weight_scale,
    ),
)
