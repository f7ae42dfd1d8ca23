"""Ranks that take longer than the others in every step, and the busy times of all ranks, kept."""

from __future__ import annotations

import json
import time
from typing import Any

from stretto.engine.parallel.control import this_rank


def slow_down(rank: int, factor: float, first: int) -> None:
    """From step `first` on, this rank computes `factor` times as long: it spins for the rest."""
    from stretto.run.train.trainer import Trainer

    inner = Trainer.__init__

    def built(self: Any, *arguments: Any, **named: Any) -> None:
        inner(self, *arguments, **named)
        step = self.task.model.step

        def slower(*arguments: Any) -> Any:
            began = time.thread_time()  # of work, however many jobs share the core
            result = step(*arguments)
            ended = time.thread_time()
            if self.progress.step + 1 >= first and this_rank() == rank:
                while time.thread_time() < ended + (factor - 1) * (ended - began):
                    pass
            return result

        self.task.model.step = slower

    Trainer.__init__ = built


def keep_busy_times(path: str) -> None:
    """Append those of every step, and what is slow after it."""
    from stretto.run.watch.slow import SlowRanks

    inner = SlowRanks.add

    def add(self: SlowRanks, busy: Any, seconds: float) -> Any:
        slow = inner(self, busy, seconds)
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([list(busy), {str(rank): factor for rank, factor in slow.items()}]) + "\n")
        return slow

    SlowRanks.add = add
