"""Dropout whose mask depends on what is dropped, not on where.

The mask of a sample is a pure function of (seed, layer, sample), so every layout drops the same elements that
one process
drops: a rank that holds a slice of an activation draws the whole sample's mask and takes its slice of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DropoutKeys:
    """Which samples the running microbatch holds; shared by all dropout layers of a rank."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.samples: Sequence[int] = ()

    def generator(self, name: str, sample: int, device: torch.device) -> torch.Generator:
        """A fresh stream for one layer and one sample."""
        digest = hashlib.blake2b(f"{self.seed}/{name}/{sample}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


class KeyedDropout(nn.Module):
    """Dropout with probability `p`; dimension `dim` may be rank `index`'s slice of `parts` equal ones."""

    def __init__(
        self, p: float, name: str, keys: DropoutKeys, dim: int | None = None, index: int = 0, parts: int = 1
    ) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.keys = keys
        self.dim, self.index, self.parts = dim, index, parts

    def forward(self, x: Tensor) -> Tensor:
        """x [samples, ...] -> same shape, each element zeroed with probability p, the rest scaled by
        1/(1-p).
        """
        if not self.training or self.p == 0.0:
            return x
        assert len(self.keys.samples) == x.shape[0], "one key for each sample of the microbatch"
        masks = [self._mask(x, sample) for sample in self.keys.samples]
        return x * torch.stack(masks).to(x.dtype).mul_(1.0 / (1.0 - self.p))

    def _mask(self, x: Tensor, sample: int) -> Tensor:
        shape = list(x.shape[1:])
        if self.dim is None:
            return torch.rand(shape, generator=self._stream(x, sample), device=x.device) >= self.p
        axis = self.dim - 1
        local = shape[axis]
        shape[axis] *= self.parts
        whole = torch.rand(shape, generator=self._stream(x, sample), device=x.device)
        return whole.narrow(axis, self.index * local, local) >= self.p

    def _stream(self, x: Tensor, sample: int) -> torch.Generator:
        return self.keys.generator(self.name, sample, x.device)

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name!r}"


def key_dropout(model: nn.Module, keys: DropoutKeys) -> None:
    """Replace every nn.Dropout of `model` by a keyed one."""
    for name, module in list(model.named_modules()):
        # not named_children: one module under two names is two layers here
        for child_name, child in list(module._modules.items()):
            if isinstance(child, nn.Dropout):
                full = f"{name}.{child_name}" if name else child_name
                setattr(module, child_name, KeyedDropout(child.p, full, keys).train(child.training))
