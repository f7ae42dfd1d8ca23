"""How every command speaks: one JSON object or people's text, errors on a line, files written or refused."""

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
    return " ".join(text.split())
