"""The model of a row: by its name, by its sizes, or by its number of parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from stretto.errors import StrettoError
from stretto.planner.table.cells import Cells
from stretto.spec.parameters import count_parameters
from stretto.spec.presets import OUT_OF_SCOPE, PRESETS, preset, squeezed
from stretto.spec.shape import ModelShape

# families whose blocks are Llama's: gated MLP, RMSNorm, rotary positions, no biases
_LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen", "deepseek", "yi", "gemma", "olmo", "smollm", "phi-3")
_VOCABULARY = {  # by the start of the family's name; the first that fits
    "llama3": 128256,
    "llama4": 202048,
    "llama": 32000,
    "mistral": 32000,
    "mixtral": 32000,
    "qwen": 151936,
    "deepseek": 129280,
    "nemotron": 256000,
    "mpt": 50368,
    "gemma": 256000,
}
_GPT_VOCABULARY = 50257
_CLOSE = 0.06  # parameters of a name beside those of a preset


def shape_of(cells: Cells, sequence: int, early: bool) -> ModelShape:
    """The model of a row.

    A name that is known gives its sizes, which the row's own replace. A name that is not known needs layers
    and hidden, or a number of parameters, for which the nearest known model of the family stands.

    Args:
        sequence: of a sample; positions reach at least so far.
        early: software before fused attention, whose GPT had dropout.

    Raises:
        StrettoError: neither a known name, nor sizes, nor a number of parameters; or sizes that do not fit.
    """
    base = _named(cells) or _by_parameters(cells)
    layers, hidden = cells.whole("layers"), cells.whole("hidden")
    if base is None:
        if layers is None or hidden is None:
            raise StrettoError(
                f"model {cells.text('model') or 'without a name'} is not known and the row has no layers and "
                "hidden",
                hint="fill in layers, hidden and heads, or params_b",
            )
        return _from_sizes(cells, layers, hidden, sequence, early)
    return _with_sizes(cells, base, sequence, early)


def _named(cells: Cells) -> ModelShape | None:
    name = cells.text("model")
    return None if name is None else known_model(name)


@lru_cache(maxsize=256)
def known_model(name: str) -> ModelShape | None:
    """The published model of that name as tables spell it, if it is one.

    Raises:
        StrettoError: a published model of another kind than transformers of equal blocks.
    """
    if squeezed(name) in {squeezed(other) for other in OUT_OF_SCOPE}:
        return preset(name)  # which says what it has
    for spelling in _spellings(name):
        try:
            return preset(spelling)
        except StrettoError:
            continue
    return None


def _spellings(name: str) -> list[str]:
    """The name without types and spaces; and that of the models before, whose sizes are the same."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    plain = re.sub(r"-(bf16|fp8|fp16|pretrain(ing)?)\b", "", plain)
    return list(
        dict.fromkeys((name, plain, plain.replace("llama3.1", "llama3").replace("llama-3.1", "llama3")))
    )


def family_of(name: str) -> str:
    """The family in a model's name, as "llama3" in "Llama 3.1-8B"; "gpt" where nothing else is told."""
    plain = re.sub(r"[\s_\-]+", "", name.lower())
    for start in (*_VOCABULARY, *_LLAMA_LIKE):
        if start in plain:
            return start
    return "gpt"


def billions(cells: Cells) -> float | None:
    """Parameters in 1e9: the cell's, or those in the name, as in "GPT-52B" or "GPT2 350M"."""
    given = re.fullmatch(r"(\d+(?:\.\d+)?)\s*b?", cells.words("params_b").replace(",", ""))
    if given is not None:
        return float(given[1])
    match = re.search(r"(\d+(?:\.\d+)?)\s*([bm])\b", cells.words("model"))
    return None if match is None else float(match[1]) / (1000 if match[2] == "m" else 1)


def _by_parameters(cells: Cells) -> ModelShape | None:
    """The nearest known model of the family, with as many layers as make up the row's parameters."""
    wanted = billions(cells) if cells.whole("layers") is None else None
    if not wanted:
        return None
    family = family_of(cells.words("model"))
    near, params = _nearest(family, wanted)
    if abs(params / (wanted * 1e9) - 1) > _CLOSE:
        block = (params - count_parameters(replace(near, layers=1)).total) / (near.layers - 1)
        pipeline = cells.whole("pp") or 1
        more = round((wanted * 1e9 - params) / block / pipeline) * pipeline
        near = replace(near, layers=max(pipeline, near.layers + more))
    sizes = f"{near.layers} x {near.hidden} with {near.heads} heads"
    cells.take("model", sizes, f"the nearest known {family} of {wanted:g}B")
    return near


@lru_cache(maxsize=256)
def _nearest(family: str, wanted: float) -> tuple[ModelShape, int]:
    """The preset of a family with about so many 1e9 parameters, and how many it has."""
    found = list[tuple[float, int, str]]()
    for name in PRESETS:
        plain = name.startswith(("gpt2", "gpt3", "megatron"))
        if plain if family == "gpt" else family in name.replace("-", ""):
            total = count_parameters(preset(name)).total
            found.append((abs(total - wanted * 1e9) / max(total, wanted * 1e9), total, name))
    if not found:
        return _nearest("llama" if family in _LLAMA_LIKE else "gpt", wanted)
    _, total, name = min(found)
    return preset(name), total


def _with_sizes(cells: Cells, base: ModelShape, sequence: int, early: bool) -> ModelShape:
    """A known model with the row's own sizes."""
    given = {name: cells.whole(name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")}
    changes: dict[str, Any] = {}
    other = any(given[k] not in (None, getattr(base, k)) for k in ("hidden", "heads"))
    for name, value in given.items():
        # of experts the cell may be the width of an expert or of a dense block: the name knows
        if value is not None and value != getattr(base, name) and not (name == "ffn" and base.moe):
            changes[name] = value
    hidden, heads = changes.get("hidden", base.hidden), changes.get("heads", base.heads)
    if other:
        changes.setdefault("kv_heads", heads if base.kv_heads == base.heads else base.kv_heads)
        changes.setdefault("ffn", base.ffn * hidden // base.hidden)
        if given["head_dim"] is None:
            changes["head_dim"] = _head_dim(hidden, heads)
    return _finished(cells, replace(base, **changes) if changes else base, sequence, early)


def _from_sizes(cells: Cells, layers: int, hidden: int, sequence: int, early: bool) -> ModelShape:
    """A model that is known by nothing but its sizes."""
    name = cells.words("model")
    family = family_of(name)
    gated = family.startswith(_LLAMA_LIKE)
    heads = cells.whole("heads") or cells.take("heads", max(1, hidden // 128), "128 features each")
    vocab = _VOCABULARY.get(family, _GPT_VOCABULARY)
    shape = ModelShape(
        family="llama" if gated else "gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=cells.whole("kv_heads") or cells.take("kv_heads", heads, "as many as heads"),
        head_dim=cells.whole("head_dim") or _head_dim(hidden, heads),
        ffn=cells.whole("ffn")
        or cells.take("ffn", -(-8 * hidden // (3 * 256)) * 256 if gated else 4 * hidden, family),
        vocab=cells.whole("vocab") or cells.take("vocab", vocab, f"of {family}"),
        sequence=sequence,
    )
    return _finished(cells, shape, sequence, early)


def _head_dim(hidden: int, heads: int) -> int:
    return max(2, hidden // heads)


def _finished(cells: Cells, shape: ModelShape, sequence: int, early: bool) -> ModelShape:
    """With the row's vocabulary, positions for its sequence, and the dropout of its time."""
    vocab = cells.whole("vocab")
    if vocab is None and "vocab" not in cells.taken:
        vocab = cells.take("vocab", shape.vocab, "of the model")
    changes: dict[str, Any] = {"vocab": vocab} if vocab not in (None, shape.vocab) else {}
    if shape.family == "gpt" or sequence > shape.sequence:
        changes["sequence"] = sequence
    if shape.family == "gpt" and early and family_of(cells.words("model")) == "gpt":
        changes["dropout"] = cells.take("dropout", 0.1, "of GPT before fused attention")
    return replace(shape, **changes) if changes else shape
