"""Placement of a rank's parameters in the plain model, and the fragments that its optimiser updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.layout.shards import boxes


@dataclass(frozen=True, kw_only=True)
class TensorBox:
    """A box of the full tensor held by this rank.

    `offsets` and `sizes` place it in the full tensor, `local` is its start in the local tensor. With
    `strides` the local tensor is flat: `local` is then a single offset, and the box is read with these
    strides. Among the ranks of a model-parallel group (all axes but dp) that hold the same box, `owned` is
    True on one: the gradient norm counts and the checkpoint writes owned boxes only.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]
    owned: bool = True
    strides: tuple[int, ...] | None = None

    def of_full(self, tensor: Tensor) -> Tensor:
        """Return the box as a view of the full tensor."""
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))]

    def of_local(self, tensor: Tensor) -> Tensor:
        """Return the box as a view of the local tensor."""
        if self.strides is not None:
            return tensor.as_strided(self.sizes, self.strides, tensor.storage_offset() + self.local[0])
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.local, self.sizes, strict=True))]


@dataclass(frozen=True)
class ShardPlacement:
    """Placement of a parameter of the plain model on this rank: plain name and shape, and this rank's boxes.

    Local elements outside of all boxes are padding: zero, and without effect on loss, gradients and
    checkpoints. Ranks that differ in the axes of `over` hold different boxes, as do ranks of different
    pipeline stages; along all other axes the boxes and their owners repeat.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[TensorBox, ...]
    over: str = "tp"

    @classmethod
    def unsharded(cls, name: str, shape: tuple[int, ...], owned: bool = True) -> ShardPlacement:
        """Return the placement of an unsharded tensor on this rank."""
        start = (0,) * len(shape)
        return cls(name, shape, (TensorBox(offsets=start, sizes=shape, local=start, owned=owned),))

    def part(self, local: Sequence[int], start: int, stop: int) -> ShardPlacement:
        """Return the placement of elements [start, stop), in row-major order, of the local tensor of shape
        `local`, as a separate flat tensor.
        """
        strides = tuple(prod(local[dim + 1 :]) for dim in range(len(local)))
        pieces = list[TensorBox]()
        for piece in self.pieces:
            assert piece.strides is None, "already a part: parts of parts are not supported"
            for offsets, sizes in boxes(tuple(local), start, stop):
                corner = tuple(map(max, offsets, piece.local))
                ends = zip(offsets, sizes, piece.local, piece.sizes, strict=True)
                size = tuple(min(o + n, at + m) - f for (o, n, at, m), f in zip(ends, corner, strict=True))
                if all(n > 0 for n in size):
                    full_offsets = tuple(
                        o + f - at for o, f, at in zip(piece.offsets, corner, piece.local, strict=True)
                    )
                    at = sum(f * s for f, s in zip(corner, strides, strict=True)) - start
                    pieces.append(
                        TensorBox(
                            offsets=full_offsets, sizes=size, local=(at,), owned=piece.owned, strides=strides
                        )
                    )
        return replace(self, pieces=tuple(pieces))

    def unowned(self) -> ShardPlacement:
        """Return the same boxes, owned by other ranks."""
        return replace(self, pieces=tuple(replace(piece, owned=False) for piece in self.pieces))

    @torch.no_grad()
    def fill(self, local: Tensor, full: Tensor) -> None:
        """Copy this rank's boxes of `full` into `local`, and zero its padding."""
        local.zero_()
        for piece in self.pieces:
            piece.of_local(local).copy_(piece.of_full(full))


@dataclass(eq=False, kw_only=True)
class ParameterFragment:
    """The part of a plain parameter that this rank's optimiser updates.

    Attributes:
        name: name of the parameter in the plain model.
        parameter: values in the optimiser's precision: the module's parameter itself if this rank has all of
            it and it needs no master; otherwise flat, elements of a shard.
        gradient: reduced gradient of the same elements, in the same shape, or None before the first backward.
            Its dtype may differ from that of `parameter`, whose `grad` is set only during the update.
        placed: placement of the elements. Over `holders` each element of the plain tensor is owned once.
        holders: ranks that together hold one copy of the tensor, or None if this rank holds all of it. They
            have the same fragments in the same order, some possibly without elements.
        counted_elsewhere: the norm counts and checkpoints write a copy in another pipeline stage instead.
        unit: fragments of one unit are reduced, updated and moved together.
    """

    name: str
    parameter: nn.Parameter
    placed: ShardPlacement
    gradient: Tensor | None = None
    holders: ProcessGroup | None = None
    counted_elsewhere: bool = False
    unit: int = 0

    @property
    def counted(self) -> ShardPlacement:
        """`placed`, with `owned` set for the boxes that the norm counts and checkpoints write."""
        return self.placed.unowned() if self.counted_elsewhere else self.placed


def unsharded_fragments(named: Iterable[tuple[str, nn.Parameter]]) -> list[ParameterFragment]:
    """Return unsharded parameters as fragments, for one process."""
    return [
        ParameterFragment(
            name=name, parameter=p, placed=ShardPlacement.unsharded(name, tuple(p.shape)), gradient=p.grad
        )
        for name, p in named
    ]
