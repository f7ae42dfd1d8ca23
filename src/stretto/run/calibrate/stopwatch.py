"""Time a call, robust against other load on the machine, within a budget of seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from stretto.engine.device import synchronize

_ROUNDS = 5  # of which the median is taken
_SHORTEST = 1e-3  # seconds of a round: shorter calls are repeated within it


@dataclass
class Stopwatch:
    """Times calls on one device.

    On a CPU with one thread it takes the process's CPU time, which other processes on the same cores do not
    change; otherwise wall time.

    Attributes:
        device: where calls run.
        budget: wall seconds for measuring one call, exceeded by one round at most.
    """

    device: torch.device
    budget: float = 0.1

    def __post_init__(self) -> None:
        single_threaded = self.device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.process_time if single_threaded else time.perf_counter

    def seconds(self, call: Callable[[], object]) -> float:
        """The median of a few rounds, after one call to warm up."""
        begun = time.perf_counter()
        once = self._time(call, 1)
        if time.perf_counter() - begun < self.budget / _ROUNDS:  # the first call has filled caches
            once = self._time(call, 1)
        count = max(1, round(_SHORTEST / max(once, 1e-7)))
        rounds = list[float]()
        while len(rounds) < _ROUNDS and (not rounds or time.perf_counter() - begun < self.budget):
            rounds.append(self._time(call, count) / count)
        return median(rounds)

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call, without repetition."""
        return self._time(call, 1)

    def _time(self, call: Callable[[], object], count: int) -> float:
        self._wait()
        begun = self._clock()
        for _ in range(count):
            call()
        self._wait()
        return max(self._clock() - begun, 1e-9)

    def _wait(self) -> None:
        synchronize(self.device)
