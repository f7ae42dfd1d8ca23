"""Reads a program from a file, in either format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stretto.errors import StrettoError, read_text
from stretto.program.program import Program
from stretto.program.text.json_format import from_json
from stretto.program.text.torch_csv import from_csv


def read_program(path: Path, name: str | None = None) -> Program:
    """Read and check the program in a file: JSON if it begins with a brace, otherwise CSV.

    Args:
        name: the program's name; by default the one in the JSON, or the file's.

    Raises:
        StrettoError: the file cannot be read or does not contain a program.
        ScheduleError: the program is invalid.
    """
    text = read_text(path)
    try:
        program = read_text_program(text, name or path.stem)
    except StrettoError as error:
        raise StrettoError(f"{path}: {error.message}", hint=error.hint) from None
    return replace(program, name=name) if name else program


def read_text_program(text: str, name: str) -> Program:
    """Read and check the program in a file's text.

    Args:
        name: the program's name if the text has none.

    Raises:
        StrettoError: the text does not contain a program.
        ScheduleError: the program is invalid.
    """
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        return from_json(text.removeprefix("\ufeff"))
    return from_csv(text, name=name)
