"""Linears with low-rank adapters (Hu et al. 2021, "LoRA") that tensor-parallel ranks split.

An adapter adds B A x. If the linear is split by output features, so is B, and A is replicated; if it is split
by input features, so is A, and B is replicated. The split factor has the linear's style: ranks exchange the
same tensors for an adapter as for the linear, with the adapter's rank as their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from stretto.engine.parallel.styles import (
    ColumnParallel,
    ParallelStyle,
    ParameterShard,
    RowParallel,
    SplitDropout,
)
from stretto.engine.parallel.tensor.linear import GatherLinear, ParallelLinear, ScatterLinear
from stretto.errors import StrettoError

if TYPE_CHECKING:
    from stretto.engine.parallel.mesh import Mesh

Tokens = tuple[int, int, bool]  # dimension, tokens of a sample, whether they are split over tp too
ADAPTERS = "lora"  # the child that has a linear's adapters


class _Adapted(nn.Module):
    """Mixin of a linear's class."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the linear and add the outputs of its adapters."""
        return getattr(self, ADAPTERS)(x, super().forward(x))  # pyright: ignore[reportAttributeAccessIssue]


class _AdaptedParallel(_Adapted, ParallelLinear):
    pass


class _AdaptedGather(_Adapted, GatherLinear):
    pass


class _AdaptedScatter(_Adapted, ScatterLinear):
    pass


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    ParallelLinear: _AdaptedParallel,
    GatherLinear: _AdaptedGather,
    ScatterLinear: _AdaptedScatter,
}


@dataclass(frozen=True)
class Adapted(ParallelStyle):
    """A linear of style `base` with a child `lora`, whose forward (x, y) adds the adapters' output to the
    linear's output y, and whose `rows` are the output features of each projection.
    """

    base: ColumnParallel | RowParallel

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        return self.base.parts(name, _bare(name, module), index, tp)

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        bare, adapters = _bare("Adapted", module), module.get_submodule(ADAPTERS)
        linear = self.base.replace_module(bare, mesh)
        linear.__class__ = _CLASSES[type(linear)]
        if isinstance(self.base, ColumnParallel):  # one range for each projection
            part = self.base.parts("Adapted", bare, mesh.index("tp"), mesh.size("tp"))["weight"]
            cast(Any, adapters).rows = tuple(run.size for run in part.runs)
        linear.add_module(ADAPTERS, adapters)
        return linear


@dataclass(frozen=True)
class ReplicatedFactor(ParallelStyle):
    """A replicated factor of an adapter. With `sequence` each rank applies it to its own tokens, so its
    gradients are summed over the ranks.
    """

    sequence: bool = False

    def parts(self, name: str, module: nn.Module, index: int, tp: int) -> dict[str, ParameterShard]:
        return {"weight": ParameterShard(dim=None, partial=self.sequence)}

    def replace_module(self, module: nn.Module, mesh: Mesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return ParallelLinear(cast(nn.Parameter, module.weight), None)


def adapter_styles(
    base: ColumnParallel | RowParallel,
    projections: Sequence[str],
    adapted: Sequence[str],
    columns: int,
    tokens: Tokens,
) -> dict[str, ParallelStyle]:
    """Return the styles of a linear and its adapters, by their names in the linear ("" is the linear itself).

    Args:
        base: style of the linear.
        projections, adapted: projections of the linear, and those with adapters.
        columns: input features of the linear.
        tokens: how a sample's tokens are split outside of the linears (`SplitDropout.sequence`).
    """
    styles: dict[str, ParallelStyle] = {"": Adapted(base)}
    for at, name in enumerate(projections):
        if name not in adapted:
            continue
        if isinstance(base, ColumnParallel):
            replicated, split = "A", "B"
            factor = replace(base, segments=base.segments[at : at + 1])
            drop = SplitDropout(sequence=tokens)
        else:
            replicated, split = "B", "A"
            factor = base
            drop = SplitDropout(heads=(2, columns), sequence=(*tokens[:2], False))
        styles |= {
            f"{ADAPTERS}.{name}.{replicated}": ReplicatedFactor(base.sequence),
            f"{ADAPTERS}.{name}.{split}": factor,
            f"{ADAPTERS}.{name}.drop": drop,
        }
    return styles


def _bare(name: str, module: nn.Module) -> nn.Linear:
    """Return the linear without its adapters, with the same parameters."""
    if not isinstance(module, nn.Linear):
        raise StrettoError(f"{name} is {type(module).__name__}", hint="Adapted style takes nn.Linear")
    bare = nn.Linear(module.in_features, module.out_features, device="meta")
    bare.weight, bare.bias = module.weight, module.bias
    return bare.train(module.training)
