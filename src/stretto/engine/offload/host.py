"""Copies between a GPU and host memory that run beside its computation."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopies:
    """Gradients copied to host memory as soon as they are reduced, as in ZeRO-Offload (Ren et al. 2021).

    The host memory of each is taken at the first copy and kept.
    """

    def __init__(self) -> None:
        self._memory = dict[int, Tensor]()
        self._events = dict[int, torch.cuda.Event]()
        self._side: torch.cuda.Stream | None = None

    def start(self, key: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """Begin to copy; what the current stream does to the gradient from now on is not seen."""
        host = self._memory.get(key)
        if host is None:
            host = torch.empty(gradient.shape, dtype=dtype, pin_memory=True)
            self._memory[key] = host
        if self._side is None:
            self._side = torch.cuda.Stream(gradient.device)
        self._side.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._side):
            # widened on the device where types differ: the copy is then one that runs by itself
            host.copy_(gradient.to(dtype), non_blocking=True)
            gradient.record_stream(self._side)
            self._events[key] = event = torch.cuda.Event()
            event.record(self._side)

    def take(self, key: int) -> Tensor | None:
        """The copy, when it is there; None if none was begun. The caller may write to it until the next."""
        event = self._events.pop(key, None)
        if event is None:
            return None
        event.synchronize()
        return self._memory[key]
