"""The model of a row: a published one, its sizes, or both."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from stretto.errors import StrettoError
from stretto.planner.table.cells import Cells
from stretto.spec.experts import ExpertShape
from stretto.spec.presets import find_shape
from stretto.spec.shape import Family, ModelShape

SEQUENCE = 2048  # tokens of a sample of a model that is not published
_VOCABULARY = 50257  # GPT-2's
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")


def shape_of(cells: Cells, shape: ModelShape | None = None) -> tuple[ModelShape, int]:
    """The model of a row, and the tokens of a sample; a published model fills what the row leaves empty.

    Args:
        shape: in place of the row's model.

    Raises:
        StrettoError: neither a published model nor layers, hidden and heads; or sizes that do not fit.
    """
    sizes: dict[str, Any] = {name: cells.whole(name) for name in _SIZES if cells.whole(name) is not None}
    base = shape or _published(cells.word("model"), whole={"layers", "hidden", "heads"} <= sizes.keys())
    sequence = cells.either(
        "seq", SEQUENCE if base is None else base.sequence, "" if base is None else "the model's"
    )
    if base is None:
        sizes["vocab"] = cells.either("vocab", _VOCABULARY, "GPT-2's")
        family: Family = "llama" if cells.either("family", "gpt") == "llama" else "gpt"
        made = ModelShape(family=family, sequence=sequence, moe=_experts(cells, None), **sizes)
    else:
        made = _changed(cells, base, sizes, sequence)
    for name in ("kv_heads", "ffn") if base is None else ("vocab",) if shape is None else ():
        cells.either(name, getattr(made, name), "the family's" if base is None else "the model's")
    dropout = cells.number("dropout")
    return (made if dropout is None else replace(made, dropout=dropout)), sequence


@lru_cache(maxsize=256)
def _published(name: str | None, whole: bool) -> ModelShape | None:
    """The published model of that name; None where the name is a label beside sizes."""
    if name is None:
        if whole:
            return None
        raise StrettoError("the row has no model", hint="fill in model, or layers, hidden and heads")
    try:
        return find_shape(name)
    except StrettoError as error:
        if whole:
            return None
        raise StrettoError(
            f"{error.message}, and the row has no layers, hidden and heads", hint=error.hint
        ) from None


def _changed(cells: Cells, base: ModelShape, sizes: dict[str, Any], sequence: int) -> ModelShape:
    """A published model with the row's sizes; those that go by the width go by the row's."""
    family = cells.word("family")
    if family not in (None, base.family):
        raise StrettoError(f"family is {family}, but the model is a {base.family}", hint="leave family empty")
    hidden, heads = sizes.get("hidden", base.hidden), sizes.get("heads", base.heads)
    if (hidden, heads) != (base.hidden, base.heads):
        sizes.setdefault("kv_heads", heads if base.kv_heads == base.heads else base.kv_heads)
        sizes.setdefault("ffn", base.ffn * hidden // base.hidden)
        sizes.setdefault("head_dim", max(2, hidden // heads))
    if base.family == "gpt" or sequence > base.sequence:
        sizes["sequence"] = sequence
    return replace(base, **sizes, moe=_experts(cells, base.moe))


def _experts(cells: Cells, base: ExpertShape | None) -> ExpertShape | None:
    columns = {"experts": "experts", "top_k": "top_k", "expert_ffn": "ffn"}
    told: dict[str, Any] = {
        field: cells.whole(name) for name, field in columns.items() if cells.whole(name) is not None
    }
    if base is None and told and "experts" not in told:
        raise StrettoError("the row's model has no experts", hint="fill in experts, or leave top_k empty")
    return replace(base, **told) if base else ExpertShape(**told) if told else None
