"""Asynchronous copies of gradients from a GPU to host memory."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Copies gradients to host memory as soon as they are reduced, as in ZeRO-Offload (Ren et al. 2021).

    The host memory of each is allocated at its first copy and kept.
    """

    def __init__(self) -> None:
        self._memory = dict[int, Tensor]()
        self._events = dict[int, torch.cuda.Event]()
        self._side: torch.cuda.Stream | None = None

    def start(self, key: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """Start a copy, ordered after the current stream; later changes to the gradient are not copied."""
        host = self._memory.get(key)
        if host is None:
            host = torch.empty(gradient.shape, dtype=dtype, pin_memory=True)
            self._memory[key] = host
        if self._side is None:
            self._side = torch.cuda.Stream(gradient.device)
        self._side.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._side):
            # converted on the device where dtypes differ: only a plain copy is asynchronous
            host.copy_(gradient.to(dtype), non_blocking=True)
            gradient.record_stream(self._side)
            self._events[key] = event = torch.cuda.Event()
            event.record(self._side)

    def take(self, key: int) -> Tensor | None:
        """Wait for the copy; None if none was started. The caller may write to it until the next `start`."""
        event = self._events.pop(key, None)
        if event is None:
            return None
        event.synchronize()
        return self._memory[key]
