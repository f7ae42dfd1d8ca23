"""Metrics of a run: the records of a step and of an evaluation, and where they are written.

They go to the terminal, `metrics.jsonl`, `eval.jsonl` and the trackers. Only one rank of a job writes them;
the numbers are those of the whole job.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import exp, isfinite, isnan, log
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, cast

from stretto.run.launch.lease import LOST, identity, lost_folder
from stretto.run.train.trackers import Trackers, numbers_of
from stretto.versions import METRICS

if TYPE_CHECKING:
    from rich.console import Console


STEPS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"
LOGGED = "logged.jsonl"  # by hooks
EVENTS = "guard.jsonl"
_RECENT = 10_000  # lines that stay in memory, if the file itself cannot be read any more
_TAIL = 1 << 16  # bytes that hold the last record


class AnyStep(Protocol):
    """A training step of any kind of model."""

    @property
    def step(self) -> int: ...

    @property
    def loss(self) -> float: ...

    @property
    def speed(self) -> float:
        """Tokens or samples per second."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Return numbers by name, None for unknown ones."""
        ...


class AnyEval(Protocol):
    """An evaluation of any kind of model."""

    @property
    def step(self) -> int: ...

    def as_dict(self) -> dict[str, Any]:
        """Return numbers by name, None for unknown ones."""
        ...


@dataclass(frozen=True)
class LogFormat:
    """How records are printed in a terminal.

    Attributes:
        step, evaluation: return the line of a record; they get the number of steps of the run.
        unit: unit of the speed.
    """

    step: Callable[[Any, int], str]
    evaluation: Callable[[Any, int], str]
    unit: str


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One training step of all ranks; None stands for what is unknown on this machine."""

    step: int  # updates made, this one included: the first step is 1
    loss: float  # mean over the tokens of the global batch that the loss counts, nats
    grad_norm: float | None  # over all parameters, before clipping; None if a step has several updates
    lr: float
    tokens: int  # processed since the first step of the run, over all ranks: cumulative
    tokens_per_s: float  # of the whole job in this step
    step_time_s: float
    epoch: float | None = None  # samples over the training split's: above 1, text is seen again
    epochs: dict[str, float] | None = None  # of each source of a mixture; `epoch` is the largest
    mfu: float | None = None  # model FLOP/s over the peak of all devices, 0 to 1
    memory_gib: float | None = None  # peak of the fullest rank
    bubble: float | None = None  # predicted, as in the line before the first step, 0 to 1
    loss_scale: float | None = None  # with float16, after this step
    skipped: int | None = None  # with float16, steps of the run without an update, for an overflow
    expert_loss: float | None = None  # balance and z-loss of experts, mean over tokens; not in `loss`
    expert_dropped: float | None = None  # part of the choices beyond an expert's capacity, 0 to 1
    expert_busiest: float | None = None  # load of the busiest expert over the average of its layer
    bad: str | None = None  # why the update was not applied, or None if it was
    slow: dict[str, float] | None = None  # ranks that are slow, and how many times longer they take
    targets: int | None = None  # those of `tokens` that the loss counted; None if nothing is masked

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens_per_s

    def as_dict(self) -> dict[str, Any]:
        """Return the record as written to the file."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """One evaluation, after `step` updates.

    Attributes:
        split: part of the text: valid in training.
        text_bytes: size of the tokens' text in UTF-8, or None if unknown.
        sources: loss on each source of a mixture; `loss` is their mean by the mixture's weights.
        data: the text, if it is not the run's own.
    """

    step: int
    loss: float  # mean over its tokens, nats
    tokens: int  # with a target, evaluated this time, unlike the cumulative `tokens` of a step
    seconds: float
    split: str = "valid"
    text_bytes: int | None = None
    data: str | None = None
    sources: dict[str, float] | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity if that is too large for a float."""
        return exp(self.loss) if self.loss < 700 or isnan(self.loss) else float("inf")

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text if it is coded by the model's probabilities, which compares models of
        different tokenizers, or None if the text is unknown.
        """
        if not self.text_bytes:
            return None
        return self.loss * self.tokens / (log(2) * self.text_bytes)

    def as_dict(self) -> dict[str, Any]:
        """Return the record with its perplexity and bits per byte, as written to the file."""
        means = {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {"step": self.step, "split": self.split, "loss": self.loss} | means | asdict(self)


def json_line(record: Mapping[str, Any]) -> str:
    """Return one line of JSON, in which NaN and infinity are the texts "NaN" and "Infinity", which float()
    reads back: JSON has neither.
    """
    return json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in cast("dict[str, Any]", value).items()}
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class RecordFile:
    """Appends JSON lines to `path`, which others may remove or replace while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: io.BufferedRandom | None = None
        self._recent = deque[bytes](maxlen=_RECENT)
        self._has_older = False  # lines that are in the file only

    def open(self) -> None:
        """Open the file, which a first `write` does too."""
        self._file = self.path.open("ab+")
        self._has_older = self._has_older or (not self._recent and self._file.tell() > 0)

    def write(self, record: Mapping[str, Any]) -> bool:
        """Append one line and flush it, so that a reader of the file sees it at once.

        Returns:
            True if the line is in the file at this path; if not, `copy_to` has it.
        """
        line = json_line({"version": METRICS.version, **record}).encode() + b"\n"
        self._has_older = self._has_older or len(self._recent) == _RECENT
        self._recent.append(line)
        try:
            if self._file is None:
                self.open()
            assert self._file is not None
            self._file.write(line)
            self._file.flush()
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError as error:
            if error.errno in LOST:
                return False
            raise

    def copy_to(self, path: Path) -> bool:
        """Write all lines to another file; return True if none is missing. A file that was removed can still
        be read while it is open, unless another machine has removed it.
        """
        lines, data = b"".join(self._recent), b""
        if self._file is not None:
            with contextlib.suppress(OSError):
                data = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        complete = data.endswith(lines)
        if data or lines:
            path.write_bytes(data if complete else lines)
        return complete or not self._has_older

    def restore(self) -> None:
        """Write all lines to the path again."""
        self.copy_to(self.path)
        self.close()
        self.open()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # `write` has flushed every line, or returned False
                self._file.close()
        self._file = None


class StepLines(RecordFile):
    """Appends JSON lines to `path`, after dropping its lines of steps after `start`.

    A run that died after its last checkpoint has written steps that the resumed run repeats, and perhaps half
    a line.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        super().__init__(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_steps(path, start)
        self.open()


def cut_records(run: Path, step: int) -> None:
    """Drop the records of a run's later steps, as resuming at this one does."""
    for name in (STEPS, EVALUATIONS, LOGGED):
        if (run / name).is_file():
            _drop_steps(run / name, step)


def recorded_steps(run: Path, name: str = STEPS) -> int:
    """Return the last step that a run has recorded, or 0."""
    try:
        with (run / name).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):  # half a line
            continue
    return 0


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete objects of the file in order, without lines that a crash has broken.

    Raises:
        StrettoError: a line has a version that this release does not read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and line.endswith("\n"):
                METRICS.check(record.get("version", 1), str(path))  # the first release's had none at first
                yield record


def _drop_steps(path: Path, last: int) -> None:
    """Rewrite the file without the steps after `last`: under another name, then renamed over it."""
    rewritten = path.with_name(path.name + ".new")
    with rewritten.open("w", encoding="utf-8") as file:
        for record in read_lines(path):
            if isinstance(record.get("step"), int) and record["step"] <= last:
                file.write(json_line(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    rewritten.replace(path)


class Display(Protocol):
    """Where records are shown."""

    def step(self, record: AnyStep, line: bool) -> None:
        """Show a step; `line` asks for a line that stays."""
        ...

    def line(self, text: str) -> None:
        """Show a line of text that stays."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def display(steps: int, start: int, out: TextIO, log_format: LogFormat | None = None) -> Display:
    """Return a progress bar if `out` is a terminal, or plain lines if it is a file or a pipe."""
    log_format = log_format or TOKENS
    if not out.isatty():
        return PlainProgress(steps, out, log_format)
    from rich.console import Console

    console = Console(file=out, highlight=False)
    return (
        ProgressBar(steps, start, console, log_format)
        if console.is_terminal
        else PlainProgress(steps, out, log_format)
    )


def step_line(record: StepRecord, steps: int) -> str:
    """Such as `step 10/300 | loss 7.123 | grad_norm 1.20 | lr 3.0e-04 | 0.332 s/step | tokens/s 12345`."""
    parts = [
        f"step {record.step}/{steps}",
        *([f"epoch {record.epoch:.2f}"] if record.epoch is not None and record.epoch > 1 else []),
        f"loss {number(record.loss, 4)}",
        *([] if record.grad_norm is None else [f"grad_norm {number(record.grad_norm, 3)}"]),
        f"lr {record.lr:.1e}",
        f"{record.step_time_s:.3g} s/step",
        f"tokens/s {number(record.tokens_per_s, 0)}",
    ]
    if record.targets is not None:
        parts.append(f"targets {percent(record.targets / record.tokens)}")
    if record.mfu is not None:
        parts.append(f"mfu {percent(record.mfu)}")
    if record.memory_gib is not None:
        parts.append(f"memory {record.memory_gib:.2f} GiB")
    if record.loss_scale is not None:
        parts.append(f"loss_scale {record.loss_scale:.10g}")
    if record.bad is not None:
        parts.append("no update")
    if record.skipped:
        parts.append(f"skipped {record.skipped}")
    if record.expert_busiest is not None:
        parts.append(f"busiest expert {record.expert_busiest:.2f}x")
    if record.expert_dropped:
        parts.append(f"dropped {percent(record.expert_dropped)}")
    return " | ".join(parts)


def eval_line(record: EvalRecord, steps: int) -> str:
    """Such as `eval 100/300 | held-out loss 4.2000 | perplexity 66.69`."""
    parts = [
        f"eval {record.step}/{steps}",
        f"held-out loss {number(record.loss, 4)}",
        f"perplexity {number(record.perplexity, 2)}",
    ]
    parts += [f"{name} {number(loss, 4)}" for name, loss in (record.sources or {}).items()]
    return " | ".join(parts)


TOKENS = LogFormat(step_line, eval_line, "tokens/s")


def number(value: float, digits: int) -> str:
    """Return a number with `digits` digits after the point; NaN and infinity as metrics.jsonl writes them."""
    if isfinite(value):
        return f"{value:.{digits}f}"
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def percent(ratio: float) -> str:
    """Return a ratio in percent."""
    return f"{100 * ratio:.1f}%"


def short_count(count: int) -> str:
    """Such as 850, 12.3 k, 124 M, 6.7 B."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


class PlainProgress:
    """Plain lines, flushed one by one, so that a log can be followed."""

    def __init__(self, steps: int, out: TextIO, log_format: LogFormat) -> None:
        self._steps, self._format = steps, log_format
        self._out = out

    def step(self, record: AnyStep, line: bool) -> None:
        if line:
            self.line(self._format.step(record, self._steps))

    def line(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def close(self) -> None:
        pass


class ProgressBar:
    """A bar that advances with every step, below the printed lines."""

    def __init__(self, steps: int, start: int, console: Console, log_format: LogFormat) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._steps, self._format = steps, log_format
        # the last minute predicts the remaining time better than the whole run with its warm-up
        self._progress = Progress(
            TextColumn("train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} " + log_format.unit),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=60,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, loss="-", speed="-")
        self._progress.start()

    def step(self, record: AnyStep, line: bool) -> None:
        loss, speed = number(record.loss, 4), number(record.speed, 0)
        self._progress.update(self._task, completed=record.step, loss=loss, speed=speed)
        if line:
            self.line(self._format.step(record, self._steps))

    def line(self, text: str) -> None:
        # the text may hold brackets that rich would take for its markup
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


__all__ = ["EvalRecord", "Metrics", "StepRecord"]


class Metrics:
    """Reports every step to the file; each `every`th, the first and the last to terminal and trackers too.

    If the run's folder is removed or replaced, `lost` says so from the next record on, `on_loss` is called
    once, and `rescue` writes all records elsewhere. Used in a `with`, which restores the terminal.

    Args:
        folder: the run's.
        steps: number of steps of the run.
        start: step that a resumed run starts from; records of later ones are dropped.
        trackers: those of `metrics.to`; closed at the end.
        out: stdout by default, which `--json` leaves alone.
        log_format: formats records.
        write_files: writes into a folder what else belongs to the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        start: int = 0,
        every: int = 1,
        trackers: Trackers | None = None,
        out: TextIO | None = None,
        log_format: LogFormat = TOKENS,
        write_files: Callable[[Path], object] = lambda _: None,
    ) -> None:
        self._format = log_format
        self._write_files = write_files
        self.lost: str | None = None
        self.on_loss: Callable[[], object] = lambda: None
        self._steps = steps
        self._every = every
        self._folder, self._trackers = folder, trackers
        self._events, self._logged = RecordFile(folder / EVENTS), RecordFile(folder / LOGGED)
        self._open(start)
        self._identity = identity(folder)
        self._display = display(steps, start, sys.stdout if out is None else out, log_format)

    def _open(self, start: int) -> None:
        self._first = start + 1
        self._train = StepLines(self._folder / STEPS, start)
        self._eval = StepLines(self._folder / EVALUATIONS, start)
        if self._events.path.exists():
            self._events.open()
        if self._logged.path.exists():
            _drop_steps(self._logged.path, start)

    def rewind(self, start: int) -> None:
        """Continue after step `start`: records of later ones are dropped."""
        self._close_files()
        self._open(start)
        if self._trackers is not None:
            self._trackers.rewind(start)

    def event(self, record: Mapping[str, Any]) -> None:
        """Append a line to `guard.jsonl`, the record of steps that were not applied; nothing is ever dropped
        from it.
        """
        self._write(self._events, record)

    def step(self, record: AnyStep, memory: Mapping[str, float] | None = None) -> None:
        """Report a training step; `memory` has what files and trackers get of all ranks' memory, with every
        `every`th step.
        """
        shown = record.step % self._every == 0 or record.step in (self._first, self._steps)
        self._write(self._train, {**record.as_dict(), **({"memory": memory} if memory and shown else {})})
        self._display.step(record, shown)
        if self._trackers is not None and shown:
            self._trackers.log({**numbers_of("train", record.as_dict()), **(memory or {})}, record.step)
            self._print_notes()

    def evaluation(self, record: AnyEval) -> None:
        """Report an evaluation."""
        self._write(self._eval, record.as_dict())
        self._display.line(self._format.evaluation(record, self._steps))
        if self._trackers is not None:
            self._trackers.log(numbers_of("eval", record.as_dict()), record.step, "eval")

    def extra(self, values: Mapping[str, float | str], step: int) -> None:
        """Record further numbers and texts of a step, by their full names."""
        self._write(self._logged, {"step": step, **values})
        if self._trackers is None:
            return
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        if numbers:
            self._trackers.log(numbers, step)
        for name, text in values.items():
            if isinstance(text, str):
                self._trackers.text(name, text, step)

    def _print_notes(self) -> None:
        for note in () if self._trackers is None else self._trackers.notes():
            self.note(note)

    def _write(self, file: RecordFile, record: Mapping[str, Any]) -> None:
        if file.write(record) or self.lost is not None:
            return
        if self.check_folder() is None:
            file.restore()
            self.note(f"warning: {file.path} was removed or replaced; it is written again")
        else:
            self.on_loss()

    def check_folder(self) -> str | None:
        """Return why the run's folder is not its own any more, or None if it is."""
        self.lost = self.lost or lost_folder(self._folder, self._identity)
        return self.lost

    def rescue(self, folder: Path) -> list[str]:
        """Write all records, and what else belongs to the run, into another folder; return the names of the
        files of which only the newest lines are left.
        """
        self._write_files(folder)
        files = (self._train, self._eval, self._events, self._logged)
        return [file.path.name for file in files if not file.copy_to(folder / file.path.name)]

    def note(self, text: str) -> None:
        """Print a line between records, such as that a checkpoint was saved."""
        self._display.line(text)

    def close(self, failed: bool = False) -> None:
        """Close files and trackers, and restore the terminal; may be called more than once."""
        self._display.close()
        self._close_files()
        if self._trackers is not None:
            self._trackers.close(failed)
            self._print_notes()
            self._trackers = None

    def _close_files(self) -> None:
        for file in (self._train, self._eval, self._events, self._logged):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)
