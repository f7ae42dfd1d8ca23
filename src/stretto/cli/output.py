"""Output of all commands: files, errors, failed ranks, progress; `report` has what they compute."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from stretto.errors import MOST_OTHERS, StrettoError, shortened

if TYPE_CHECKING:
    from rich.console import Console

    from stretto.run.launch.failure import Failure


def command_app(**settings: Any) -> typer.Typer:
    """The Typer of a command's module; with a single command in it, it is that command."""
    # help without markup: rich with its panels would take longer to import than all else here
    return typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **settings
    )


def console(stream: TextIO | None = None) -> Console:
    """Return the terminal, or a console without colour if the stream (default: stdout) is not one."""
    from rich.console import Console

    width = None if (stream or sys.stdout).isatty() else 120
    return Console(file=stream, highlight=False, width=width)


def train_command(config: Path, required: Sequence[str]) -> str:
    """Return the command that trains a written config, with the fields that it leaves open."""
    from stretto.run.config.required import settings

    return " ".join(filter(None, ["stretto train", str(config), settings(required)]))


def say_no() -> typer.Exit:
    """Return the exception to raise if the command ran and its answer is no: exit code 1."""
    return typer.Exit(1)


def check_writable(*paths: Path | None) -> None:
    """Check files that the user named before the work that fills them; None is no file.

    Raises:
        StrettoError: a file's folder does not exist.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise _cannot_write(path, os.strerror(errno.ENOENT))


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file that the user named.

    Raises:
        StrettoError: the file cannot be written.
    """
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _cannot_write(path, error.strerror) from None


def _cannot_write(path: Path, reason: str | None) -> StrettoError:
    return StrettoError(f"cannot write {path}: {reason}", hint="name a file in a folder that exists")


def print_error(message: str, hint: str | None, others: Sequence[StrettoError] = ()) -> None:
    """Print an `error:` and a `hint:` line on stderr, and the same of further problems of the same input."""
    print(f"error: {shortened(' '.join(message.split()))}", file=sys.stderr)
    if hint:
        print(f"hint: {shortened(' '.join(hint.split()))}", file=sys.stderr)
    for other in others[:MOST_OTHERS]:
        print_error(other.message, other.hint)
    if (left := len(others) - MOST_OTHERS) > 0:
        print(f"{left} more problem{'s' * (left > 1)} after these", file=sys.stderr)


def coloured(to: Console) -> bool:
    """Return True if output is coloured: not in a pipe, under NO_COLOR, or on a monochrome terminal."""
    return to.is_terminal and not to.no_color and to.color_system is not None


def memory_size(size: int) -> str:
    """Return bytes as text, such as 850 B, 12.3 KiB, 1.25 GiB."""
    for unit_size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit_size:
            value = size / unit_size
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    return f"{size} B"


def tflops_text(tflops: float) -> str:
    """Return TFLOP/s with a decimal, or with three digits below 1, as on CPUs."""
    return f"{tflops:.1f}" if tflops >= 1 else f"{tflops:.3g}"


def labelled(to: Console, label: str, text: str, indent: int) -> None:
    """Print a label, and right of it a text that wraps at spaces."""
    from textwrap import fill

    width = max(to.width, indent + 20)
    wrapped = fill(
        text,
        width,
        initial_indent=f"{label:{indent - 1}} ",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    to.print(wrapped, soft_wrap=True, markup=False)


@contextmanager
def stage_progress(
    as_json: bool, described: Callable[[Any], tuple[str, int]]
) -> Generator[Callable[[Any], None] | None]:
    """Show a progress bar if stdout is a terminal, else one line a stage; nothing with --json.

    Yields a function that takes the progress of a build, which has a `stage` and its `total` in bytes.

    Args:
        described: returns the bar's text and the number of bytes done.
    """
    if as_json:
        yield None
        return
    if not sys.stdout.isatty():
        begun = set[str]()

        def line(progress: Any) -> None:
            if progress.stage not in begun:
                begun.add(progress.stage)
                print(f"{progress.stage}: {progress.total / 1e6:.1f} MB", flush=True)

        yield line
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("read")

        def update(progress: Any) -> None:
            text, done = described(progress)
            bar.update(task, description=text, completed=done, total=max(progress.total, 1))

        yield update


@contextmanager
def byte_progress(label: str) -> Generator[Callable[[int, int], None] | None]:
    """Show a bar if stderr is a terminal; yields a function that takes the bytes done, and in total."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("{task.description}", *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, 1))


@contextmanager
def show_search(label: str = "searching") -> Generator[Callable[..., None] | None]:
    """Show a search's progress if stderr is a terminal; yields what takes its numbers of layouts, or the best
    so far as `best`.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(label) as status:
        so_far = ""

        def show(*counts: int, best: str = "") -> None:
            nonlocal so_far
            if best:
                so_far = f"; best so far: {best} (Ctrl-C: stop there)"
            else:
                replayed, evaluated, fitting = counts
                numbers = f"{replayed} replayed, {evaluated} evaluated, {fitting} that fit"
                status.update(f"{label}: {numbers}{so_far}")

        yield show


# exceptions whose message needs no traceback
PLAIN = ("TrainingFailed", "CollectiveError", "OffloadError")


def print_failure(failure: Failure, hint: str | None = None) -> None:
    """Print the rank's traceback if it helps, and one `error:` line.

    Args:
        hint: printed if the failure has none.
    """
    # restore the terminal if the rank was killed while it drew a progress bar
    if (terminal := next((each for each in (sys.stdout, sys.stderr) if each.isatty()), None)) is not None:
        terminal.write("\x1b[?25h\n")  # show the cursor
        terminal.flush()
    hint = failure.hint or hint
    if failure.name in PLAIN and failure.kind == "error":
        print_error(failure.message, hint)
    elif failure.name == "BrokenPipeError":
        print_error("the output's reader closed the pipe; the job was ended", hint)
    elif failure.kind in ("silent", "server"):
        print_error(f"{failure.message}; the job was ended", hint)
    elif failure.kind == "died":
        if failure.traceback:
            print(failure.traceback, file=sys.stderr)
        print_error(f"rank {failure.rank} {failure.message}; the job was ended", hint)
    else:
        print(failure.traceback, file=sys.stderr)
        error = f"rank {failure.rank} failed: {failure.name}: {failure.message}; the job was ended"
        print_error(error, hint)


@contextmanager
def failures_reported() -> Generator[None]:
    """Print a failed rank as an error; end with the signal's exit code after a signal."""
    from stretto.run.launch.local import RankFailed, RanksStopped

    try:
        yield
    except RankFailed as error:
        print_failure(error.failure)
        raise say_no() from None
    except RanksStopped as stopped:
        raise typer.Exit(128 + stopped.signal) from None
