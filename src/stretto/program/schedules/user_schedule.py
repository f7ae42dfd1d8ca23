"""Schedules in users' files: a function, FILE.py:FUNCTION, or one program, FILE.csv or FILE.json."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from hashlib import sha256
from inspect import signature
from pathlib import Path
from typing import Any, cast

from stretto.errors import StrettoError, counted, nearest, nearest_file
from stretto.program.action import Action
from stretto.program.checks.check import check
from stretto.program.lower import lower, unlower
from stretto.program.program import Program
from stretto.program.text import from_csv, read_program
from stretto.user_file import UserFunction, find_function, is_function_name

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, eq=False)
class UserSchedule:
    """A schedule in a file.

    Attributes:
        path: of the file, absolute.
        digest: SHA-256 of the file.
        build: returns the program of (ranks, microbatches), checked; its signature is the function's.
        program: the only one that the schedule has, if the file holds a program.
    """

    path: Path
    digest: str
    build: Callable[..., Program]
    program: Program | None = None


def is_file(name: str) -> bool:
    """True if a schedule is named by its file."""
    return is_function_name(name) or is_program_file(name)


def is_program_file(name: str) -> bool:
    """True if a schedule is named by the file that holds its program."""
    return name.lower().endswith((".csv", ".json"))


def user_schedule(name: str) -> UserSchedule:
    """Return the schedule in a file, which is relative to the working directory.

    A function's file is run, once per process. Its parameters after ranks and microbatches are options, which
    the name may set: mine.py:lifo:shift=2.

    Raises:
        StrettoError: there is no such file or function, or no valid program in the file.
    """
    if is_function_name(name):
        return _function(name, os.getcwd())
    path = Path(name).expanduser().absolute()
    if not path.exists() and path.parent.is_dir():
        similar = nearest_file(path.name, (each.name for each in path.parent.iterdir()))
        hint = f"did you mean {path.with_name(similar)}?" if similar else "check the file's name"
        raise StrettoError(f"schedule {name}: there is no such file", hint=hint)
    return _program_file(path, path.stat().st_mtime_ns if path.exists() else 0)


def no_option(name: str, option: str, accepted: Iterable[str]) -> StrettoError:
    """Return the error of an option that a user's schedule does not take."""
    similar = nearest(option, accepted)
    hint = f"did you mean {similar!r}?" if similar else "further parameters of the function are its options"
    return StrettoError(f"schedule {name!r} has no option {option!r}", hint=hint)


def option_value(text: str) -> bool | int | float | str:
    """Return the value of an option that was written as NAME=VALUE."""
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@lru_cache(maxsize=64)
def _function(name: str, folder: str) -> UserSchedule:  # the file's name is relative to the folder
    file, _, named = name.partition(".py:")
    function_name, *pairs = named.split(":")
    function = find_function(f"{file}.py:{function_name}", "mine.py:lifo", ("ranks", "microbatches"))
    options = dict[str, Any]()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key or not value or key in options:
            raise StrettoError(
                f"schedule {name} has {pair!r}, must be OPTION=VALUE, each once",
                hint=f"write it as in {file}.py:{function_name}:shift=2",
            )
        options[key] = option_value(value)
    loaded = function.load()
    for key in options.keys() - (accepted := list(signature(loaded).parameters)[2:]):
        raise no_option(name, key, accepted)

    @wraps(loaded)
    def build(ranks: int, microbatches: int, **others: Any) -> Program:
        returned = function(ranks, microbatches, **others)
        return _checked(function, returned, ranks, microbatches)

    digest = sha256(function.path.read_bytes()).hexdigest()
    return UserSchedule(function.path, digest, partial(build, **options) if options else build)


def _checked(function: UserFunction, returned: object, ranks: int, microbatches: int) -> Program:
    """Return what a user's function returned as a program of compute actions, which can run.

    Raises:
        StrettoError: it is no program, one of other sizes, or one that the checker refuses.
    """
    sizes = f"{function} of {counted(ranks, 'rank')} and {counted(microbatches, 'microbatch')}"
    try:
        if not isinstance(returned, Program):
            rows = cast(
                "list[list[Action | str]]", returned if isinstance(returned, list | tuple) else [None]
            )
            if not all(isinstance(row, list | tuple) for row in rows):
                raise StrettoError(
                    f"returned {type(returned).__name__}, must return a Program or each rank's actions",
                    hint='return [["0F0", "0B0"], ["1F0", "1B0"]] for 2 ranks and 1 microbatch',
                )
            returned = from_csv("\n".join(",".join(map(str, row)) for row in rows), name=function.name)
        if returned.ranks != ranks or returned.microbatches != microbatches * returned.steps:
            raise StrettoError(
                f"returned a program of {counted(returned.ranks, 'rank')} and "
                f"{counted(returned.microbatches // returned.steps, 'microbatch')}",
                hint="take both from its arguments",
            )
        check(returned if returned.lowered else lower(returned))
    except StrettoError as error:
        raise StrettoError(f"schedule {sizes}: {error.message}", hint=error.hint) from None
    return unlower(returned) if returned.lowered else returned


@lru_cache(maxsize=16)
def _program_file(path: Path, changed: int) -> UserSchedule:  # read again if its time of change is another
    program = read_program(path)
    program = unlower(program) if program.lowered else program

    def build(ranks: int, microbatches: int) -> Program:
        if program.steps > 1:
            raise StrettoError(
                f"{path.name} is a window of {program.steps} steps", hint="write a program of one step"
            )
        if (ranks, microbatches) != (program.ranks, program.microbatches):
            raise StrettoError(
                f"{path.name} is a program of {counted(program.ranks, 'rank')} and "
                f"{counted(program.microbatches, 'microbatch')}, not of {ranks} and {microbatches}",
                hint=f"layout.pp={program.ranks}, and batch.global_size = {program.microbatches} x "
                "batch.micro_size x layout.dp; or a function, FILE.py:FUNCTION, for any sizes",
            )
        return program

    return UserSchedule(path, sha256(path.read_bytes()).hexdigest(), build, program)
