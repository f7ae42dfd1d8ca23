"""Where a local tensor lies inside the plain model's tensor.

Everything that must see through the layout reads this one table: initial values, checkpoints, the gradient
    norm, and `verify`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A box of the full tensor that this rank holds.

    `offsets` and `sizes` place it in the full tensor, `local` is where it starts in the local one. Of all
    ranks of a model-parallel group (all axes but dp) that hold the same box, one has `owned`: the gradient
    norm counts and the checkpoint writes owned pieces only.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]
    owned: bool = True

    def of_full(self, tensor: Tensor) -> Tensor:
        """The box as a view of the full tensor."""
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))]

    def of_local(self, tensor: Tensor) -> Tensor:
        """The box as a view of the local tensor."""
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.local, self.sizes, strict=True))]


@dataclass(frozen=True)
class Placed:
    """One parameter of the plain model: its name and shape there, and the pieces held here.

    What no piece covers locally is padding: zero, and invisible in loss, gradients and checkpoints. Ranks
    that differ in the axes of `over` hold different pieces, as do those of different pipeline stages; along
    all other axes the pieces, and who owns them, repeat.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    over: str = "tp"

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], owned: bool = True) -> Placed:
        """All of the tensor, held here."""
        start = (0,) * len(shape)
        return cls(name, shape, (Piece(start, shape, start, owned),))

    @torch.no_grad()
    def fill(self, local: Tensor, full: Tensor) -> None:
        """Copy this rank's pieces of `full` into `local`, and zeros into its padding."""
        local.zero_()
        for piece in self.pieces:
            piece.of_local(local).copy_(piece.of_full(full))
