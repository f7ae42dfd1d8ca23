"""What every command prints and writes: one JSON object or text, tables, errors, failed ranks, files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.errors import StrettoError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from stretto.run.launch.failure import Failure


LONGEST_MESSAGE = 2000  # characters of an error or a hint

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def command_app(**settings: Any) -> typer.Typer:
    """The Typer that a command's file holds as `app`; with one command in it, it is that command."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, **settings)


def console() -> Console:
    """The terminal, or plain text without colour where stdout is none."""
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)


def report(facts: Mapping[str, Any], as_json: bool, text: Callable[[Console], None]) -> None:
    """Print `facts` as the one JSON object, or let `text` print what people read."""
    if as_json:
        print(json.dumps(facts))
    else:
        text(console())


def say_no() -> typer.Exit:
    """What to raise when the command ran and the answer is no: exit code 1."""
    return typer.Exit(1)


def write_text(path: Path, text: str) -> None:
    """Write a file the user asked for.

    Raises:
        StrettoError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StrettoError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that exists"
        ) from None


def read_text(path: Path) -> str:
    """Read a text file the user named.

    Raises:
        StrettoError: the file is not there, not readable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StrettoError(f"cannot read {path}: {error.strerror}", hint="check the file's name") from None
    except UnicodeDecodeError:
        raise StrettoError(f"cannot read {path}: it is not UTF-8 text", hint="save it as UTF-8") from None


def print_error(message: str, hint: str | None) -> None:
    """One `error:` line and one `hint:` line on stderr."""
    print(f"error: {_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {_line(hint)}", file=sys.stderr)


def _line(text: str) -> str:
    """The text on one line; of a very long one, such as a value of megabytes, its beginning and its end."""
    line = " ".join(text.split())
    if len(line) <= LONGEST_MESSAGE:
        return line
    half = LONGEST_MESSAGE // 2
    return f"{line[:half]} ... ({len(line) - 2 * half:,} characters left out) ... {line[-half:]}"


def coloured(to: Console) -> bool:
    """Whether colours will be seen: not in a pipe, with NO_COLOR set, or on a terminal without any."""
    return to.is_terminal and not to.no_color and to.color_system is not None


def side_table(first: str, *others: str) -> Table:
    """A table of a name and numbers beside it."""
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


def plain_table(*names: str, left: int = 0) -> Table:
    """A table without lines; the first column and the last `left` ones are text, the others numbers."""
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


# exceptions that say all there is to say in one line
PLAIN = ("TrainingFailed", "CollectiveError", "OffloadError")


def print_failure(failure: Failure, hint: str | None = None) -> None:
    """The rank's traceback where it helps, then one `error:` line; `hint` where the failure has none."""
    _leave_bar()
    hint = failure.hint or hint
    if failure.name in PLAIN and failure.kind == "error":
        print_error(failure.message, hint)
    elif failure.name == "BrokenPipeError":
        print_error("the reader of the output is gone; the job was ended", hint)
    elif failure.kind == "silent":
        print_error(f"{failure.message}; the job was ended", hint)
    elif failure.kind == "died":
        print_error(f"rank {failure.rank} {failure.message}; the job was ended", hint)
    else:
        print(failure.traceback, file=sys.stderr)
        what = f"{failure.name}: {failure.message}"
        print_error(f"rank {failure.rank} failed: {what}; the job was ended", hint)


def _leave_bar() -> None:
    """Take the terminal back from a rank that was ended in the middle of its progress bar."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            stream.write("\x1b[?25h\n")  # show the cursor
            stream.flush()
            return
