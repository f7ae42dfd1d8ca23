"""Tensors that lie one after the other in a block of bytes, and go with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGN = 64  # bytes: what torch gives every tensor of its own


class Parcel:
    """Some tensors whose memory comes and goes; the tensors, which others hold, stay the same objects.

    While they are away they keep their shapes and types. Reading gives NaN, in integers the largest, and
    writing raises: nobody can take them for what they were.

    Args:
        tensors: contiguous; those that share memory go on sharing it. One of fewer than two elements stays.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [t for t in tensors if t.numel() > 1]
        spans = dict[int, tuple[int, int]]()
        for tensor in self.tensors:
            assert tensor.is_contiguous(), tensor.stride()
            assert tensor.device.type == "cpu", tensor.device
            start, stop = _span(tensor)
            low, high = spans.get(_storage(tensor), (start, stop))
            spans[_storage(tensor)] = min(low, start), max(high, stop)
        places, self.size = dict[int, int](), 0
        for storage, (low, high) in spans.items():
            low -= low % _ALIGN
            places[storage] = self.size - low
            self.size += -(-(high - low) // _ALIGN) * _ALIGN
        self._starts = [places[_storage(t)] + _span(t)[0] for t in self.tensors]
        self._nothing = [_no_value(t.dtype) for t in self.tensors]
        for tensor in tensors:
            if tensor.numel() < 2:  # perhaps the last that refers to a large memory
                tensor.data = tensor.detach().clone()

    def pack(self, memory: Tensor) -> None:
        """Copy the tensors' values into uint8 memory [size]; they lie there from now on."""
        for view, tensor in zip(self.views(memory), self.tensors, strict=True):
            view.copy_(tensor.detach())
        self.here(memory)

    def views(self, memory: Tensor) -> list[Tensor]:
        """All tensors, as they lie in memory."""
        found = list[Tensor]()
        for tensor, start in zip(self.tensors, self._starts, strict=True):
            part = memory[start : start + tensor.numel() * tensor.element_size()]
            found.append(part.view(tensor.dtype).view(tensor.shape))
        return found

    def here(self, memory: Tensor) -> None:
        """The tensors' values are in this memory."""
        for tensor, view in zip(self.tensors, self.views(memory), strict=True):
            tensor.data = view

    def away(self) -> None:
        """They are nowhere in memory."""
        for tensor, nothing in zip(self.tensors, self._nothing, strict=True):
            tensor.data = nothing.expand(tensor.shape)

    def marks(self) -> list[int]:
        """What `mark` gives for each tensor that is away."""
        return [nothing.data_ptr() for nothing in self._nothing]


def mark(tensor: Tensor) -> int:
    """Where its memory begins: by that a tensor that is away, and any view of it, can be told."""
    return _storage(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte in its storage."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + tensor.numel() * tensor.element_size()


def _no_value(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), float("nan"), dtype=dtype)
    return torch.full((), torch.iinfo(dtype).max if dtype != torch.bool else True, dtype=dtype)
