"""Low-rank adapters (Hu et al. 2021, "LoRA"): the linears that have them, by Stretto's names and PEFT's.

A linear of several projections, such as that of queries, keys and values, has an adapter for each of them, so
its adapters match those of PEFT's separate linears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

from stretto.errors import Problem, nearest
from stretto.job.field import Field, check_fields

EVERY_LINEAR = "all-linear"

# the projections in each linear of a block, by their names in PEFT
PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "attn.qkv": ("q_proj", "k_proj", "v_proj"),
    "attn.q": ("q_proj",),
    "attn.q_down": ("q_a_proj",),
    "attn.q_up": ("q_b_proj",),
    "attn.kv_down": ("kv_a_proj_with_mqa",),
    "attn.kv_up": ("kv_b_proj",),
    "attn.proj": ("o_proj",),
    "mlp.gate_up": ("gate_proj", "up_proj"),
    "mlp.up": ("up_proj",),
    "mlp.down": ("down_proj",),
    "mlp.shared.gate_up": ("gate_proj", "up_proj"),
    "mlp.shared.up": ("up_proj",),
    "mlp.shared.down": ("down_proj",),
}
# PEFT's names of GPT-2's linears
_ALSO: Mapping[str, tuple[str, ...]] = {
    "c_attn": ("attn.qkv",),
    "c_proj": ("attn.proj", "mlp.down"),
    "c_fc": ("mlp.up",),
}
_PAIRS = tuple((module, name) for module, names in PROJECTIONS.items() for name in names)
_NAMES = tuple(dict.fromkeys([*(name for _, name in _PAIRS), *PROJECTIONS, *_ALSO]))


@dataclass(frozen=True, kw_only=True)
class LoraShape:
    """Low-rank adapters of linears in blocks (Hu et al. 2021): each adds scale B A x to W x, with A of shape
    [rank, in] and B of [out, rank].
    """

    rank: Annotated[int, Field("Rank of the adapters.", gt=0, fix="rank: 8", null="none")]
    alpha: Annotated[float, Field("An adapter adds `alpha / rank` B A x.", gt=0, null="`rank`")]
    dropout: Annotated[
        float,
        Field(
            "Probability of dropout on the input of A.", ge=0, lt=1, fix="0.05 is usual, 0 switches it off"
        ),
    ] = 0.0
    targets: Annotated[
        tuple[str, ...],
        Field(
            "Linears with adapters: names as in PEFT, names of modules here with `*` for any text (`attn.*`, "
            "or `attn.qkv.q_proj` for one projection), or `all-linear`.",
            filled=True,
            examples=('["q_proj", "v_proj"]',),
        ),
    ] = (EVERY_LINEAR,)
    rslora: Annotated[
        bool, Field("The factor is `alpha / sqrt(rank)` (Kalajdzievski 2023); PEFT's `use_rslora`.")
    ] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.targets:
            raise Problem("targets", "empty", "it must name linears", "targets: [all-linear]")
        for target in self.targets:
            if not any(_matches(target, module, name) for module, name in _PAIRS):
                closest = nearest(target, _NAMES)
                fix = f"did you mean {closest}?" if closest else f"{EVERY_LINEAR}, or of {', '.join(_NAMES)}"
                raise Problem("targets", target, "no block has such a linear", fix)

    @property
    def scale(self) -> float:
        """Factor that multiplies B A x."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapted(self, module: str) -> tuple[str, ...]:
        """Return the projections that have adapters in one linear of a block.

        Args:
            module: the linear's name in the block, such as "attn.qkv".
        """
        names = PROJECTIONS.get(module, ())
        return tuple(name for name in names if any(_matches(t, module, name) for t in self.targets))

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """Return the targets that match none of the linears."""
        pairs = [(module, name) for module in modules for name in PROJECTIONS.get(module, ())]
        return [t for t in self.targets if not any(_matches(t, module, name) for module, name in pairs)]


def _matches(target: str, module: str, name: str) -> bool:
    if target == EVERY_LINEAR or module in _ALSO.get(target, ()):
        return True
    return any(fnmatchcase(spelling, target) for spelling in (name, module, f"{module}.{name}"))


def is_adapter(name: str) -> bool:
    """True if a parameter of the plain model is part of an adapter."""
    return ".lora." in name


def projection_rows(module: str, rows: int, kv_rows: int) -> tuple[int, ...]:
    """Return the output features of each projection in a linear.

    Args:
        rows: output features of the linear.
        kv_rows: output features of the keys, and of the values.
    """
    if module == "attn.qkv":
        return rows - 2 * kv_rows, kv_rows, kv_rows
    names = PROJECTIONS[module]
    return (rows // len(names),) * len(names)
