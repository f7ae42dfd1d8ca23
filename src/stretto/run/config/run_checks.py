"""What can be known to go wrong with any run, whatever it trains: its rate, its folders, what it writes."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from stretto.errors import Problem, StrettoError, nearest
from stretto.run.config.schema import JobConfig


def raise_first(problems: Sequence[Problem]) -> None:
    """Raise StrettoError for the first problem, if there is any, and tell how many more there are."""
    if problems:
        first, others = problems[0], len(problems) - 1
        more = f"{others} more problem{'s' * (others > 1)} after this one" if others else None
        raise StrettoError(first.message, hint="; ".join(filter(None, (first.fix, more))) or None)


def rate(config: JobConfig) -> Iterator[Problem]:
    """A warm-up and a decay that do not fit in the steps."""
    rate, steps = config.optim.rate, config.train.steps
    decay = round(rate.decay_fraction * steps) if rate.schedule == "wsd" else 0
    if "train.steps" not in config.required and rate.warmup + decay > steps:
        after = f" less the {decay} of the decay" if decay else ""
        yield Problem(
            "optim.rate.warmup",
            rate.warmup,
            f"it must fit in train.steps={steps}{after}",
            f"at most optim.rate.warmup={max(0, steps - decay)}"
            + ("" if decay else f", or at least train.steps={rate.warmup}"),
        )


def resume(config: JobConfig) -> Iterator[Problem]:
    """A folder to go on from that is not there."""
    wanted = config.checkpoint.resume
    if wanted not in ("never", "auto") and not Path(wanted).expanduser().is_dir():
        near = nearest(wanted, ("never", "auto"))
        fix = f"did you mean {near}?" if near else "never, auto, or a checkpoint's folder"
        yield Problem("checkpoint.resume", wanted, "there is no such folder", fix)


def run_folder(config: JobConfig) -> Iterator[Problem]:
    """A run folder that cannot be."""
    yield from writable("run.dir", config.run.dir, config.run.folder.expanduser())


def writable(field: str, value: str, folder: Path) -> Iterator[Problem]:
    """A folder that cannot be created or written to."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        yield Problem(field, value, f"{existing} is a file", "name another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(field, value, f"{existing} cannot be written to", "name another folder")


def missing_sources(sources: Sequence[str], builtin: str) -> Iterator[Problem]:
    """Sources of `data.source` that do not exist; `builtin` is a source that every machine has."""
    if not sources:
        yield Problem("data.source", "[]", "it must name something", f"{builtin} is on every machine")
    for name in sources:
        path = Path(name).expanduser()
        if name == builtin or path.exists():
            continue
        if not glob.has_magic(name):
            yield Problem("data.source", name, "there is no such file or folder", beside(path))
        elif not any(True for _ in glob.iglob(str(path), recursive=True)):
            yield Problem("data.source", name, "the pattern matches no file", "check the folder before it")


def tensorboard(config: JobConfig) -> Iterator[Problem]:
    """TensorBoard asked for and not installed."""
    if config.metrics.tensorboard and find_spec("tensorboard") is None:
        yield Problem(
            "metrics.tensorboard",
            "true",
            "tensorboard is not installed",
            "pip install 'stretto[tensorboard]', or metrics.tensorboard=false",
        )


def beside(path: Path, usable: Callable[[Path], bool] = lambda _: True) -> str | None:
    """A hint to the `usable` entry most like a missing path beside it; hidden entries do not count."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    entries = [e for e in path.parent.iterdir() if path.name.startswith(".") or not e.name.startswith(".")]
    near = nearest(path.name, (entry.name for entry in entries if usable(entry)))
    return f"did you mean {path.parent / near}?" if near else None
