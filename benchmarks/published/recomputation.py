"""What a row says about recomputation: a mode, operators, or a part of the blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from published.cells import SpelledCells
from published.values import squeezed
from stretto.errors import StrettoError, nearest
from stretto.job.framework import CORE, OPERATORS, Operator

Mode = Literal["none", "selective", "full"]
_NONE = {"none", "no", "off", "false", "0", "disabled", "without", "never", "n"}
_FULL = {
    "full",
    "yes",
    "on",
    "true",
    "1",
    "all",
    "always",
    "y",
    "enabled",
    "uniform",
    "everything",
    "complete",
}
_SELECTIVE = {"selective", "sel", "partial", "some"}
_UNITS = {
    "block",
    "blocks",
    "layer",
    "layers",
    "transformerblock",
    "transformerlayer",
    "everylayer",
    "perlayer",
}
# operators in Megatron-Core's words (`recompute_modules`), by how papers spell them
_OPERATORS: dict[str, Operator] = {
    "coreattn": "core_attn",
    "coreattention": "core_attn",
    "attentioncore": "core_attn",
    "attn": "core_attn",
    "attention": "core_attn",
    "selfattention": "core_attn",
    "sdpa": "core_attn",
    "softmax": "core_attn",
    "flashattention": "core_attn",
    "mlp": "mlp",
    "ffn": "mlp",
    "feedforward": "mlp",
    "mlpblock": "mlp",
    "layernorm": "layernorm",
    "norm": "layernorm",
    "norms": "layernorm",
    "ln": "layernorm",
    "rmsnorm": "layernorm",
    "moeact": "moe_act",
    "moeactivation": "moe_act",
    "moe": "moe",
    "experts": "moe",
    "moelayer": "moe",
    "sharedexperts": "shared_experts",
    "sharedexpert": "shared_experts",
    "mlauproj": "mla_up_proj",
    "mlaup": "mla_up_proj",
    "alternatemm": "alternate_mm",
    "op": "alternate_mm",
}
# words that say that something is recomputed, before those that say what
_PREFIX = re.compile(
    r"^(?:(?:yes|on|true|ac|act|activation|activations|gradient|ckpt|checkpoint|checkpointing|recompute|"
    r"recomputation)\b[\s:=,(]*)+"
)
_CUT = re.compile(r"[+,/&|;]|\band\b|\bwith\b")


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What a text says about recomputation.

    Attributes:
        operators: what mode `selective` repeats of each block, in Megatron-Core's words.
        blocks: of each stage that are recomputed in full; None: all, or `share` of them.
        share: of a stage's blocks that are recomputed in full; None: all.
        to_host: the inputs of blocks are kept in host memory.
    """

    mode: Mode
    operators: tuple[Operator, ...] = CORE
    blocks: int | None = None
    share: float | None = None
    to_host: bool = False

    def blocks_of(self, layers: int, stages: int) -> int | None:
        """How many blocks of each stage are recomputed in full; None: all."""
        each = ceil(layers / stages)
        count = self.blocks if self.share is None else round(self.share * each)
        return None if count is None or count >= each else count


def parse_recomputation(text: str) -> Recomputation:
    """What a text says about recomputation: "full, uniform 1", "selective (core attention)", "attention +
    mlp", "full, 4 layers", "every 2nd layer", "selective op".

    Raises:
        StrettoError: neither a mode nor an operator is named.
    """
    lower = _PREFIX.sub("", text.strip().lower()).strip("() ") or "full"
    lower = re.sub(r"\s+only$", "", lower)
    to_host = re.search(r"cpu|host|offload", lower) is not None
    tokens = re.findall(r"[a-z0-9]+", lower)
    first = tokens[0] if tokens else ""
    share = _share(lower)
    if first in _NONE:
        return Recomputation(mode="none")
    if first in _FULL or lower.startswith("100%"):
        return Recomputation(mode="full", blocks=_blocks(lower, share), share=share, to_host=to_host)
    if share is not None:  # torchtitan's policy per layer, which it calls selective too
        return Recomputation(mode="full", share=share)
    operators = _operators(lower)
    if first in _SELECTIVE:
        if "op" in tokens or "ops" in tokens:
            return Recomputation(mode="selective", operators=("alternate_mm",))
        return Recomputation(mode="selective", operators=operators or CORE)
    if first in ("op", "sac"):
        return Recomputation(mode="selective", operators=("alternate_mm",))
    if operators:
        return Recomputation(mode="selective", operators=operators)
    if squeezed(re.split(r"[(,;:]", lower, maxsplit=1)[0]) in _UNITS:
        return Recomputation(mode="full", blocks=_blocks(lower, share), to_host=to_host)
    if re.match(r"\d+ (?:layers|blocks)\b", lower):
        return Recomputation(mode="full", blocks=int(tokens[0]))
    near = nearest(first, (*_NONE, *_FULL, *_SELECTIVE, *_OPERATORS))
    raise StrettoError(
        f"recompute is {text!r}, allowed: none, selective, full, operators as in core_attn + mlp, "
        f"or a part as in 'full, 4 layers' or 'every 2nd layer'",
        hint=f"did you mean {near!r}?" if near else None,
    )


def _operators(text: str) -> tuple[Operator, ...]:
    """Return the operators that are named, each once."""
    inner = re.sub(r"^(?:selective|sel)\b[\s:=]*", "", text)
    parts = [squeezed(part) for part in _CUT.split(inner.strip("()[] "))]
    operators: list[Operator] = [_OPERATORS[part] for part in parts if part in _OPERATORS]
    return tuple(dict.fromkeys(operators))


def _share(text: str) -> float | None:
    """Return the share of blocks that a text names: every 2nd layer, 4 of 8 layers, 4/8 layers, 50%,
    selective 2.
    """
    every = re.search(r"every\s+(?:(\d+)(?:nd|rd|th)?|(other|second)|(third))\b", text)
    if every:
        return 1 / int(every[1] or (2 if every[2] else 3))
    frequency = re.match(
        r"selective[\s,_:(-]*(?:layer\s*)?(\d+)\)?$", text
    )  # of torchtitan: every n-th layer
    if frequency:
        return 1 / int(frequency[1])
    part = re.search(r"(\d+)\s*(?:of|/|out of)\s*(\d+)\s*(?:layers|blocks)?", text)
    if part and 0 < int(part[1]) < int(part[2]):
        return int(part[1]) / int(part[2])
    percent = re.search(r"(\d+(?:\.\d+)?)\s*%", text)
    if percent and 0 < float(percent[1]) < 100:
        return float(percent[1]) / 100
    return 0.5 if re.search(r"\bhalf\b", text) else None


def _blocks(text: str, share: float | None) -> int | None:
    """Return the number of blocks that a text names, in Megatron's words "block, 4" or "4 layers"; "uniform,
    1" is the size of what is recomputed at once.
    """
    if share is not None or "uniform" in text:
        return None
    match = re.search(r"\b(\d+)\s*(?:layers|blocks)\b|\bblock[\s,:=]+(\d+)\b", text)
    return int(match[1] or match[2]) if match else None


def stated_recomputation(cells: SpelledCells) -> Recomputation | None:
    """What the row says; None: nothing.

    Raises:
        StrettoError: neither a mode nor an operator is named, or cells contradict each other.
    """
    text, blocks = cells.text("recompute"), cells.get("recompute_layers", int)
    text = "" if text.lower() == "auto" else text
    operators, on_host = (
        _listed_operators(cells.text("recompute_operators")),
        cells.get("offload_inputs", str) == "cpu",
    )
    if not text:
        if operators:
            return Recomputation(mode="selective", operators=operators)
        return Recomputation(mode="full", blocks=blocks, to_host=on_host) if blocks or on_host else None
    recomputation = parse_recomputation(text)
    for name, there, mode in (
        ("recompute_operators", bool(operators), "selective"),
        ("offload_inputs", on_host, "full"),
        ("recompute_layers", blocks is not None, "full"),
    ):
        if there and recomputation.mode != mode:
            raise StrettoError(
                f"{name} is {cells.text(name)}, but recompute is {recomputation.mode}",
                hint=f"recompute={mode}, or leave {name} empty",
            )
    on_host = on_host or (recomputation.to_host and cells.get("offload_inputs", str) is None)
    blocks = recomputation.blocks if blocks is None else blocks
    return replace(
        recomputation, operators=operators or recomputation.operators, to_host=on_host, blocks=blocks
    )


def _listed_operators(text: str) -> tuple[Operator, ...]:
    """Return the operators of a list, as in "core_attn + mlp".

    Raises:
        StrettoError: a word that is none.
    """
    names = [word for word in re.split(r"[+,;\s\[\]'\"]+", text) if word]
    for word in names:
        if squeezed(word) not in _OPERATORS:
            near = nearest(word, OPERATORS)
            raise StrettoError(
                f"recompute_operators has {word!r}, allowed: {', '.join(OPERATORS)}; several with +",
                hint=f"did you mean {near!r}?" if near else None,
            )
    return tuple(dict.fromkeys(_OPERATORS[squeezed(word)] for word in names))
