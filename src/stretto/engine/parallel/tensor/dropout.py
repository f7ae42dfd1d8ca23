"""Dropout with layout-independent masks.

The mask of a sample is a pure function of (seed, layer, sample), so every layout drops the same elements as
one process: a rank that holds a slice of an activation draws the full sample's mask and takes its slice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.engine.device import moved


class DropoutKeys:
    """The seed, and the indices of the samples in the current microbatch; shared by all dropout layers of a
    rank.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.samples: Sequence[int] = ()

    def generator(self, name: str, sample: int, device: torch.device) -> torch.Generator:
        """Return a newly seeded generator for one layer and one sample."""
        digest = hashlib.blake2b(f"{self.seed}/{name}/{sample}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(frozen=True)
class Cut:
    """The split of one dimension of an activation: a rank holds `indices` of the full `size`.

    Indices of `size` and above are padding, whose mask is arbitrary.
    """

    dim: int  # of the activation; dimension 0 is the samples; negative: counted from the end
    size: int
    indices: Tensor  # int64

    @property
    def of_sample(self) -> int:
        """The dimension within one sample."""
        return self.dim - 1 if self.dim > 0 else self.dim

    @classmethod
    def even(cls, dim: int, size: int, index: int, parts: int) -> Cut:
        """Return part `index` of `parts` equal parts."""
        step = size // parts
        return cls(dim, size, torch.arange(index * step, (index + 1) * step))


class KeyedDropout(nn.Module):
    """Dropout with probability `p` of an activation that may be split along some dimensions.

    Attributes:
        share: (index, parts): the activation has part `index` of the microbatch's samples, cut into `parts`
            equal parts.
    """

    share: tuple[int, int] = (0, 1)

    def __init__(self, p: float, name: str, keys: DropoutKeys, cuts: Sequence[Cut] = ()) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.keys = keys
        self.cuts = tuple(cuts)

    def forward(self, x: Tensor) -> Tensor:
        """Zero each element of x [samples, ...] with probability p and scale the others by 1/(1-p). Only the
        mask is saved for the backward, one byte per element.
        """
        if not self.active:
            return x
        return cast(Tensor, _Drop.apply(x, self.mask(x.shape, x.device), 1.0 / (1.0 - self.p)))

    @property
    def active(self) -> bool:
        """True if elements are dropped."""
        return self.training and self.p > 0.0

    def mask(self, shape: Sequence[int], device: torch.device, cuts: Sequence[Cut] | None = None) -> Tensor:
        """Return the mask of an activation of this (local) shape in the current microbatch: bool, True for
        elements that are not dropped.

        Args:
            cuts: replaces the module's `cuts`.
        """
        index, parts = self.share
        assert len(self.keys.samples) == shape[0] * parts, "one key for each sample of the microbatch"
        samples = self.keys.samples[index * shape[0] : (index + 1) * shape[0]]
        cuts = self.cuts if cuts is None else cuts
        return torch.stack([self._mask(shape, sample, device, cuts) for sample in samples])

    def _mask(self, shape: Sequence[int], sample: int, device: torch.device, cuts: Sequence[Cut]) -> Tensor:
        full_shape = list(shape[1:])
        for cut in cuts:
            full_shape[cut.of_sample] = cut.size
        stream = self.keys.generator(self.name, sample, device)
        mask = torch.rand(full_shape, generator=stream, device=device) >= self.p
        for cut in cuts:
            mask = mask.index_select(cut.of_sample, moved(cut.indices.clamp(max=cut.size - 1), device))
        return mask

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grads[0] * mask).mul_(ctx.scale), None, None


def key_dropout(model: nn.Module, keys: DropoutKeys) -> None:
    """Replace every nn.Dropout of `model` by a keyed one."""
    for name, module in list(model.named_modules()):
        # not named_children, which lists a module once: a module with two names is two layers with two masks
        for child_name, child in list(module._modules.items()):
            if isinstance(child, nn.Dropout):
                full = f"{name}.{child_name}" if name else child_name
                setattr(module, child_name, KeyedDropout(child.p, full, keys).train(child.training))
