"""The model of a row: published, from its sizes, or where both are missing from its number of parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from stretto.errors import StrettoError, UnknownName
from stretto.planner.table.cells import Cells
from stretto.spec.experts import ExpertShape
from stretto.spec.families import Family
from stretto.spec.parameters import count_parameters
from stretto.spec.presets import PRESETS, find_shape, preset
from stretto.spec.shape import ModelShape

SEQUENCE = 2048  # tokens of a sample of a model that is not published
_VOCABULARY = 50257  # GPT-2's
_HEAD = 128  # usual width of a head
_REMARK = re.compile(r"[(\[,;]|\s(?:dense|moe|fp8|bf16|fp16)\b", re.IGNORECASE)
_LLAMAS = re.compile(r"llama|mi[sx]tral|qwen|deepseek|gemma|baichuan|internlm|olmo|yi-|smollm", re.IGNORECASE)
_GPTS = re.compile(r"gpt|megatron|transformer|bert|opt|mpt|bloom|neox|palm|^\W*\d", re.IGNORECASE)
_CLOSE = 0.06  # relative distance of a row's parameters from those of a published model
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")


def row_shape(cells: Cells, shape: ModelShape | None = None) -> tuple[ModelShape, int]:
    """The model of a row, and the tokens of a sample; a published model fills in what the row leaves empty.

    Args:
        shape: in place of the row's model.

    Raises:
        StrettoError: neither a published model nor layers, hidden and heads; or sizes that do not fit
            together.
    """
    sizes: dict[str, Any] = {name: cells.whole(name) for name in _SIZES if cells.whole(name) is not None}
    whole = {"layers", "hidden"} <= sizes.keys()
    base = shape or _published(cells.word("model"), sized=whole or cells.number("params_b") is not None)
    if base is None and not whole:
        sizes = {**_sized(cells), **sizes}
    if base is None and "heads" not in sizes:
        sizes["heads"] = cells.value_or("heads", max(1, round(sizes["hidden"] / _HEAD)), f"{_HEAD} wide each")
    sequence = cells.value_or(
        "seq", SEQUENCE if base is None else base.pretraining_sequence, "" if base is None else "the model's"
    )
    if base is None:
        sizes["vocab"] = cells.value_or("vocab", _VOCABULARY, "GPT-2's")
        family: Family = "llama" if _family(cells) == "llama" else "gpt"
        made = ModelShape(
            family=family,
            sequence=sequence,
            moe=_experts(cells, None, sizes.get("ffn", 4 * sizes["hidden"])),
            **sizes,
        )
    else:
        made = _changed(cells, base, sizes, sequence)
    for name in ("kv_heads", "ffn") if base is None else ("vocab",) if shape is None else ():
        cells.value_or(name, getattr(made, name), "the family's" if base is None else "the model's")
    dropout = cells.number("dropout")
    return (made if dropout is None else replace(made, dropout=dropout)), sequence


@lru_cache(maxsize=256)
def _published(name: str | None, sized: bool) -> ModelShape | None:
    """The published model of that name, also where a remark follows it; None where the name is a label.

    Args:
        sized: the row has sizes of the model, or its number of parameters.

    Raises:
        StrettoError: neither a name nor sizes, or a model that cannot be planned.
    """
    if name is None:
        if sized:
            return None
        raise StrettoError("the row has no model", hint="fill in model, or layers, hidden and heads")
    for one in dict.fromkeys((name, _REMARK.split(name, maxsplit=1)[0].strip())):
        try:
            return find_shape(one)
        except UnknownName:
            continue
        except StrettoError:
            if sized:
                return None
            raise
    return None


def _sized(cells: Cells) -> dict[str, Any]:
    """Sizes from the number of parameters in `params_b`, or in the model's name: those of the published GPT
    that is nearest, with as many layers as make them up.

    Raises:
        StrettoError: there is no number of parameters either; names the nearest published model.
    """
    name, billions = cells.word("model") or "", cells.number("params_b")
    in_name = re.search(r"(\d+(?:\.\d+)?)\s*([bmt])\b", name.lower())
    if billions is None and in_name and _GPTS.search(name):
        billions = float(in_name[1]) * {"m": 1e-3, "b": 1.0, "t": 1e3}[in_name[2]]
    if billions is None or _LLAMAS.search(name):
        try:
            find_shape(name)
        except StrettoError as error:
            raise StrettoError(
                f"{error.message}, and the row has no layers, hidden and heads", hint=error.hint
            ) from None
        billions = 0.0
    wanted = billions * 1e9
    known = [preset(name) for name in PRESETS if name.startswith(("gpt2", "gpt3", "megatron"))]
    near, total = min(
        ((shape, count_parameters(shape).total) for shape in known),
        key=lambda pair: abs(pair[1] - wanted) / max(pair[1], wanted),
    )
    block = (total - count_parameters(replace(near, layers=1)).total) / (near.layers - 1)
    pp = cells.whole("pp") or 1
    more = round((wanted - total) / block / pp) * pp
    layers = near.layers if abs(total / wanted - 1) <= _CLOSE else max(pp, near.layers + more)
    sizes = {
        "layers": layers,
        "hidden": near.hidden,
        "heads": near.heads,
        "kv_heads": near.heads,
        "ffn": near.ffn,
    }
    for size in ("layers", "hidden", "heads"):
        cells.value_or(size, sizes[size], f"of a GPT with {billions:g}e9 parameters")
    return sizes


def _family(cells: Cells) -> str:
    """The family of a model that is not published: as its name or grouped queries tell, else GPT."""
    name, kv_heads = cells.word("model") or "", cells.whole("kv_heads")
    if _LLAMAS.search(name):
        return cells.value_or("family", "llama", "of the model's name")
    if kv_heads is not None and kv_heads < (cells.whole("heads") or 0) and not _GPTS.search(name):
        return cells.value_or("family", "llama", "of its grouped queries")
    return cells.value_or("family", "gpt")


def _changed(cells: Cells, base: ModelShape, sizes: dict[str, Any], sequence: int) -> ModelShape:
    """A published model with the row's sizes; sizes that scale with the width follow the row's width."""
    family = cells.word("family")
    if family not in (None, base.family, "llama" if base.rotary else "gpt"):
        raise StrettoError(f"family is {family}, but the model is a {base.family}", hint="leave family empty")
    hidden, heads = sizes.get("hidden", base.hidden), sizes.get("heads", base.heads)
    if (hidden, heads) != (base.hidden, base.heads):
        sizes.setdefault("kv_heads", heads if base.kv_heads == base.heads else base.kv_heads)
        sizes.setdefault("ffn", base.ffn * hidden // base.hidden)
        sizes.setdefault("head_dim", max(2, hidden // heads))
    if not base.rotary or sequence > base.sequence:
        sizes["sequence"] = sequence
    return replace(base, **sizes, moe=_experts(cells, base.moe, sizes.get("ffn", base.ffn)))


def _experts(cells: Cells, base: ExpertShape | None, dense: int) -> ExpertShape | None:
    """The experts of the row, over those of a published model.

    Args:
        dense: inner width of a dense MLP, which experts have where the row gives none.

    Raises:
        StrettoError: their number is missing.
    """
    columns = {
        "experts": "experts",
        "top_k": "top_k",
        "expert_ffn": "ffn",
        "shared_ffn": "shared_ffn",
        "dense_layers": "dense_layers",
    }
    fields: dict[str, Any] = {
        field: cells.whole(name) for name, field in columns.items() if cells.whole(name) is not None
    }
    if base is None and fields and "experts" not in fields:
        raise StrettoError("the row's model has no experts", hint="fill in experts, or leave top_k empty")
    shared = cells.whole("shared_experts")
    if shared is not None and "shared_ffn" not in fields:
        width = fields.get("ffn") or (base.ffn if base else None) or dense
        fields["shared_ffn"] = cells.value_or(
            "shared_ffn", shared * width, f"{shared} as wide as a routed one"
        )
    return replace(base, **fields) if base else ExpertShape(**fields) if fields else None
