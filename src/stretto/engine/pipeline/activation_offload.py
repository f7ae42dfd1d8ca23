"""Activation offloading: tensors that a forward saved for its backward are moved to host memory and back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.engine.device import CopyStreams, current_stream, on_accelerator, on_stream, recorded_event


class _SavedTensor:
    """One saved tensor, on the device or on the host.

    Attributes:
        copied: event at the end of the last copy between the two, if copies run on streams.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.on_device: Tensor | None = tensor
        self.host: Tensor | None = None
        self.copied: torch.Event | None = None


class ActivationCopies:
    """The activations that one forward of one stage saves, and their copies in host memory.

    Parameters stay on the device, as does the stage's input, which is in a buffer of the pipeline. On an
    accelerator, copies run on separate streams, through pinned memory.

    Args:
        streams: streams for the copies of all forwards of a rank.
    """

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._saved = list[_SavedTensor]()
        self._inputs = set[int]()
        self._device: torch.device | None = None

    @contextmanager
    def watching(self, x: tuple[Any, ...]) -> Generator[None]:
        """Record the tensors that the forward of x saves."""
        self._saved = []
        self._inputs = {t.untyped_storage()._cdata for t in x if isinstance(t, Tensor)}
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor._base if tensor._base is not None else tensor  # pyright: ignore
        if isinstance(base, nn.Parameter) or tensor.untyped_storage()._cdata in self._inputs:
            return tensor
        self._saved.append(saved := _SavedTensor(tensor.detach()))
        return saved

    def offload(self) -> None:
        """Start copying to the host; the device's memory is free once the copies are done."""
        devices = [saved.on_device.device for saved in self._saved if saved.on_device is not None]
        self._device = next(filter(on_accelerator, devices), None)
        side = None if self._device is None else self._streams.to_host(self._device)
        if side is not None:
            side.wait_stream(current_stream(side.device))
        with on_stream(side):
            for saved in self._saved:
                assert saved.on_device is not None
                host = torch.empty_like(
                    saved.on_device, device="cpu", pin_memory=on_accelerator(saved.on_device.device)
                )
                host.copy_(saved.on_device, non_blocking=True)
                if side is not None:
                    saved.on_device.record_stream(side)
                saved.host, saved.on_device = host, None
        self._mark(side)

    def reload(self) -> None:
        """Start copying back to the device. Only the use of a tensor waits for its copy."""
        side = None if self._device is None else self._streams.to_device(self._device)
        if side is not None and self._saved and (written := self._saved[0].copied) is not None:
            side.wait_event(written)
        with on_stream(side):
            for saved in self._saved:
                assert saved.host is not None
                device = "cpu" if self._device is None else self._device
                saved.on_device = torch.empty_like(saved.host, device=device)
                saved.on_device.copy_(saved.host, non_blocking=True)
        self._mark(side)
        self._saved = []

    def _mark(self, side: torch.Stream | None) -> None:
        if side is not None:
            copied = recorded_event(side)
            for saved in self._saved:
                saved.copied = copied


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, _SavedTensor):
        assert saved.on_device is not None, "backward before reload"
        if saved.copied is not None:
            current = current_stream(saved.on_device.device)
            current.wait_event(saved.copied)
            saved.on_device.record_stream(current)
        return saved.on_device
    return saved
