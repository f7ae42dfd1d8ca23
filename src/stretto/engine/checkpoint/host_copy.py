"""Host memory into which a checkpoint is copied, so that training goes on while the copy is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stretto.engine.checkpoint.files import BLOCK, size_text
from stretto.engine.checkpoint.storage import Entry
from stretto.engine.device import on_accelerator, synchronize
from stretto.errors import StrettoError

_ALIGN = 64  # bytes, a multiple of every element's size


class Interrupted(Exception):
    """The writing of a copy was ended early."""


class HostCopy:
    """One copy of what this rank saves. The memory is kept from one save to the next; it is page-locked where
    it is copied from an accelerator, whose copies are queued and then waited for together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, files: Mapping[str, Sequence[Entry]], stop: threading.Event) -> dict[str, list[Entry]]:
        """The same entries, with the values that they have now; valid until the next call.

        Args:
            stop: ends the reading of the copy with `Interrupted`.

        Raises:
            StrettoError: there is not enough memory.
        """
        sizes = {name: [-(-entry.bytes // _ALIGN) * _ALIGN for entry in files[name]] for name in files}
        self._reserve(sum(map(sum, sizes.values())))
        start, copies = 0, dict[str, list[Entry]]()
        for name, entries in files.items():
            copies[name] = []
            for entry, size in zip(entries, sizes[name], strict=True):
                place = self._memory[start : start + entry.bytes]
                _fill(place, entry)
                copies[name].append(replace(entry, get=partial(_blocks, place, stop)))
                start += size
        synchronize(self._device)
        return copies

    def _reserve(self, size: int) -> None:
        if self._memory.numel() >= size:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old is freed before there is a new one
        try:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_accelerator(self._device))
        except RuntimeError as error:
            raise StrettoError(
                f"no host memory for a copy of the checkpoint, {size_text(size)} of this rank: {error}",
                hint="checkpoint.async_save=false needs no copy",
            ) from None


def _fill(place: Tensor, entry: Entry) -> None:
    """Queue the copy of an entry's values into memory of their size."""
    data, start = entry.get(), 0
    for part in (data,) if isinstance(data, Tensor) else data:
        stop = start + part.numel() * part.element_size()
        place[start:stop].view(part.dtype).view(part.shape).copy_(part.detach(), non_blocking=True)
        start = stop


def _blocks(place: Tensor, stop: threading.Event) -> Iterator[Tensor]:
    """The copy, block by block; it ends with `Interrupted` where that is asked for."""
    for block in place.split(BLOCK):
        if stop.is_set():
            raise Interrupted
        yield block
