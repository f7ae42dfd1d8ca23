"""Splits of activations over tensor-parallel ranks, and conversions between them.

A network may change its split from layer to layer: convolutions on each rank's part of the batch, fully
connected layers on the full batch with a part of the features (Krizhevsky 2014, "One weird trick for
parallelizing convolutional neural networks"). Every conversion is an autograd operator whose backward is its
adjoint, so gradients on all ranks are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from stretto.engine.parallel.collectives import (
    exchange_parts,
    gather_copy,
    gather_from,
    local_part,
    slice_to,
)
from stretto.errors import StrettoError

Split = Literal["whole", "batch", "features", "assembled"]
"""The split of an activation over the tp ranks:

whole: the same on every rank, as is its gradient.
batch: each rank has its part of dimension 0, in the order of the ranks.
features: each rank has its part of the last dimension.
assembled: the same on every rank, but each rank has only a term of its gradient, and the terms must be
    summed. This is the input of layers split by output features, whose input gradients are such terms.
"""


class _CountedOnce(torch.autograd.Function):
    """Passes only the first rank's copy of a replicated gradient, as the terms of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.first = group.rank() == 0
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return (grads[0] if ctx.first else torch.zeros_like(grads[0])), None


def _counted_once(x: Tensor, group: ProcessGroup) -> Tensor:
    return cast(Tensor, _CountedOnce.apply(x, group))


_ALONG = {"batch": 0, "features": -1}
_CONVERSIONS: dict[tuple[Split, Split], Callable[[Tensor, ProcessGroup], Tensor]] = {
    ("whole", "batch"): lambda x, group: slice_to(x, group, 0),
    ("whole", "features"): lambda x, group: slice_to(x, group, -1),
    ("batch", "whole"): lambda x, group: gather_copy(x, group, 0),
    ("batch", "assembled"): lambda x, group: gather_from(x, group, 0),
    ("batch", "features"): lambda x, group: exchange_parts(x, group, 0, -1),
    ("features", "whole"): lambda x, group: gather_copy(x, group, -1),
    ("features", "assembled"): lambda x, group: gather_from(x, group, -1),
    ("features", "batch"): lambda x, group: exchange_parts(x, group, -1, 0),
    ("assembled", "whole"): _counted_once,
    ("assembled", "features"): lambda x, group: local_part(x, group, -1),
    ("assembled", "batch"): lambda x, group: local_part(x, group, 0),
}


def convert(x: Tensor, before: Split, after: Split, group: ProcessGroup | None) -> Tensor:
    """Convert x from split `before` to split `after`.

    Raises:
        StrettoError: the batch or the features do not divide over the ranks.
    """
    if group is None or before == after:
        return x
    if after in _ALONG and x.shape[_ALONG[after]] % group.size():
        owner = "the batch" if after == "batch" else "the last dimension"
        raise StrettoError(
            f"{owner} of a tensor {list(x.shape)} does not divide over {group.size()} ranks",
            hint="drop_last=True in the DataLoader, or a batch of another size"
            if after == "batch"
            else "Replicate() for the layer that takes it",
        )
    return _CONVERSIONS[before, after](x, group)


Change = tuple[Split, Split]


@dataclass(frozen=True)
class BeforeModule:
    """A hook that converts the arguments of a module.

    Attributes:
        changes: change of each argument, by position or keyword; under None, of every tensor.
    """

    changes: Mapping[int | str | None, Change]
    group: ProcessGroup | None

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(self._converted(at, value) for at, value in enumerate(args)),
            {name: self._converted(name, value) for name, value in named.items()},
        )

    def _converted(self, at: int | str, value: Any) -> Any:
        change = self.changes.get(at, self.changes.get(None))
        if change is None or not isinstance(value, Tensor):
            return value
        return convert(value, *change, self.group)


@dataclass(frozen=True)
class AfterModule:
    """A hook that converts the tensors that a module returns.

    Attributes:
        changes: change of each leaf of the output, in order, or a single one for all.
    """

    changes: Sequence[Change | None]
    group: ProcessGroup | None

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        return self.converted(output)

    def converted(self, output: Any) -> Any:
        """Return the output in its new split."""
        leaves, structure = pytree.tree_flatten(output)
        changes = list(self.changes)
        if len(changes) != len(leaves):
            changes *= len(leaves)
        converted = [
            convert(leaf, *change, self.group) if change is not None and isinstance(leaf, Tensor) else leaf
            for leaf, change in zip(leaves, changes, strict=True)
        ]
        return pytree.tree_unflatten(converted, structure)
