"""Activation offloading: what a forward saved for its backward, moved to host memory and back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.engine.device import current_stream, new_stream, on_accelerator, on_stream


class _Kept:
    """One saved tensor: on the device, or on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.here: Tensor | None = tensor
        self.host: Tensor | None = None


class ActivationCopies:
    """The activations that one forward of one stage saves, and their copies in host memory.

    Parameters stay on the device, and so does the stage's input, which lies in a buffer of the pipeline.
    On an accelerator, copies run on a separate stream, through pinned memory.
    """

    def __init__(self) -> None:
        self._kept = list[_Kept]()
        self._inputs = set[int]()
        self._side: torch.Stream | None = None

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
        with self._stream():
            for kept in self._kept:
                assert kept.here is not None
                host = torch.empty_like(kept.here, device="cpu", pin_memory=on_accelerator(kept.here.device))
                host.copy_(kept.here, non_blocking=True)
                if self._side is not None:
                    kept.here.record_stream(self._side)
                kept.host, kept.here = host, None

    def reload(self) -> None:
        """Start copying back to the device; the backward's stream waits for the copies."""
        device = torch.device("cpu") if self._side is None else self._side.device
        with self._stream():
            for kept in self._kept:
                assert kept.host is not None
                kept.here = torch.empty_like(kept.host, device=device).copy_(kept.host, non_blocking=True)
        if self._side is not None:
            current = current_stream(self._side.device)
            current.wait_stream(self._side)
            for kept in self._kept:
                assert kept.here is not None
                kept.here.record_stream(current)
        self._kept = []

    @contextmanager
    def _stream(self) -> Generator[None]:
        if self._side is None:
            devices = [k.here.device for k in self._kept if k.here is not None]
            device = next(filter(on_accelerator, devices), None)
            if device is None:
                yield
                return
            self._side = new_stream(device)
        self._side.wait_stream(current_stream(self._side.device))
        with on_stream(self._side):
            yield


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, _Kept):
        assert kept.here is not None, "a backward before its reload"
        return kept.here
    return kept
