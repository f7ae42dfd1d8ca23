"""What reading samples costs: mixtures beside one source, and a training step that reads a token folder
beside one on random tokens that are in memory.

Samples: 20 batches of 32 samples of 4,096 tokens from token folders that the script writes, the one source
as large as those of the mixture together. Steps: training's own step of the small GPT of the step benchmarks
in one process, forward to update, samples taken as the run takes them, with and without a thread that reads
ahead. The ratio of such steps is known no better than their times, which vary by some percent; how long a
step waits for its samples is measured by itself. Tokens at a URL: samples a second of one epoch in order of
windows, of a folder on the disk and of the same at file://, with an empty cache of blocks and with a full
one.

    python benchmarks/samples.py [--rounds 60] [--tokens 50000000]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import small_gpt
import torch
from harness import Step, arguments, race, report

from stretto.engine.optim.rate import LearningRate
from stretto.run.config.job import job_of
from stretto.run.config.load import parse
from stretto.run.data.dataset import Batch, WindowSamples
from stretto.run.data.mixture import Mixture, TrainingSamples, training_samples
from stretto.run.data.open import open_source
from stretto.run.data.prefetch import Prefetcher
from stretto.run.data.token_folder import TokenFolder, TokenWriter
from stretto.run.data.tokenizer import Tokenizer
from stretto.run.train.batches import SampleSource
from stretto.run.train.language_task import LanguageTask, TextProgress
from stretto.run.train.trainer import Trainer

BATCHES, BATCH, SEQUENCE = 20, 32, 4096


def folder(path: Path, tokens: int, seed: int) -> TokenFolder:
    """Random tokens in documents of 1,000."""
    draw = np.random.default_rng(seed)
    tokenizer = Tokenizer.train(["some text to train on"], 300)
    with TokenWriter(path, tokenizer) as writer:
        for _ in range(tokens // 1000):
            writer.add(draw.integers(tokenizer.vocab_size - 1, size=999), ends=True)
        writer.commit()
    return TokenFolder(path)


def reader(samples: TrainingSamples) -> Step:
    """Take the next batches."""
    calls = count()

    def step() -> None:
        first = next(calls) * BATCHES * BATCH
        for at in range(first, first + BATCHES * BATCH, BATCH):
            samples.batch(range(at, at + BATCH))

    return step


class TimedTrainer:
    """Trains on the next global batch, and counts the seconds of its steps and those spent on samples."""

    def __init__(self, samples: SampleSource) -> None:
        replica = small_gpt.replica(small_gpt.config())
        task = LanguageTask(replica, self, LearningRate.of(replica.job.optimiser, 1000))
        self._trainer, self._samples = Trainer(task, TextProgress()), samples
        self.seconds = self.waited = 0.0

    def __call__(self) -> None:
        started = time.perf_counter()
        self._trainer.step()
        self.seconds += time.perf_counter() - started

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples, and how long they took."""
        started = time.perf_counter()
        batch = self._samples.batch(indices)
        self.waited += time.perf_counter() - started
        return batch


class InMemory:
    """The first samples of another source again and again, read once."""

    def __init__(self, samples: WindowSamples, number: int) -> None:
        self._samples, self._number = samples, number
        self._batches = dict[tuple[int, ...], Batch]()

    def batch(self, indices: Sequence[int]) -> Batch:
        key = tuple(i % self._number for i in indices)
        if key not in self._batches:
            self._batches[key] = self._samples.batch(key)
        return self._batches[key]


def epoch(url: str, cache: Path) -> float:
    """Samples a second of all batches of an epoch."""
    config = parse(
        "model: {family: gpt, layers: 1, hidden: 64, heads: 1}\n"
        f"data: {{source: {url}, sequence: {SEQUENCE}, shuffle: window, shuffle_window: {1 << 23}, "
        f"cache: {cache}}}"
    )
    samples = training_samples(open_source(config.data), config.data, job_of(config), config.train.seed)
    assert isinstance(samples, WindowSamples)
    started, batches = time.perf_counter(), len(samples) // BATCH
    for number in range(batches):
        samples.batch(range(number * BATCH, (number + 1) * BATCH))
    return batches * BATCH / (time.perf_counter() - started)


def at_url(folder: Path) -> None:
    """A folder on the disk, and the same at a URL with an empty cache and with a full one."""
    speeds: dict[str, list[float]] = {"on the disk": [], "at file://, empty cache": [], "full cache": []}
    for _ in range(7):
        with tempfile.TemporaryDirectory() as cache:
            for speed, url in zip(speeds.values(), (f"{folder}", *[f"file://{folder}"] * 2), strict=True):
                speed.append(epoch(url, Path(cache)))
    print("\n| tokens | samples/s, median (quartiles) |\n|---|---|")
    for name, each in speeds.items():
        low, middle, high = np.quantile(each, (0.25, 0.5, 0.75))
        print(f"| {name} | {middle:,.0f} ({low:,.0f} to {high:,.0f}) |")


def main() -> None:
    args = arguments(__doc__, rounds=60, tokens=50_000_000)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        sources = {part: folder(Path(name, part), args.tokens // 3, seed) for seed, part in enumerate("abc")}
        at_url(Path(name, "a"))
        config = parse(
            f"model: {{family: gpt, layers: 1, hidden: 64, heads: 1}}\ndata: {{sequence: {SEQUENCE}}}\n"
            f"batch: {{global_size: {BATCH}}}"
        )
        job, seed = job_of(config), config.train.seed
        single = folder(Path(name, "whole"), args.tokens, len(sources))
        mixture = Mixture(sources, {"a": 0.7, "b": 0.2, "c": 0.1})
        contestants = {
            "one source": reader(training_samples(single, config.data, job, seed)),
            "mixture of three": reader(training_samples(mixture, config.data, job, seed)),
        }
        title = f"{BATCHES} batches of {BATCH} samples of {SEQUENCE} tokens"
        timings = race(contestants, "one source", rounds=args.rounds, warmup=5)
        report(title, timings, "one source", args.out)

        size, length = small_gpt.MICROBATCHES * small_gpt.SAMPLES, small_gpt.SEQUENCE
        windows: Callable[[], WindowSamples] = lambda: WindowSamples(sources["a"], "train", length)  # noqa: E731
        steps = {
            "random tokens in memory": TimedTrainer(InMemory(windows(), 2 * size)),
            "read ahead": TimedTrainer(Prefetcher(windows(), size)),
            "read in the step": TimedTrainer(windows()),
        }
        timings = race(steps, "random tokens in memory", rounds=args.rounds)
        report("training steps of the small GPT", timings, "random tokens in memory", args.out)
        print("\n| steps | of a step spent on its samples |\n|---|---|")
        for name, trainer in steps.items():
            print(f"| {name} | {trainer.waited / trainer.seconds:.3%} |")


if __name__ == "__main__":
    main()
