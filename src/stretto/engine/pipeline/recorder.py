"""Timing of a step's calls, by the host's clock or, on an accelerator, by the device's events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from stretto.engine.device import new_event, on_accelerator, synchronize
from stretto.engine.pipeline.rank_buffers import Call

T = TypeVar("T")
REDUCTIONS = "the reductions"  # what of them remains after the last action


@dataclass(frozen=True)
class Span:
    """One timed call: its label, and its start and end in seconds since the recorder's start."""

    label: str
    start: float
    end: float


class Recorder:
    """Records one step of one rank.

    The wait for a message is recorded separately from the action that uses it. On an accelerator, calls only
    queue work: times are those of the device's stream, and `spans` waits for it.

    Args:
        device: device of the stages.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._by_events = on_accelerator(self._device)
        self._marks = list[tuple[str, Any, Any]]()
        synchronize(self._device)
        self.started = time.time()  # since the epoch, to align the traces of several ranks
        self._zero = self._now()

    def record(self, label: str, call: Call, wait: Call | None) -> None:
        """Time the wait for a call's message, and then the call."""
        if wait is not None:
            start = self._now()
            wait()
            self._marks.append((f"wait {label}", start, self._now()))
        self.timed(label, call)

    def timed(self, label: str, call: Callable[[], T]) -> T:
        """Time a call and return its result."""
        start = self._now()
        result = call()
        self._marks.append((label, start, self._now()))
        return result

    def _now(self) -> Any:
        if not self._by_events:
            return time.perf_counter()
        event = new_event(self._device, timing=True)
        event.record()
        return event

    @property
    def spans(self) -> list[Span]:
        """All calls, in order; waits for an accelerator."""
        synchronize(self._device)
        return [Span(label, self._since(start), self._since(end)) for label, start, end in self._marks]

    def _since(self, mark: Any) -> float:
        return self._zero.elapsed_time(mark) / 1e3 if self._by_events else mark - self._zero
