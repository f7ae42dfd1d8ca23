"""Tokenise a job's text before its ranks start."""

from __future__ import annotations

import sys
import time

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from stretto.errors import Problem
from stretto.job.job import Job
from stretto.run.config.data import DataConfig
from stretto.run.config.denoising import Corruption
from stretto.run.config.sources import vocabulary_is_known
from stretto.run.data.open import open_source
from stretto.run.data.part_names import mixed_text
from stretto.run.data.token_source import TokenData
from stretto.run.data.tokenizer import Tokenizer
from stretto.run.launch.stop import StopRequest


def prepare_data(
    data: DataConfig, vocab: int | None = None, *, stop: StopRequest | None = None, quiet: bool = False
) -> TokenData:
    """Open the tokens of the data, tokenising text first if needed.

    Args:
        vocab: `model.vocab`, which a tokenizer that is trained may fill.
        stop: checked while it tokenises.
        quiet: show no progress.

    Raises:
        StrettoError: the text, the tokenizer or the tokens are unusable.
        Stopped: the job was asked to stop.
    """
    remedy = "leave out data.split"
    if data.split and data.weights is None and not quiet and (warning := mixed_text(data.sources, remedy)):
        print(warning, file=sys.stderr, flush=True)
    with BuildBar(quiet, stop) as bar:
        return open_source(
            data,
            vocab,
            lambda at: bar.show(at.stage, at.characters, at.total, f"{at.total / 1e6:.1f} M characters"),
        )


LEAST_USED = 0.9
"""Part of the embedding's rows that the tokenizer must use. Published models pad by up to 2% (Phi-1: 51,200
rows for 50,295 entries)."""


def check_vocabulary(
    data: DataConfig, rows: int | None, corruption: Corruption | None, source: TokenData | None = None
) -> None:
    """Check that the model's vocabulary, if the config gives one, is the tokenizer's, or hardly larger.

    A tokenizer that the run trains is judged before that, by the entries it may have: a short text yields
    fewer. Any other is judged once its tokens exist.

    Args:
        rows: `model.vocab`.
        source: the tokens, or None if they have not been prepared yet.

    Raises:
        Problem: the tokenizer has more entries than the embedding has rows, or far fewer; it is not the one
            that made the tokens.
    """
    if (
        source is not None
        and source.fingerprint is not None
        and data.tokenizer is not None
        and vocabulary_is_known(data)
        and Tokenizer.load(data.tokenizer).fingerprint != source.fingerprint
    ):
        rule = f"the tokens of {source.name} are of another tokenizer"
        fix = "leave it out, or build the tokens again with --tokenizer"
        raise Problem("data.tokenizer", ", ".join(data.tokenizer_files), rule, fix)
    ready = data.tokenizer is not None or vocabulary_is_known(data)
    if rows is None or ready != (source is not None):
        return
    entries = data.vocab if source is None else source.vocab
    follow = "model.vocab=null, which takes the tokenizer's (a model from a file: another argument)"
    if entries > rows:
        rule = f"the data's tokenizer has {entries} entries, and each needs a row of the embedding"
        raise Problem("model.vocab", rows, rule, f"model.vocab={entries}, or {follow}")
    marks = 0 if corruption is None else data.marks(corruption)
    if entries + marks < LEAST_USED * rows:
        rule = f"the data's tokenizer has {entries} entries, so {rows - entries} rows of the embedding and "
        fix = f"data.tokenizer=FILE names another tokenizer.json, or {follow}"
        fix = fix if ready else f"data.vocab={rows}, {fix}"
        raise Problem("model.vocab", rows, f"{rule}the head would never be used", fix)


def check_samples(source: TokenData, data: DataConfig, job: Job, *, evaluates: bool) -> None:
    """Raise StrettoError if there is not one sample to train on, or none to evaluate on."""
    describe_samples(source, data, job, seed=0, steps=1, evaluates=evaluates)


def describe_samples(
    source: TokenData, data: DataConfig, job: Job, seed: int, *, steps: int, evaluates: bool
) -> list[str]:
    """Return a line for each source of a mixture; one for each split that the run reads if samples are single
    documents: their number, and how many are cut off or left out; and one on the spans that are cut out for
    an encoder-decoder.

    Args:
        seed: of the training samples' order.
        evaluates: the run reads the held-out split.

    Raises:
        StrettoError: a split has not one sample.
    """
    from stretto.run.data.dataset import DocumentSamples
    from stretto.run.data.mixture import epochs, held_out, parts_of, training_samples

    train = training_samples(source, data, job, seed)
    parts, lines = parts_of(train), list[str]()
    if len(parts) > 1:
        passes = epochs(train, steps * job.global_batch)
        drawn = {name: round(passes[name] * len(part)) for name, part in parts.items()}
        total = max(1, sum(drawn.values()))
        lines = [
            f"mixture: {name} {drawn[name] / total:.1%} of the samples, {drawn[name]:,} of {len(part):,} "
            f"({passes[name]:.2f} epochs)"
            for name, part in parts.items()
        ]
    samples = [*parts.values()]
    samples += [part.split for part in held_out(source, data, job, "valid")] if evaluates else []
    lengths = data.denoising(job.shape.encoder_layers > 0)
    lines += [] if lengths is None else [lengths.describe()]
    return lines + [part.describe() for part in samples if isinstance(part, DocumentSamples)]


class BuildBar:
    """Progress of preparing data on stderr: a bar in a terminal, a line per stage elsewhere."""

    def __init__(self, quiet: bool, stop: StopRequest | None) -> None:
        self._quiet = quiet
        self._stop = stop
        self._stage = ""
        self._task: TaskID | None = None
        self._bar: Progress | None = None
        self._started = time.perf_counter()

    def __enter__(self) -> BuildBar:
        if not self._quiet and sys.stderr.isatty():
            from rich.console import Console

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._stage and not self._quiet:
            print(f"data ready in {time.perf_counter() - self._started:.1f} s", file=sys.stderr, flush=True)

    def show(self, stage: str, done: float, total: float, size: str) -> None:
        """Show that `done` of `total` is done; `size` is the total as text.

        Raises:
            Stopped: the job was asked to stop.
        """
        if self._stop is not None:
            self._stop.check()
        if self._quiet:
            self._stage = stage
            return
        if self._bar is None:
            if stage != self._stage:
                print(f"data: {stage} ({size})", file=sys.stderr, flush=True)
        else:
            if self._task is None or stage != self._stage:
                self._task = self._bar.add_task(stage, total=total)
            self._bar.update(self._task, completed=done)
        self._stage = stage
