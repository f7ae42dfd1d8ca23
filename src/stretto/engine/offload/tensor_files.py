"""Groups of tensors that are kept in files between uses."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from stretto.engine.offload.ring import Ring
from stretto.engine.offload.scratch import Scratch
from stretto.errors import StrettoError

_ALIGN = 64  # bytes: what torch gives every tensor of its own


class Parcel:
    """Tensors whose memory can be taken away and restored; the tensor objects, which others refer to, stay.

    While away they keep their shapes and dtypes. Reading gives NaN (integers: the largest) and writing
    raises, so that stale values cannot be used unnoticed.

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
        views = list[Tensor]()
        for tensor, start in zip(self.tensors, self._starts, strict=True):
            part = memory[start : start + tensor.numel() * tensor.element_size()]
            views.append(part.view(tensor.dtype).view(tensor.shape))
        return views

    def here(self, memory: Tensor) -> None:
        """Point the tensors into this memory, which has their values."""
        for tensor, view in zip(self.tensors, self.views(memory), strict=True):
            tensor.data = view

    def away(self) -> None:
        """Detach the tensors from memory."""
        for tensor, nothing in zip(self.tensors, self._nothing, strict=True):
            tensor.data = nothing.expand(tensor.shape)

    def marks(self) -> list[int]:
        """What `mark` gives for each tensor that is away."""
        return [nothing.data_ptr() for nothing in self._nothing]


def mark(tensor: Tensor) -> int:
    """The address of its storage, which identifies a tensor that is away, and any view of it."""
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


_AWAY = weakref.WeakValueDictionary[int, "_Place"]()


class _Place:
    """The group and index of a tensor that is away."""

    def __init__(self, files: TensorFiles, key: int, index: int) -> None:
        self.files = weakref.ref(files)
        self.key = key
        self.index = index


class TensorFiles:
    """Tensors by group number; a group is read and written as a whole. Not thread-safe.

    Args:
        path: folder on a fast disk, in which this rank makes a subfolder.
        rank: for the name of the subfolder.
        what: a group is, for errors.
        slots: groups that are in memory at most.
        pin: allocate pinned host memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        path: str | Path,
        rank: int = 0,
        what: str = "tensors of group",
        slots: int = 3,
        pin: bool = False,
    ) -> None:
        self._scratch = Scratch(path, rank)
        self.ring = Ring(self._scratch.folder, what, slots, pin)
        self._parcels = dict[int, Parcel]()
        self._places = list[_Place]()
        self._looked: tuple[int, list[Tensor]] | None = None
        self._changed = False

    def add(self, key: int, tensors: Sequence[Tensor]) -> None:
        """Write a new group; its tensors are away from now on.

        Args:
            tensors: contiguous, on the CPU, and all that refer to their memory: another one would keep the
                memory and see no changes.

        Raises:
            StrettoError: there is no room for them on the disk.
        """
        parcel = self._parcels[key] = Parcel(tensors)
        for index, at in enumerate(parcel.marks()):
            self._places.append(_Place(self, key, index))
            _AWAY[at] = self._places[-1]
        if parcel.size:
            parcel.pack(self.ring.add(key, parcel.size))
            self.put(key)
            give_back()

    def start_fetch(self, key: int) -> None:
        """Begin to read a group, if there is memory for it."""
        self.let_go()
        if self._parcels[key].size:
            self.ring.start_fetch(key)

    def fetch(self, key: int) -> None:
        """Bring a group's tensors here.

        Raises:
            OffloadError: they could not be read, or what had to be written before could not.
        """
        self.let_go()
        if self._parcels[key].size:
            self._parcels[key].here(self.ring.fetch(key))

    def put(self, key: int) -> None:
        """Take the group's tensors away and write them back."""
        if self._parcels[key].size:
            self._parcels[key].away()
            self.ring.put(key)

    def release(self, key: int) -> None:
        """Take the group's tensors away, unchanged."""
        if self._parcels[key].size:
            self._parcels[key].away()
            self.ring.release(key)

    def look(self, key: int, index: int, change: bool) -> Tensor:
        """One tensor of a group, which is brought in but counts as away: good until the next call."""
        if self._looked is None or self._looked[0] != key:
            self.let_go()
            self._looked = key, self._parcels[key].views(self.ring.fetch(key))
        self._changed |= change
        return self._looked[1][index]

    def let_go(self) -> None:
        """End `look`."""
        if self._looked is not None:
            key, self._looked = self._looked[0], None
            if self._changed:
                self.ring.put(key)
            else:
                self.ring.release(key)
            self._changed = False

    def close(self) -> None:
        """End transfers and remove the files; tensors that are away are lost."""
        self._places.clear()
        self.ring.close()
        self._scratch.close()


def give_back() -> None:
    """Return freed memory to the system: glibc keeps it, and in pieces into which the next group's tensors,
    which it aligns, do not fit.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def is_away(tensor: Tensor) -> bool:
    """Whether the tensor, or what it is a view of, is in a file."""
    return mark(tensor) in _AWAY


def at_hand(tensor: Tensor, change: bool = False) -> Tensor:
    """The tensor itself, or where it is away its values in memory, valid until the next call for a tensor of
    another group, or another use of the group.

    A checkpoint that goes group by group so has one group in memory at a time; any other order is correct
    too, but reads more often.

    Args:
        tensor: or a view of all of it.
        change: it will be written to.

    Raises:
        StrettoError: it is a part of a tensor that is away.
        OffloadError: it could not be read.
    """
    place = _AWAY.get(mark(tensor))
    files = place.files() if place is not None else None
    if place is None or files is None:
        return tensor
    part = files.look(place.key, place.index, change)
    if part.shape != tensor.shape:
        raise StrettoError(
            f"a part of shape {list(tensor.shape)} of a tensor of shape {list(part.shape)} is in a file",
            hint="bring in the whole tensor",
        )
    return part
