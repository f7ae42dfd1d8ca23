"""Output of all commands: one JSON object or text, tables, progress, errors, failed ranks, files."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stretto.errors import MOST_OTHERS, StrettoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.run.launch.failure import Failure


LONGEST_MESSAGE = 2000  # characters of an error or a hint


def command_app(**settings: Any) -> typer.Typer:
    """The Typer of a command's module; with a single command in it, it is that command."""
    # help without markup: rich with its panels would take longer to import than all else here
    return typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **settings
    )


def console() -> Console:
    """The terminal, or plain text without colour where stdout is not one."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)


def report(facts: Mapping[str, Any], as_json: bool, text: Callable[[Console], None]) -> None:
    """Print `facts` as one JSON object, or call `text` to print for people."""
    if as_json:
        print(json.dumps(facts))
    else:
        text(console())


def train_command(config: Path, required: Sequence[str]) -> str:
    """The command that trains a written config, with the fields that it leaves open."""
    from stretto.run.config.required import settings

    return " ".join(filter(None, ["stretto train", str(config), settings(required)]))


def command_line(context: typer.Context, without: Sequence[str] = ()) -> str:
    """The command line of this call, quoted for a shell, without some options (by parameter)."""
    import shlex

    words = ["stretto", context.info_name or ""]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name in without or value is None or value == parameter.default or value == ():
            continue
        each = value if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            words += map(str, each)
        elif value is True:
            words.append(parameter.opts[0])
        else:
            words += [word for one in each for word in (parameter.opts[0], str(one))]
    return shlex.join(words)


def say_no() -> typer.Exit:
    """The exception to raise when the command ran and its answer is no: exit code 1."""
    return typer.Exit(1)


def check_writable(*paths: Path | None) -> None:
    """Check files that the user named before the work that fills them; None is no file.

    Raises:
        StrettoError: a file's folder does not exist.
    """
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise _cannot_write(path, os.strerror(errno.ENOENT))


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named.

    Raises:
        StrettoError: the file cannot be written.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that the user named.

    Raises:
        StrettoError: the file cannot be written.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise _cannot_write(path, error.strerror) from None


def _cannot_write(path: Path, why: str | None) -> StrettoError:
    return StrettoError(f"cannot write {path}: {why}", hint="name a file in a folder that exists")


def print_error(message: str, hint: str | None, others: Sequence[StrettoError] = ()) -> None:
    """One `error:` line and one `hint:` line on stderr; the same for further problems of the same input."""
    print(f"error: {_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {_line(hint)}", file=sys.stderr)
    for other in others[:MOST_OTHERS]:
        print_error(other.message, other.hint)
    if (left := len(others) - MOST_OTHERS) > 0:
        print(f"{left} more problem{'s' * (left > 1)} after these", file=sys.stderr)


def _line(text: str) -> str:
    """The text on one line, cut in the middle where it is very long, such as a value of megabytes."""
    line = " ".join(text.split())
    if len(line) <= LONGEST_MESSAGE:
        return line
    half = LONGEST_MESSAGE // 2
    return f"{line[:half]} ... ({len(line) - 2 * half:,} characters left out) ... {line[-half:]}"


def coloured(to: Console) -> bool:
    """Whether to colour the output: not in a pipe, under NO_COLOR, or on a monochrome terminal."""
    return to.is_terminal and not to.no_color and to.color_system is not None


def side_table(first: str, *others: str) -> Table:
    """A table of a name and its numbers in each row."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if name == "formula" else "right", no_wrap=True)
    return table


def memory_size(number: int) -> str:
    """Such as 850 B, 12.3 KiB, 1.25 GiB."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:.0f} {unit}"
    return f"{number} B"


def tflops_text(tflops: float) -> str:
    """TFLOP/s with a decimal, or with three digits below 1, as on CPUs."""
    return f"{tflops:.1f}" if tflops >= 1 else f"{tflops:.3g}"


def plain_table(*names: str, left: int = 0) -> Table:
    """A table without rules; the first column and the last `left` columns are text, the others numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
    for at, name in enumerate(names):
        text = at == 0 or at >= len(names) - left
        justify = "left" if text else "right"
        table.add_column(
            name, justify=justify, no_wrap=True, min_width=None if at == 0 else max(9, len(name))
        )
    return table


def fitting_table(
    to: Console, rows: Sequence[Mapping[str, str]], left: Sequence[str], optional: Sequence[str] = ()
) -> Table:
    """A table with as many columns as fit the terminal; printed with `soft_wrap`, its cells are never cut.

    Args:
        rows: cells by column.
        left: columns that are aligned left; others are numbers.
        optional: columns that a narrow terminal leaves out, in this order.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table()
    for omitted in range(len(optional) + 1):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        shown = [name for name in rows[0] if name not in optional[:omitted]]
        for name in shown:
            table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(row[name] for name in shown))
        if (uncut(to, table).width or 0) <= to.width:
            break
    return table


def uncut(to: Console, table: Table) -> Table:
    """The table at its full width; printed with `soft_wrap`, its lines run over instead of being cut."""
    from rich.measure import Measurement

    table.width = Measurement.get(to, to.options.update(max_width=1000), table).maximum
    return table


def labelled(to: Console, label: str, text: str, indent: int) -> None:
    """Print a label and a text that wraps, at spaces, beside it."""
    from textwrap import fill

    first, rest = f"{label:{indent - 1}} ", " " * indent
    width = max(to.width, indent + 20)
    wrapped = fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    to.print(wrapped, soft_wrap=True, markup=False)


@contextmanager
def stage_progress(
    as_json: bool, described: Callable[[Any], tuple[str, int]]
) -> Generator[Callable[[Any], None] | None]:
    """A progress bar where stdout is a terminal, one line a stage where it is not, nothing with --json.

    What it yields takes the progress of a build, which has a `stage` and its `total` in bytes.

    Args:
        described: of a progress, the bar's text and how many bytes are done.
    """
    if as_json:
        yield None
        return
    if not sys.stdout.isatty():
        begun = set[str]()

        def line(at: Any) -> None:
            if at.stage not in begun:
                begun.add(at.stage)
                print(f"{at.stage}: {at.total / 1e6:.1f} MB", flush=True)

        yield line
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("read")

        def update(at: Any) -> None:
            text, done = described(at)
            bar.update(task, description=text, completed=done, total=max(at.total, 1))

        yield update


@contextmanager
def byte_progress(label: str) -> Generator[Callable[[int, int], None] | None]:
    """A bar on stderr where that is a terminal; what it yields takes the bytes done, and all there are."""
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
def watching() -> Generator[Callable[[int, int, int], None] | None]:
    """Show the search's progress where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("searching") as status:
        yield lambda replayed, weighed, fitting: status.update(
            f"searching: {replayed} replayed, {weighed} evaluated, {fitting} that fit"
        )


# exceptions whose message needs no traceback
PLAIN = ("TrainingFailed", "CollectiveError", "OffloadError")


def print_failure(failure: Failure, hint: str | None = None) -> None:
    """Print the rank's traceback where it helps, and one `error:` line; `hint`: if the failure has none."""
    _leave_bar()
    hint = failure.hint or hint
    if failure.name in PLAIN and failure.kind == "error":
        print_error(failure.message, hint)
    elif failure.name == "BrokenPipeError":
        print_error("the output's reader closed the pipe; the job was ended", hint)
    elif failure.kind == "silent":
        print_error(f"{failure.message}; the job was ended", hint)
    elif failure.kind == "died":
        if failure.traceback:
            print(failure.traceback, file=sys.stderr)
        print_error(f"rank {failure.rank} {failure.message}; the job was ended", hint)
    else:
        print(failure.traceback, file=sys.stderr)
        what = f"{failure.name}: {failure.message}"
        print_error(f"rank {failure.rank} failed: {what}; the job was ended", hint)


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


def _leave_bar() -> None:
    """Restore the terminal after a rank that was killed while it drew a progress bar."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\x1b[?25h\n")  # show the cursor
            stream.flush()
            return
