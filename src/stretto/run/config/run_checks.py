"""What can be known to go wrong with any run, whatever it trains: its rate, its folders, what it writes."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from stretto.errors import Problem, joined, nearest, nearest_file
from stretto.run.config.schema import JobConfig
from stretto.run.config.sources import is_url, megatron_prefix, protocol_problem


def raise_first(problems: Sequence[Problem]) -> None:
    """Raise StrettoError for the first problem, if there is any, with the others after it."""
    if problems:
        raise joined(problems)


def rate_notes(config: JobConfig) -> list[str]:
    """What a reader of the config would not expect of the learning rate, in sentences."""
    rate, steps = config.optim.rate, config.train.steps
    warmup = rate.warmup_steps(steps)
    if isinstance(rate.warmup, int) and warmup < rate.warmup:
        whole = "train.steps" if rate.decay_steps is None else "optim.rate.decay_steps"
        before = " before the decay of wsd" if rate.schedule == "wsd" else ""
        return [
            f"the warm-up is cut to {warmup} steps: optim.rate.warmup={rate.warmup} does not fit into "
            f"{whole}={rate.end(steps)}{before}"
        ]
    return []


# other words for the values of checkpoint.resume that name no folder
_OTHER_WORDS = {
    "auto": ("latest", "last", "newest", "true", "yes", "on"),
    "never": ("none", "no", "false", "off", "fresh", "scratch"),
}


def resume(config: JobConfig) -> Iterator[Problem]:
    """A folder to go on from that is not there."""
    wanted = config.checkpoint.resume
    if wanted not in ("never", "auto") and not os.path.isdir(os.path.expanduser(wanted)):
        meant = (value for value, words in _OTHER_WORDS.items() if wanted.lower() in words)
        near = next(meant, None) or nearest(wanted, _OTHER_WORDS)
        fix = f"did you mean {near}?" if near else "never, auto, or a checkpoint's folder"
        yield Problem("checkpoint.resume", wanted, "there is no such folder", fix)


def retention(config: JobConfig) -> Iterator[Problem]:
    """Checkpoints to keep that are kept anyway, or that are never evaluated."""
    kept = config.checkpoint
    for name, value in (("keep_every", kept.keep_every), ("keep_best", kept.keep_best)):
        if value is not None and kept.keep is None:
            yield Problem(
                f"checkpoint.{name}",
                str(value),
                "checkpoint.keep is null, which keeps all",
                "checkpoint.keep=2 keeps the newest two beside them",
            )
    if kept.keep_best is not None and config.eval.every is None:
        yield Problem(
            "checkpoint.keep_best",
            str(kept.keep_best),
            "eval.every is null, so that no checkpoint has a held-out loss",
            f"eval.every={kept.every}" if kept.every else "eval.every and checkpoint.every",
        )


def run_folder(config: JobConfig) -> Iterator[Problem]:
    """A run folder that cannot be."""
    folder = config.run.folder.expanduser()
    yield from writable("run.dir", config.run.dir, folder)
    around = next((p for p in folder.absolute().parents if p.exists()), None)
    if config.run.private and around is not None:
        mode = around.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            rule = f"everyone may write to {around}, and so put another folder in this one's place"
            yield Problem("run.private", "true", rule, f"chmod o-w {around}, or another run.dir")


def writable(field: str, value: str, folder: Path) -> Iterator[Problem]:
    """A folder that cannot be created or written to."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        yield Problem(field, value, f"{existing} is a file", "name another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(field, value, f"{existing} cannot be written to", "name another folder")


def missing_sources(sources: Sequence[str], builtin: Sequence[str]) -> Iterator[Problem]:
    """Sources of `data.source` that do not exist; `builtin` are those that every machine has."""
    if not sources:
        yield Problem("data.source", "[]", "it must name something", f"{builtin[0]} is on every machine")
    for name in sources:
        if is_url(name):  # whether it is there is known once it is opened
            if problem := protocol_problem(name.partition("://")[0]):
                yield Problem("data.source", name, problem[0], problem[1])
            continue
        path = Path(name).expanduser()
        if name in builtin or path.exists() or megatron_prefix(name) is not None:
            continue
        if not glob.has_magic(name):
            near = nearest(name, builtin)
            fix = f"did you mean {near}?" if near else beside(path)
            fix = fix or f"nothing in {path.parent} has such a name; {builtin[0]} is on every machine"
            yield Problem("data.source", name, "there is no such file or folder", fix)
        elif not any(True for _ in glob.iglob(str(path), recursive=True)):
            yield Problem("data.source", name, "the pattern matches no file", "check the folder before it")


def tensorboard(config: JobConfig) -> Iterator[Problem]:
    """TensorBoard asked for and not installed."""
    metrics = config.metrics
    if metrics.board(config.run.folder) is None:
        return
    name, value, none = (
        ("tensorboard", "true", "false")
        if metrics.tensorboard_dir is None
        else ("tensorboard_dir", metrics.tensorboard_dir, "null")
    )
    if find_spec("tensorboard") is None:
        fix = f"pip install 'stretto[tensorboard]', or metrics.{name}={none}"
        yield Problem(f"metrics.{name}", value, "tensorboard is not installed", fix)
    if metrics.tensorboard_dir is not None:
        yield from writable("metrics.tensorboard_dir", value, Path(value).expanduser())


def beside(path: Path, usable: Callable[[Path], bool] = lambda _: True) -> str | None:
    """A hint to the `usable` entry most like a missing path beside it; hidden entries do not count."""
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path.parent, os.R_OK):
        return None
    entries = [e for e in path.parent.iterdir() if path.name.startswith(".") or not e.name.startswith(".")]
    near = nearest_file(path.name, (entry.name for entry in entries if usable(entry)))
    return f"did you mean {path.parent / near}?" if near else None
