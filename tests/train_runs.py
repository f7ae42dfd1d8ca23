"""Runs of a tiny job on real ranks, with hooks that observe or plant a fault."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.engine.checkpoint.read import read_whole
from stretto.run.config import TrainConfig
from stretto.run.data.prepare import prepare_data
from stretto.run.data.token_source import TokenSource
from stretto.run.launch.local import prepare, run_ranks
from stretto.run.train.job import PRELOAD, local_rank
from stretto.run.train.metrics import read_lines

Hook = tuple[Callable[..., None], tuple[Any, ...]]


def train(config: TrainConfig, *hooks: Hook) -> dict[str, Any]:
    """Run the job with the hooks on every rank; the outcome of rank 0."""
    prepare(PRELOAD)
    source = prepare_data(config, quiet=True)
    ranks = config.layout.to_layout().world
    return run_ranks(ranks, hooked, list(hooks), config, source, stoppable=True)[0]


def hooked(hooks: Sequence[Hook], config: TrainConfig, source: TokenSource) -> dict[str, Any]:
    for plant, arguments in hooks:
        plant(*arguments)
    return local_rank(config, True, source)


def at_step(step: int, rank: int | None, act: Callable[..., None], *arguments: Any) -> Hook:
    """Call `act(session, *arguments)` on `rank` (None: all) before the step."""
    return _before_step, (step, rank, act, arguments)


def _before_step(step: int, rank: int | None, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    from stretto.run.train.session import Session

    inner = Session._step

    def wrapped(self: Session, stop: Any) -> bool:
        if self.position.step + 1 == step and rank in (None, self.mesh.rank):
            act(self, *arguments)
        return inner(self, stop)

    Session._step = wrapped


def send_self(_: Any, number: int) -> None:
    os.kill(os.getpid(), number)


def fail(_: Any) -> None:
    raise KeyError("planted")


def spoil_a_weight(session: Any) -> None:
    with torch.no_grad():
        next(iter(session.replica.parameters.values())).fill_(float("nan"))


def linger(_: Any, seconds: float) -> None:
    time.sleep(seconds)


def keep_notes(path: str) -> Hook:
    """Append every line that rank 0 shows to a file."""
    return _keep_notes, (path,)


def _keep_notes(path: str) -> None:
    from stretto.run.train.metrics import Metrics

    inner = Metrics.note

    def note(self: Metrics, text: str) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
        inner(self, text)

    Metrics.note = note


def keep_samples(path: str) -> Hook:
    """Append, by step, the indices of the samples that ranks of the first stage train on."""
    return _keep_samples, (path,)


def _keep_samples(path: str) -> None:
    from stretto.run.train.session import Session

    inner = Session._step

    def wrapped(self: Session, stop: Any) -> bool:
        step, stopped = self.position.step + 1, inner(self, stop)
        if all(self.mesh.index(axis) == 0 for axis in ("tp", "cp", "pp")):
            seen = [i for microbatch in self.replica.samples for i in microbatch]
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps([step, seen]) + "\n")
        return stopped

    Session._step = wrapped


def losses(config: TrainConfig) -> dict[int, float]:
    """The loss of every step; each step must be logged once."""
    rows = [(row["step"], row["loss"]) for row in read_lines(config.run.folder / "metrics.jsonl")]
    assert [step for step, _ in rows] == list(range(1, len(rows) + 1))
    return dict(rows)


def tensors(config: TrainConfig, step: int) -> dict[str, Tensor]:
    """Weights and optimiser states of a checkpoint, whole."""
    return read_whole(config.run.folder / "checkpoints" / f"step-{step:08d}", prefix="")[0]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
