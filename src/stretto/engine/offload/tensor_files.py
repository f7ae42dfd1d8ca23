"""Groups of tensors that are stored in files between uses."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from stretto.engine.offload.ring import PrefetchRing
from stretto.engine.offload.scratch import Scratch
from stretto.errors import StrettoError

_ALIGN = 64  # bytes; the alignment of tensors that torch allocates on the CPU


class DetachableTensors:
    """Tensors whose memory can be detached and restored, while the tensor objects stay the same.

    Detached ("away") tensors keep their shapes and dtypes. Reading one gives NaN (the maximum for integers)
    and writing raises, so that stale values are not used unnoticed.

    Args:
        tensors: contiguous; tensors that share memory still share it afterwards. Tensors of fewer than two
            elements are never detached.
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
            if tensor.numel() < 2:  # it may be the last reference to a large storage
                tensor.data = tensor.detach().clone()

    def pack(self, memory: Tensor) -> None:
        """Copy the values into uint8 memory [size] and make the tensors views of it."""
        for view, tensor in zip(self.views(memory), self.tensors, strict=True):
            view.copy_(tensor.detach())
        self.attach(memory)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return views of this memory, one per tensor."""
        views = list[Tensor]()
        for tensor, start in zip(self.tensors, self._starts, strict=True):
            part = memory[start : start + tensor.numel() * tensor.element_size()]
            views.append(part.view(tensor.dtype).view(tensor.shape))
        return views

    def attach(self, memory: Tensor) -> None:
        """Make the tensors views of this memory, which contains their values."""
        for tensor, view in zip(self.tensors, self.views(memory), strict=True):
            tensor.data = view

    def detach(self) -> None:
        """Detach the tensors from their memory."""
        for tensor, nothing in zip(self.tensors, self._nothing, strict=True):
            tensor.data = nothing.expand(tensor.shape)

    def marks(self) -> list[int]:
        """Return the `mark` of each tensor while it is away."""
        return [nothing.data_ptr() for nothing in self._nothing]


def mark(tensor: Tensor) -> int:
    """Return the address of the storage, which identifies a tensor that is away, and its views."""
    return _storage(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the byte range of a tensor in its storage, end exclusive."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + tensor.numel() * tensor.element_size()


def _no_value(dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), float("nan"), dtype=dtype)
    return torch.full((), torch.iinfo(dtype).max if dtype != torch.bool else True, dtype=dtype)


class DetachedValues(Protocol):
    """The values of a tensor that is away."""

    def access(self, change: bool) -> Tensor | None:
        """Return the values, valid until the next call for another group; None if their files are removed."""
        ...


_AWAY = weakref.WeakValueDictionary[int, DetachedValues]()


def detached(tensor: Tensor, place: DetachedValues) -> Tensor:
    """Return a tensor of the same shape without memory, whose values `at_hand` gets from `place`.

    The caller must keep a reference to `place`.
    """
    nothing = _no_value(tensor.dtype)
    _AWAY[nothing.data_ptr()] = place
    return nothing.expand(tensor.shape)


class _Place:
    """Group and index of a tensor that may be away."""

    def __init__(self, files: TensorFiles, key: int, index: int) -> None:
        self.files = weakref.ref(files)
        self.key = key
        self.index = index

    def access(self, change: bool) -> Tensor | None:
        files = self.files()
        return None if files is None else files.access(self.key, self.index, change)


class TensorFiles:
    """Groups of tensors by integer key; a group is read and written completely. Not thread-safe.

    Args:
        path: folder on a fast disk, in which this rank creates a subfolder.
        rank: rank in the name of the subfolder.
        description: description of a group, for error messages.
        slots: maximum number of groups in memory.
        pin: allocate pinned host memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int = 0,
        description: str = "tensors of group",
        slots: int = 3,
        pin: bool = False,
    ) -> None:
        self._scratch = Scratch(path, rank)
        self.ring = PrefetchRing(self._scratch.folder, description, slots, pin)
        self._groups = dict[int, DetachableTensors]()
        self._places = list[_Place]()
        self._accessed: tuple[int, list[Tensor]] | None = None
        self._changed = False

    def add(self, key: int, tensors: Sequence[Tensor]) -> None:
        """Write a new group to its file and detach its tensors.

        Args:
            tensors: contiguous, on the CPU, and including every tensor that shares their memory: any other
                would keep the old memory alive and miss later changes.

        Raises:
            StrettoError: not enough disk space.
        """
        group = self._groups[key] = DetachableTensors(tensors)
        for index, at in enumerate(group.marks()):
            self._places.append(_Place(self, key, index))
            _AWAY[at] = self._places[-1]
        if group.size:
            group.pack(self.ring.add(key, group.size))
            self.put(key)
            give_back()

    def start_fetch(self, key: int) -> None:
        """Start reading a group, if a slot is available."""
        self.end_access()
        if self._groups[key].size:
            self.ring.start_fetch(key)

    def fetch(self, key: int) -> None:
        """Bring the tensors of a group into memory.

        Raises:
            OffloadError: reading the group failed, or a preceding write did.
        """
        self.end_access()
        if self._groups[key].size:
            self._groups[key].attach(self.ring.fetch(key))

    def put(self, key: int) -> None:
        """Detach the tensors of a group and write them back."""
        if self._groups[key].size:
            self._groups[key].detach()
            self.ring.put(key)

    def release(self, key: int) -> None:
        """Detach the unmodified tensors of a group, without writing."""
        if self._groups[key].size:
            self._groups[key].detach()
            self.ring.release(key)

    def access(self, key: int, index: int, change: bool) -> Tensor:
        """Return the values of one tensor, which itself stays detached; valid until the next call for another
        group.

        Args:
            change: the caller modifies the values, and the group is written back.
        """
        if self._accessed is None or self._accessed[0] != key:
            self.end_access()
            self._accessed = key, self._groups[key].views(self.ring.fetch(key))
        self._changed |= change
        return self._accessed[1][index]

    def end_access(self) -> None:
        """End the access that `access` started, writing the group back if it was modified."""
        if self._accessed is not None:
            key, self._accessed = self._accessed[0], None
            if self._changed:
                self.ring.put(key)
            else:
                self.ring.release(key)
            self._changed = False

    def close(self) -> None:
        """Stop transfers and remove the files; the values of detached tensors are lost."""
        self._places.clear()
        self.ring.close()
        self._scratch.close()


def give_back() -> None:
    """Return freed memory to the system; glibc would retain it in fragments too small for the aligned
    allocations of the next group.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def is_away(tensor: Tensor) -> bool:
    """True if the tensor, or the tensor that it is a view of, is in a file."""
    return mark(tensor) in _AWAY


def at_hand(tensor: Tensor, change: bool = False) -> Tensor:
    """Return the tensor itself, or its values if it is away, valid until the next call for another group or
    any other use of the group.

    A checkpoint that proceeds group by group has one group in memory at a time; other orders read more often.

    Args:
        tensor: a tensor, or a view of all its elements.
        change: the caller modifies the result.

    Raises:
        StrettoError: `tensor` is a view of only part of a tensor that is away.
        OffloadError: reading the tensor failed.
    """
    place = _AWAY.get(mark(tensor))
    part = None if place is None else place.access(change)
    if part is None:
        return tensor
    if part.shape != tensor.shape:
        raise StrettoError(
            f"a part of shape {list(tensor.shape)} of a tensor of shape {list(part.shape)} is in a file",
            hint="call at_hand with the full tensor",
        )
    return part
