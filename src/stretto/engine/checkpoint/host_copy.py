"""Copy a checkpoint to host memory, so that training continues while the copy is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stretto.engine.checkpoint.files import BLOCK, size_text
from stretto.engine.checkpoint.storage import TensorSource
from stretto.engine.device import on_accelerator, synchronize
from stretto.errors import StrettoError

_ALIGN = 64  # bytes, a multiple of every element's size


class Interrupted(Exception):
    """The writing of a copy was stopped."""


class HostCopy:
    """One host copy of the tensors that this rank saves.

    The memory is reused for later saves. For an accelerator it is page-locked; all copies are queued, then
    waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(
        self, files: Mapping[str, Sequence[TensorSource]], stop: threading.Event
    ) -> dict[str, list[TensorSource]]:
        """Copy the current values; return sources that read the copy, valid until the next call.

        Args:
            files: the tensors of each file.
            stop: if set, reading the copy raises `Interrupted`.

        Raises:
            StrettoError: there is not enough memory.
        """
        sizes = {name: [-(-source.bytes // _ALIGN) * _ALIGN for source in files[name]] for name in files}
        size = sum(map(sum, sizes.values()))
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory is freed first
            try:
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=on_accelerator(self._device))
            except RuntimeError as error:
                raise StrettoError(
                    f"no host memory for this rank's copy of the checkpoint, {size_text(size)}: {error}",
                    hint="checkpoint.async_save=false needs no copy",
                ) from None
        start, copies = 0, dict[str, list[TensorSource]]()
        for name, sources in files.items():
            copies[name] = []
            for source, padded in zip(sources, sizes[name], strict=True):
                memory = self._memory[start : start + source.bytes]
                data, offset = source.get(), 0
                for part in (data,) if isinstance(data, Tensor) else data:
                    end = offset + part.numel() * part.element_size()
                    target = memory[offset:end].view(part.dtype).view(part.shape)
                    target.copy_(part.detach(), non_blocking=True)
                    offset = end
                copies[name].append(replace(source, get=partial(_blocks, memory, stop)))
                start += padded
        synchronize(self._device)
        return copies


def _blocks(memory: Tensor, stop: threading.Event) -> Iterator[Tensor]:
    """Yield the copy in blocks; raise `Interrupted` once `stop` is set."""
    for block in memory.split(BLOCK):
        if stop.is_set():
            raise Interrupted
        yield block
