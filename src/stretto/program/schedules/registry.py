"""Schedules by name.

A schedule is one function of (ranks, microbatches) that returns a program, in the file of its family, under
`@register`. Its other keyword parameters (`chunks`, `group`) are the schedule's options. Properties of a
schedule are derived from its programs (`program.schedules.traits`), never from its name; properties that no
program shows, such as how widely it is used, are declared here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.program.program import Program
from stretto.program.schedules.user_schedule import UserSchedule, is_file, no_option, user_schedule

PLAIN = "1f1b"  # the default: every framework has it, and it fits any number of ranks


@dataclass(frozen=True, kw_only=True)
class RegisteredSchedule:
    """A registered schedule with its options.

    Attributes:
        about: one line for the list of schedules.
        options: defaults of the options, by name.
        numbers: options that are whole numbers of at least 1.
        planned: `stretto plan` considers it by default.
        common: most frameworks have it; such schedules come first among equally fast plans.
        early: `stretto plan` considers it even if little time is left.
        groups: additional sizes of `group` that `stretto plan` considers, in pipeline ranks.
        user: the user's file that it is in, registered by nothing.
    """

    name: str
    about: str
    build: Callable[..., Program]
    options: Mapping[str, Any]
    numbers: frozenset[str]
    planned: bool = True
    common: bool = False
    early: bool = False
    groups: tuple[int, ...] = ()
    user: UserSchedule | None = None


_ENTRIES: dict[str, RegisteredSchedule] = {}


def register(
    name: str,
    about: str,
    *,
    planned: bool = True,
    common: bool = False,
    early: bool = False,
    groups: tuple[int, ...] = (),
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Register the decorated function as schedule `name`; `about` is its line in the list of schedules.

    Args:
        planned: False if another schedule is never worse.
        common: most frameworks have it.
        early: its programs are cheap to build and tried first among its kind; see `RegisteredSchedule`.
        groups: sizes of its option `group` to plan in addition to the default, in pipeline ranks.
    """

    def add(build: Callable[..., Program]) -> Callable[..., Program]:
        options = _options_of(build)
        if name in _ENTRIES:
            raise StrettoError(f"schedule {name!r} is registered twice", hint="give yours another name")
        _ENTRIES[name] = RegisteredSchedule(
            name=name,
            about=about,
            build=build,
            options={name: p.default for name, p in options.items()},
            numbers=frozenset(name for name, p in options.items() if str(p.annotation).startswith("int")),
            planned=planned,
            common=common,
            early=early,
            groups=groups,
        )
        return build

    return add


def _options_of(build: Callable[..., Program]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a schedule's function after ranks and microbatches."""
    parameters = list(inspect.signature(build).parameters.values())[2:]
    return {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def names() -> dict[str, str]:
    """Return the name of every schedule, with one line about it."""
    return {entry.name: entry.about for entry in _ENTRIES.values()}


def options(name: str) -> dict[str, Any]:
    """Return the options of schedule `name`, with their defaults (None: derived)."""
    return dict(entry(name).options)


def schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    group: int | None = None,
    **options: Any,
) -> Program:
    """Return the program of schedule `name`: compute actions only; `lower` adds the communications.

    Args:
        name: one of `names()`, or a schedule of the user's: a function, FILE.py:FUNCTION, which may return
            a Program or each rank's actions; or a program, FILE.csv or FILE.json.
        ranks: pipeline ranks p >= 1.
        microbatches: microbatches m >= 1 of one step.
        chunks: stages per rank, for schedules with this option; 1 is allowed for all with one stage per rank.
        group: consecutive microbatches that go through one chunk before the next, for schedules with this
            option.
        options: other options of `options(name)`, such as `waves`. None means the default.

    Raises:
        StrettoError: the name is unknown, a number is below 1, or the schedule does not accept an option.
    """
    chosen = entry(name)
    at_least_one("ranks", ranks)
    at_least_one("microbatches", microbatches)
    values: dict[str, Any] = {}
    for option, value in {"chunks": chunks, "group": group, **options}.items():
        if value is None:
            continue
        if option not in chosen.options:
            if option == "chunks" and value == 1:
                continue
            raise _no_such_option(chosen, option, value)
        if option in chosen.numbers:
            at_least_one(option, value)
        values[option] = value
    program = chosen.build(ranks, microbatches, **values)
    if not isinstance(program, Program):  # pyright: ignore[reportUnnecessaryIsInstance]  # registered by a user
        raise StrettoError(f"schedule {name!r} returned {type(program).__name__}, must return a Program")
    if chunks == 1 and "chunks" not in chosen.options and program.depth > ranks:
        stages = program.depth // ranks
        raise StrettoError(
            f"chunks is 1, but schedule {name!r} has {stages} stages a rank", hint="leave chunks out"
        )
    return program


def at_least_one(field: str, value: int) -> None:
    """Raise unless `value` is a whole number >= 1."""
    # bool is a subclass of int, and YAML may contain a float
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise StrettoError(
            f"{field} is {value!r}, must be a whole number of at least 1", hint=f"nearest is {field}=1"
        )


def entry(name: str) -> RegisteredSchedule:
    """Return the schedule registered under a name, or in the user's file that it names.

    Raises:
        StrettoError: the schedule does not exist.
    """
    if name not in _ENTRIES and is_file(name):
        return _user_entry(name, user_schedule(name))
    registered = _ENTRIES.get(name)
    if registered is None:
        file = name if name.endswith(".py") else "FILE.py"
        close = None if file == name else nearest(name, _ENTRIES)
        hint = f"did you mean {close!r}?" if close else f"your own: {file}:FUNCTION, FILE.csv or FILE.json"
        raise StrettoError(f"schedule is {name!r}, which is not one of {', '.join(_ENTRIES)}", hint=hint)
    return registered


@lru_cache(maxsize=64)
def _user_entry(name: str, user: UserSchedule) -> RegisteredSchedule:
    """Return the entry of a schedule in a user's file. Its function decides which values options have."""
    options = {name: p.default for name, p in _options_of(user.build).items()}
    return RegisteredSchedule(
        name=name,
        about=f"of {user.path}",
        build=user.build,
        options=options,
        numbers=frozenset(),
        user=user,
    )


def _no_such_option(chosen: RegisteredSchedule, option: str, value: object) -> StrettoError:
    if chosen.user is not None:
        return no_option(chosen.name, option, chosen.options)
    takers = [e.name for e in _ENTRIES.values() if option in e.options]
    if not takers:
        every = sorted({name for e in _ENTRIES.values() for name in e.options})
        close = nearest(option, every)
        return StrettoError(
            f"no schedule has an option {option!r}",
            hint=f"did you mean {close!r}?" if close else f"options are {', '.join(every)}",
        )
    without = "chunks=1 or none" if option == "chunks" else f"no {option}"
    return StrettoError(
        f"{option} is {value}, but schedule {chosen.name!r} takes {without}",
        hint=f"leave {option} out, or use a schedule that takes it: {', '.join(takers)}",
    )
