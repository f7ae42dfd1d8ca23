"""Checks of the sections that all kinds of jobs have: rate, checkpoints, guard, folders, sources."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from stretto.errors import Problem, StrettoError, joined, nearest, nearest_file
from stretto.job.optimiser import RateCurve
from stretto.run.config.schema import CheckpointConfig, GuardConfig, JobConfig, ReportConfig, RunConfig
from stretto.run.config.sources import USER_SOURCE, is_url, megatron_prefix, protocol_problem
from stretto.user_file import UserFunction, find_function, is_function_name

# what a run calls, and the names of the arguments
HOOKS = {
    "on_start": ("run",),
    "before_update": ("run",),
    "on_step_end": ("run", "record"),
    "on_evaluation": ("run", "record"),
    "on_checkpoint": ("run", "path"),
    "on_end": ("run",),
}
LONGEST_NAME = 255  # bytes of a file's name in a folder
SPAN_EXPORTERS = "opentelemetry_traces_exporter"
"""The group of entry points under which packages offer exporters of spans."""


def find_hook(reference: str) -> UserFunction:
    """Find a class with hooks, or a function that is one, by FILE.py:NAME, without running the file.

    Raises:
        StrettoError: as `find_function`.
    """
    name = reference.rpartition(":")[2]
    return find_function(reference, "train.hooks=[mine.py:MyHooks]", HOOKS.get(name))


def raise_first(problems: Sequence[Problem]) -> None:
    """Raise StrettoError for the first problem, if there is any, with the others after it."""
    if problems:
        raise joined(problems)


def rate_notes(rate: RateCurve, steps: int) -> list[str]:
    """Return sentences about the learning rate that a reader of the config would not expect.

    Args:
        steps: of the whole run.
    """
    warmup = rate.warmup_steps(steps)
    if isinstance(rate.warmup, int) and warmup < rate.warmup:
        field = "train.steps" if rate.decay_steps is None else "optim.rate.decay_steps"
        before = " before the decay of wsd" if rate.schedule == "wsd" else ""
        return [
            f"the warm-up is cut to {warmup} steps: optim.rate.warmup={rate.warmup} does not fit into "
            f"{field}={rate.end(steps)}{before}"
        ]
    return []


# synonyms of the values of checkpoint.resume that name no folder
_SYNONYMS = {
    "auto": ("latest", "last", "newest", "true", "yes", "on"),
    "never": ("none", "no", "false", "off", "fresh", "scratch"),
}


def run_problems(config: JobConfig, ranks: int | None) -> list[Problem]:
    """Return the problems of the sections that all kinds of jobs have.

    Args:
        ranks: of the job; None if its layout is wrong.
    """
    if long := [*long_names(asdict(cast(Any, config)))]:
        return long
    return [
        *_resume(config.checkpoint.resume),
        *_retention(config.checkpoint, config.eval.every),
        *_run_folder(config.run),
        *_hooks(config.train.hooks),
        *_trackers(config.metrics),
        *_spans(config.metrics),
        *_profile(config.metrics, config.train.steps, ranks),
    ]


def _resume(wanted: str) -> Iterator[Problem]:
    if wanted not in ("never", "auto") and not os.path.isdir(os.path.expanduser(wanted)):
        meant = (value for value, synonyms in _SYNONYMS.items() if wanted.lower() in synonyms)
        similar = next(meant, None) or nearest(wanted, _SYNONYMS)
        fix = f"did you mean {similar}?" if similar else similar_paths(Path(wanted).expanduser())
        fix = fix or "never, auto, or a checkpoint's folder"
        yield Problem("checkpoint.resume", wanted, "there is no such folder", fix)


def _hooks(references: Sequence[str]) -> Iterator[Problem]:
    """Check that the hooks exist, and that a function has the name of one."""
    for reference in references:
        name = reference.rpartition(":")[2]
        try:
            function = find_hook(reference)
        except StrettoError as error:
            yield error.within("train.hooks")
            continue
        if name not in HOOKS and not function.is_class():
            similar = nearest(name, HOOKS)
            rule = f"a function is named {', '.join(HOOKS)}; only a class has any name"
            yield Problem("train.hooks", reference, rule, f"did you mean {similar}?" if similar else None)


def _retention(checkpoint: CheckpointConfig, eval_every: int | None) -> Iterator[Problem]:
    """Check for checkpoints to keep that are kept anyway, or that are never evaluated."""
    for name, value in (("keep_every", checkpoint.keep_every), ("keep_best", checkpoint.keep_best)):
        if value is not None and checkpoint.keep is None:
            yield Problem(
                f"checkpoint.{name}",
                str(value),
                "checkpoint.keep is null, which keeps all",
                "checkpoint.keep=2 keeps the newest two beside them",
            )
    if checkpoint.keep_best is not None and eval_every is None:
        yield Problem(
            "checkpoint.keep_best",
            str(checkpoint.keep_best),
            "eval.every is null, so that no checkpoint has a held-out loss",
            f"eval.every={checkpoint.every}" if checkpoint.every else "eval.every and checkpoint.every",
        )


def _run_folder(run: RunConfig) -> Iterator[Problem]:
    folder = run.folder.expanduser()
    yield from writable("run.dir", run.dir, folder)
    around = next((p for p in folder.absolute().parents if os.path.exists(p)), None)
    if run.private and around is not None:
        mode = around.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            rule = f"everyone may write to {around}, and so put another folder in this one's place"
            yield Problem("run.private", "true", rule, f"chmod o-w {around}, or another run.dir")


def long_names(values: object, field: str = "") -> Iterator[Problem]:
    """Check that texts of a config, which may name files, have no part that is longer than a file's name."""
    if isinstance(values, dict):
        for key, value in cast("dict[str, Any]", values).items():
            if key != "sample":  # whose prompt is no name
                yield from long_names(value, f"{field}.{key}" if field else str(key))
    elif isinstance(values, list | tuple):
        for value in cast("Sequence[Any]", values):
            yield from long_names(value, field)
    elif isinstance(values, str) and (
        "\0" in values or any(len(part.encode()) > LONGEST_NAME for part in values.split("/"))
    ):
        rule = f"names have at most {LONGEST_NAME} bytes, and no NUL"
        yield Problem(field, repr(values[:40]), rule, "another name")


def writable(field: str, value: str, folder: Path) -> Iterator[Problem]:
    """Check that a folder can be created and written to."""
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        yield Problem(field, value, f"{existing} is a file", "name another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Problem(field, value, f"{existing} cannot be written to", "name another folder")


def missing_sources(sources: Sequence[str], builtin: Sequence[str]) -> Iterator[Problem]:
    """Check that the sources of `data.source` exist; `builtin` are those that every machine has."""
    if not sources:
        yield Problem("data.source", "[]", "it must name something", f"{builtin[0]} is on every machine")
    for name in sources:
        if is_url(name):  # whether it is there is known once it is opened
            if problem := protocol_problem(name.partition("://")[0]):
                yield Problem("data.source", name, problem[0], problem[1])
            continue
        if is_function_name(name):
            try:
                find_function(name, USER_SOURCE)
            except StrettoError as error:
                yield error.within("data.source")
            continue
        path = Path(name).expanduser()
        if name in builtin or path.exists() or megatron_prefix(name) is not None:
            continue
        if not glob.has_magic(name):
            similar = nearest(name, builtin)
            fix = f"did you mean {similar}?" if similar else similar_paths(path)
            fix = fix or f"nothing in {path.parent} has such a name; {builtin[0]} is on every machine"
            yield Problem("data.source", name, "there is no such file or folder", fix)
        elif not any(True for _ in glob.iglob(str(path), recursive=True)):
            yield Problem("data.source", name, "the pattern matches no file", "check the folder before it")


def _trackers(metrics: ReportConfig) -> Iterator[Problem]:
    """Check that the clients of the trackers are installed."""
    for name in metrics.trackers:
        if find_spec(name) is None:
            field, value, without = (
                ("to", name, f"metrics.to without {name}")
                if name in metrics.to
                else ("tensorboard_dir", metrics.tensorboard_dir, "metrics.tensorboard_dir=null")
            )
            fix = f"pip install 'stretto[{name}]', or {without}"
            yield Problem(f"metrics.{field}", value, f"{name} is not installed", fix)
    if (board := metrics.tensorboard_dir) is not None:
        yield from writable("metrics.tensorboard_dir", board, Path(board).expanduser())


def span_exporters() -> list[str]:
    """Return the exporters of spans that OpenTelemetry's environment variables choose, by their names in
    `SPAN_EXPORTERS`.
    """
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in variables if os.environ.get(name)), "http/protobuf")
    otlp = "otlp_proto_" + protocol.partition("/")[0]
    names = (name.strip() for name in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","))
    return [otlp if name == "otlp" else name for name in names if name != "none"]


def _spans(metrics: ReportConfig) -> Iterator[Problem]:
    """Check that the exporters of spans are installed."""
    for name in span_exporters() if metrics.spans else ():
        if not entry_points(group=SPAN_EXPORTERS, name=name):
            grpc = name == "otlp_proto_grpc"
            package = "opentelemetry-exporter-otlp-proto-grpc" if grpc else "'stretto[opentelemetry]'"
            fix = f"pip install {package}, or metrics.spans=false"
            yield Problem("metrics.spans", True, f"OpenTelemetry's exporter {name} is not installed", fix)


def _profile(metrics: ReportConfig, steps: int, ranks: int | None) -> Iterator[Problem]:
    """Check that the steps to profile are in the run, and that the ranks to record memory on exist."""
    profile, name = metrics.profile, "metrics.profile"
    if profile is not None:
        first, last = (profile[0], profile[-1]) if len(profile) in (1, 2) else (0, 0)
        if not 1 <= first <= last:
            yield Problem(
                name, profile, "it is a step from 1 on, or the first and the last", f"{name}=[10,13]"
            )
        elif last > steps:
            nearest_steps = f"{name}=[{max(1, first - last + steps)},{steps}]"
            yield Problem(name, profile, f"the run ends after step {steps} (train.steps)", nearest_steps)
    if (chosen := metrics.profile_memory) and profile is None:
        yield Problem("metrics.profile_memory", chosen, "no steps are profiled", f"{name}=[10,13]")
    elif wrong := [rank for rank in chosen if not 0 <= rank < (ranks or rank + 1)]:
        rule = f"there is no rank {wrong[0]}" + (f"; the job has ranks 0 to {ranks - 1}" if ranks else "")
        yield Problem("metrics.profile_memory", chosen, rule, "metrics.profile_memory=[0]")


def similar_paths(path: Path, usable: Callable[[Path], bool] = lambda _: True) -> str | None:
    """Return a hint to the `usable` entry of the same folder most like a missing path; hidden entries do not
    count.
    """
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path.parent, os.R_OK):
        return None
    entries = [e for e in path.parent.iterdir() if path.name.startswith(".") or not e.name.startswith(".")]
    similar = nearest_file(path.name, (entry.name for entry in entries if usable(entry)))
    return f"did you mean {path.parent / similar}?" if similar else None


def guard_problems(guard: GuardConfig, save_every: int | None, asynchronous: bool) -> Iterator[Problem]:
    """Check that the rest of the job allows the rules for bad steps.

    Args:
        save_every: `checkpoint.every`.
        asynchronous: the schedule updates weights within the step.
    """
    for name in ("on_nonfinite", "on_spike", "on_mismatch"):
        action = getattr(guard, name)
        if action == "rollback" and save_every is None:
            yield Problem(
                f"guard.{name}",
                action,
                "there are no checkpoints to go back to, for checkpoint.every is null",
                "checkpoint.every=100",
            )
        if not asynchronous or name == "on_mismatch":
            continue
        if action == "rollback" or (name == "on_spike" and action == "skip"):
            fix = f"guard.{name}={'stop' if name == 'on_spike' else 'skip'}, or schedule.name=1f1b"
            yield Problem(
                f"guard.{name}",
                action,
                "this schedule updates the weights before all ranks know of the step, and has begun others",
                fix,
            )
    if asynchronous and guard.check_memory is not None:
        rule = "this schedule updates the weights within the step"
        fix = "guard.check_memory=null, or schedule.name=1f1b"
        yield Problem("guard.check_memory", guard.check_memory, rule, fix)
    if guard.on_mismatch == "rollback" and guard.check_replicas is None and guard.check_memory is None:
        rule = "nothing is compared without check_replicas or check_memory"
        yield Problem("guard.on_mismatch", "rollback", rule, "guard.check_replicas=100")
