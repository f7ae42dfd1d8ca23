"""Claim: beyond its copy to host memory, a save in the background stops training for at most 5% of a step.

Training's own steps of the small GPT with AdamW on data-parallel ranks, in rounds, in random order within
each: a step without a save, a step and a save that is waited for, a step and a save in the background with
the steps during which it is written. Between two contestants nothing is left to write.

    python benchmarks/async_save.py [--ranks 2] [--rounds 20] [--hidden 256]

*Stop* is all that the training thread does for a save: planning, folder, copy, and later the two moments in
which ranks agree on the commit. The copy is timed inside it; beyond the copy is the rest. Steps while a save
is written share their cores with the checksums of the writing thread: that is their own row.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, cast

import small_gpt
import torch
from harness import arguments, barrier, on_ranks, where

from stretto.engine.checkpoint.background import BackgroundSave
from stretto.engine.checkpoint.folder import Retention
from stretto.engine.checkpoint.host_copy import HostCopy
from stretto.engine.checkpoint.save import save
from stretto.engine.checkpoint.storage import TensorSource
from stretto.engine.optim.rate import LearningRate
from stretto.engine.parallel.control import gather_json
from stretto.run.data.dataset import Batch
from stretto.run.train.language_task import LanguageTask, TextProgress
from stretto.run.train.rank_model import tensors_of
from stretto.run.train.trainer import Trainer


@dataclass
class Times:
    """Seconds by round, of the slowest rank."""

    step: list[float] = field(default_factory=list[float])
    waited: list[float] = field(default_factory=list[float])
    stop: list[float] = field(default_factory=list[float])
    copy: list[float] = field(default_factory=list[float])
    during: list[float] = field(default_factory=list[float])


class TimedCopy(HostCopy):
    """Counts the seconds of its copies."""

    seconds = 0.0

    def copy(
        self, files: Mapping[str, Sequence[TensorSource]], stop: threading.Event
    ) -> dict[str, list[TensorSource]]:
        """The copy."""
        started = time.perf_counter()
        copies = super().copy(files, stop)
        self.seconds = time.perf_counter() - started
        return copies


class InMemory:
    """The same samples for every step."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """As many as are asked for."""
        inputs, targets = small_gpt.batch()
        rows = [i % (small_gpt.MICROBATCHES * small_gpt.SAMPLES) for i in indices]
        return Batch(inputs=torch.cat(inputs)[rows], targets=torch.cat(targets)[rows])


def timed(call: Any, *arguments: Any, **named: Any) -> float:
    """Seconds of a call after a barrier."""
    barrier()
    started = time.perf_counter()
    call(*arguments, **named)
    return time.perf_counter() - started


def run(ranks: int, rounds: int, hidden: int, folder: str) -> dict[str, list[float]]:
    """On each rank: the times of all rounds but the first."""
    small_gpt.resize(hidden)
    replica = small_gpt.replica(small_gpt.config(layout__dp=ranks))
    background = BackgroundSave(torch.device("cpu"))
    trainer = Trainer(
        LanguageTask(replica, InMemory(), LearningRate.of(replica.job.optimiser, 1000)), TextProgress()
    )
    trainer.checkpointer = cast("Any", SimpleNamespace(background=background, advance=lambda: None))
    background._memory = memory = TimedCopy(torch.device("cpu"))
    arguments: dict[str, Any] = {"folder": Path(folder), "meta": {}, "keep": Retention(last=2)}
    times, draw = Times(), random.Random(0)

    def step() -> bool:
        """Whether the ranks have agreed on it that a save can go on."""
        return trainer.step()[-1].agreed.save_ready

    def no_save(_: int) -> None:
        times.step.append(timed(step))

    def waits(number: int) -> None:
        step()
        times.waited.append(timed(lambda: save(step=number, tensors=tensors_of(replica), **arguments)))

    def goes_on(number: int) -> None:
        step()
        stopped = timed(lambda: background.start(step=number, tensors=tensors_of(replica), **arguments))
        during = list[float]()
        while background.busy:
            started = time.perf_counter()
            ready = step()
            during.append(time.perf_counter() - started)
            if ready:
                stopped += timed(background.advance)
        times.stop.append(stopped)
        times.copy.append(memory.seconds)
        times.during.append(median(during))

    for number in range(rounds + 1):
        for place, act in enumerate(draw.sample([no_save, waits, goes_on], 3)):
            act(10 * number + place)
    slowest = gather_json({name: each[1:] for name, each in vars(times).items()})
    replica.close()
    return {
        name: [max(row) for row in zip(*(rank_times[name] for rank_times in slowest), strict=True)]
        for name in vars(times)
    }


def main() -> None:
    args = arguments(__doc__, rounds=20, ranks=2, hidden=256)
    with tempfile.TemporaryDirectory() as folder:
        times = on_ranks(args.ranks, run, args.ranks, args.rounds, args.hidden, folder)[0]
    step = median(times["step"])
    beyond = [(stop - copy) / step for stop, copy in zip(times["stop"], times["copy"], strict=True)]
    rows = {
        "step without a save": times["step"],
        "save that is waited for": times["waited"],
        "save in the background: stop": times["stop"],
        "of it the copy": times["copy"],
        "step while one is written": times["during"],
    }
    print(f"| {args.ranks} ranks, hidden {args.hidden} | ms, median (quartiles) | of a step |\n|---|---|---|")
    for name, seconds in rows.items():
        low, middle, high = (1000 * second for second in quantiles(seconds, n=4))
        print(f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) | {middle / 1000 / step:.1%} |")
    low, middle, high = quantiles(beyond, n=4)
    print(f"| stop beyond the copy; goal: 5% | | {middle:.1%} ({low:.1%} to {high:.1%}) |\n\n{where()}")


if __name__ == "__main__":
    main()
