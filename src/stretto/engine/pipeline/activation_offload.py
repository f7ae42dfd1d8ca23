"""Activation offloading: what a forward saved for its backward, moved to host memory and back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.engine.device import CopyStreams, current_stream, on_accelerator, on_stream, recorded_event


class _Kept:
    """One saved tensor: on the device, or on the host.

    copied: the end of the last copy between the two, where copies run on streams.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.here: Tensor | None = tensor
        self.host: Tensor | None = None
        self.copied: torch.Event | None = None


class ActivationCopies:
    """The activations that one forward of one stage saves, and their copies in host memory.

    Parameters stay on the device, and so does the stage's input, which lies in a buffer of the pipeline.
    On an accelerator, copies run on separate streams, through pinned memory.

    Args:
        streams: of the copies of all forwards of a rank.
    """

    def __init__(self, streams: CopyStreams) -> None:
        self._streams = streams
        self._kept = list[_Kept]()
        self._inputs = set[int]()
        self._device: torch.device | None = None

    @contextmanager
    def watching(self, x: tuple[Any, ...]) -> Generator[None]:
        """Record what the forward of x saves."""
        self._kept = []
        self._inputs = {t.untyped_storage()._cdata for t in x if isinstance(t, Tensor)}
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor._base if tensor._base is not None else tensor  # pyright: ignore
        if isinstance(base, nn.Parameter) or tensor.untyped_storage()._cdata in self._inputs:
            return tensor
        self._kept.append(kept := _Kept(tensor.detach()))
        return kept

    def offload(self) -> None:
        """Copy to the host; the device's memory is free once the copies are done."""
        devices = [kept.here.device for kept in self._kept if kept.here is not None]
        self._device = next(filter(on_accelerator, devices), None)
        side = None if self._device is None else self._streams.to_host(self._device)
        if side is not None:
            side.wait_stream(current_stream(side.device))
        with on_stream(side):
            for kept in self._kept:
                assert kept.here is not None
                host = torch.empty_like(kept.here, device="cpu", pin_memory=on_accelerator(kept.here.device))
                host.copy_(kept.here, non_blocking=True)
                if side is not None:
                    kept.here.record_stream(side)
                kept.host, kept.here = host, None
        self._mark(side)

    def reload(self) -> None:
        """Start copying back to the device. What uses a tensor waits for it, nothing before does."""
        side = None if self._device is None else self._streams.to_device(self._device)
        if side is not None and self._kept and (written := self._kept[0].copied) is not None:
            side.wait_event(written)
        with on_stream(side):
            for kept in self._kept:
                assert kept.host is not None
                device = "cpu" if self._device is None else self._device
                kept.here = torch.empty_like(kept.host, device=device).copy_(kept.host, non_blocking=True)
        self._mark(side)
        self._kept = []

    def _mark(self, side: torch.Stream | None) -> None:
        if side is not None:
            copied = recorded_event(side)
            for kept in self._kept:
                kept.copied = copied


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, _Kept):
        assert kept.here is not None, "a backward before its reload"
        if kept.copied is not None:
            current = current_stream(kept.here.device)
            current.wait_event(kept.copied)
            kept.here.record_stream(current)
        return kept.here
    return kept
