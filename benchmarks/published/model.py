"""The model of a row, where its name has remarks or stands for sizes that the row does not have."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from published.cells import SpelledCells
from stretto.errors import StrettoError, UnknownName
from stretto.job.parameters import count_parameters
from stretto.job.presets import PRESETS, find_shape, preset
from stretto.job.shape import ModelShape

_HEAD = 128  # usual width of a head
_REMARK = re.compile(r"[(\[,;]|\s(?:dense|moe|fp8|bf16|fp16)\b", re.IGNORECASE)
_LLAMAS = re.compile(r"llama|mi[sx]tral|qwen|deepseek|gemma|baichuan|internlm|olmo|yi-|smollm", re.IGNORECASE)
_GPTS = re.compile(r"gpt|megatron|transformer|bert|opt|mpt|bloom|neox|palm|^\W*\d", re.IGNORECASE)
_CLOSE = 0.06  # relative distance of a row's parameters from those of a published model


def fill_model(cells: SpelledCells, shape: ModelShape | None = None) -> ModelShape | None:
    """Return the published model of a row, or None after filling in the sizes of one that is not published.

    Args:
        shape: in place of the row's model.

    Raises:
        StrettoError: neither a published model nor layers and hidden nor a number of parameters.
    """
    complete = {"layers", "hidden"} <= cells.values.keys()
    base = shape or _published(cells.get("model", str), complete or "params_b" in cells.values)
    if base is None and not complete:
        _fill_sizes(cells)
    heads, hidden = cells.get("heads", int), cells.get("hidden", int)
    if base is None:
        assert hidden is not None
        if heads is None:
            cells.fill("heads", max(1, round(hidden / _HEAD)), f"{_HEAD} wide each")
        _fill_family(cells)
    elif (hidden or base.hidden, heads or base.heads) != (base.hidden, base.heads):
        # sizes that scale with the width follow the row's
        hidden, heads = hidden or base.hidden, heads or base.heads
        cells.values.setdefault("kv_heads", heads if base.kv_heads == base.heads else base.kv_heads)
        cells.values.setdefault("ffn", base.ffn * hidden // base.hidden)
        cells.values.setdefault("head_dim", max(2, hidden // heads))
    shared = cells.get("shared_experts", int)
    if shared is not None and "shared_ffn" not in cells.values:
        width = cells.get("expert_ffn", int) or (base.moe.ffn if base and base.moe else None)
        width = width or cells.get("ffn", int) or (base.ffn if base else 4 * (hidden or 0))
        cells.fill("shared_ffn", shared * width, f"{shared} as wide as a routed one")
    return base


@lru_cache(maxsize=256)
def _published(name: str | None, sized: bool) -> ModelShape | None:
    """Return the published model of that name, also if a remark follows it; None if the name is a label.

    Args:
        sized: the row has sizes of the model, or its number of parameters.

    Raises:
        StrettoError: neither a name nor sizes, or a model that cannot be planned.
    """
    if name is None:
        if sized:
            return None
        raise StrettoError("the row has no model", hint="fill in model, or layers, hidden and heads")
    for spelling in dict.fromkeys((name, _REMARK.split(name, maxsplit=1)[0].strip())):
        try:
            return find_shape(spelling)
        except UnknownName:
            continue
        except StrettoError:
            if sized:
                return None
            raise
    return None


def _fill_sizes(cells: SpelledCells) -> None:
    """Fill in sizes from the number of parameters in `params_b`, or in the model's name: those of the
    published GPT that is nearest, with as many layers as make them up.

    Raises:
        StrettoError: there is no number of parameters either; names the nearest published model.
    """
    name, billions = cells.get("model", str) or "", cells.get("params_b", float)
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
    gpts = [preset(name) for name in PRESETS if name.startswith(("gpt2", "gpt3", "megatron"))]
    near, total = min(
        ((shape, count_parameters(shape).total) for shape in gpts),
        key=lambda pair: abs(pair[1] - wanted) / max(pair[1], wanted),
    )
    block = (total - count_parameters(replace(near, layers=1)).total) / (near.layers - 1)
    pp = cells.get("pp", int) or 1
    more = round((wanted - total) / block / pp) * pp
    layers = near.layers if abs(total / wanted - 1) <= _CLOSE else max(pp, near.layers + more)
    for size, value in (("layers", layers), ("hidden", near.hidden), ("heads", near.heads)):
        if size not in cells.values:
            cells.fill(size, value, f"of a GPT with {billions:g}e9 parameters")
    cells.values.setdefault("kv_heads", near.heads)
    cells.values.setdefault("ffn", near.ffn)


def _fill_family(cells: SpelledCells) -> None:
    """Fill in the family of a model that is not published, as its name or grouped queries tell."""
    name, kv_heads = cells.get("model", str) or "", cells.get("kv_heads", int)
    if "family" in cells.values:
        return
    if _LLAMAS.search(name):
        cells.fill("family", "llama", "of the model's name")
    elif kv_heads is not None and kv_heads < (cells.get("heads", int) or 0) and not _GPTS.search(name):
        cells.fill("family", "llama", "of its grouped queries")
