"""The random streams of torch, kept so that a repeated forward draws the same."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class RandomState:
    """The state of the random streams at a forward, so that its repetition draws the same."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._devices = list[int]()
        self._states = list[Tensor]()

    def note(self, x: tuple[Any, ...]) -> None:
        """Keep the state of the host's stream and of those of the inputs' devices."""
        self._host = torch.get_rng_state()
        self._devices = sorted({t.device.index for t in x if isinstance(t, Tensor) and t.is_cuda})
        self._states = [torch.cuda.get_rng_state(device) for device in self._devices]

    @property
    def drawn(self) -> bool:
        """Whether anything has been drawn since."""
        assert self._host is not None, "no forward came before"
        now = [torch.cuda.get_rng_state(device) for device in self._devices]
        kept = [self._host, *self._states]
        return not all(map(torch.equal, kept, [torch.get_rng_state(), *now]))

    @contextmanager
    def restored(self) -> Generator[None]:
        """Draw from there, and leave the streams as they were."""
        assert self._host is not None, "no forward came before"
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._host)
            for device, state in zip(self._devices, self._states, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
