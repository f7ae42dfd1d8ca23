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
from stretto.engine.parallel.control import this_rank
from stretto.run.config import TrainConfig
from stretto.run.data.token_source import TokenSource
from stretto.run.launch.local import prepare, run_ranks
from stretto.run.launch.stop import StopRequest
from stretto.run.train.language_job import train_language_rank
from stretto.run.train.launch import PRELOAD
from stretto.run.train.metrics import read_lines
from texts import open_tokens

Hook = tuple[Callable[..., None], tuple[Any, ...]]


def train(config: TrainConfig, *hooks: Hook) -> dict[str, Any]:
    """Run the job with the hooks on every rank; the outcome of rank 0."""
    prepare(PRELOAD)
    source = open_tokens(config)
    ranks = config.layout.to_layout().world
    return run_ranks(ranks, hooked, list(hooks), config, source, stoppable=True)[0]


def hooked(hooks: Sequence[Hook], config: TrainConfig, source: TokenSource) -> dict[str, Any]:
    for plant, arguments in hooks:
        plant(*arguments)
    with StopRequest() as stop:
        return train_language_rank(config, source, stop, True)


def with_hooks(run_ranks: Callable[..., list[Any]], hooks: Sequence[Hook]) -> Callable[..., list[Any]]:
    """What the launcher calls instead of `run_ranks`, so that ranks of language models have hooks."""

    def planted(ranks: int, function: Any, *arguments: Any, **options: Any) -> list[Any]:
        *watched, _, run_rank, config, data, _, _ = (function, *arguments)
        assert run_rank is train_language_rank
        return run_ranks(ranks, *watched, hooked, list(hooks), config, data, **options)

    return planted


def around_step(wrapper: Callable[[Any, Any, Any], Any]) -> None:
    """Replace the step of all trainers in this process by `wrapper(step, trainer, stop)`."""
    from stretto.run.train.async_step import AsyncTrainer
    from stretto.run.train.trainer import Trainer

    for kind in (Trainer, AsyncTrainer):
        inner = kind.step
        kind.step = lambda self, stop=None, inner=inner: wrapper(inner, self, stop)


def at_step(step: int, rank: int | None, act: Callable[..., None], *arguments: Any) -> Hook:
    """Call `act(trainer, *arguments)` on `rank` (None: all) before the step."""
    return _before_step, (step, rank, act, arguments)


def _before_step(step: int, rank: int | None, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        if self.progress.step + 1 == step and rank in (None, this_rank()):
            act(self, *arguments)
        return inner(self, stop)

    around_step(wrapped)


def send_self(_: Any, number: int) -> None:
    os.kill(os.getpid(), number)


def fail(_: Any) -> None:
    raise KeyError("planted")


def spoil_a_weight(trainer: Any) -> None:
    with torch.no_grad():
        next(iter(trainer.task.model.parameters.values())).fill_(float("nan"))


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
    def wrapped(inner: Any, self: Any, stop: Any) -> Any:
        step, stopped = self.progress.step + 1, inner(self, stop)
        if all(self.task.mesh.index(axis) == 0 for axis in ("tp", "cp", "pp")):
            seen = [i for microbatch in self.task.model.samples for i in microbatch]
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps([step, seen]) + "\n")
        return stopped

    around_step(wrapped)


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
