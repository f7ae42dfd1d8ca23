"""Schedules by name.

A schedule is one function of (ranks, microbatches) that returns a program, decorated with `@register`, in the
file of its family. Its further parameters (`chunks`, `group`) are the options that it takes, and the only
ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.program.program import Program


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered schedule: its builder, and its options with their defaults."""

    name: str
    about: str
    build: Callable[..., Program]
    options: Mapping[str, Any]
    numbers: frozenset[str]  # options that are whole numbers of at least 1


_ENTRIES: dict[str, Entry] = {}


def register(name: str, about: str) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Make the decorated function the schedule `name`; `about` describes it in one line."""

    def add(build: Callable[..., Program]) -> Callable[..., Program]:
        parameters = list(inspect.signature(build).parameters.values())[2:]
        numbers = frozenset(p.name for p in parameters if str(p.annotation).startswith("int"))
        assert name not in _ENTRIES, f"schedule {name!r} is registered twice"
        _ENTRIES[name] = Entry(
            name=name,
            about=about,
            build=build,
            options={p.name: p.default for p in parameters},
            numbers=numbers,
        )
        return build

    return add


def names() -> dict[str, str]:
    """Every schedule's name and one line about it."""
    return {entry.name: entry.about for entry in _ENTRIES.values()}


def options(name: str) -> dict[str, Any]:
    """The options that schedule `name` takes, with their defaults (None: derived)."""
    return dict(_entry(name).options)


def schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    group: int | None = None,
    **options: Any,
) -> Program:
    """The program of schedule `name`: compute actions only; `lower` adds the communications.

    Args:
        name: one of `names()`.
        ranks: pipeline ranks p >= 1.
        microbatches: microbatches m >= 1 of one step.
        chunks: stages per rank, for schedules that take it; 1 is allowed for all with one stage per rank.
        group: microbatches that go through one chunk in a row before the next chunk, for schedules that take
            it.
        options: what else `options(name)` lists, such as `waves`. None means the default.

    Raises:
        StrettoError: unknown name, a number below 1, or an option that the schedule does not take or allow.
    """
    entry = _entry(name)
    at_least_one("ranks", ranks)
    at_least_one("microbatches", microbatches)
    taken: dict[str, Any] = {}
    for option, value in {"chunks": chunks, "group": group, **options}.items():
        if value is None:
            continue
        if option not in entry.options:
            if option == "chunks" and value == 1:
                continue
            raise _no_such_option(entry, option, value)
        if option in entry.numbers:
            at_least_one(option, value)
        taken[option] = value
    program = entry.build(ranks, microbatches, **taken)
    if chunks == 1 and "chunks" not in entry.options and program.depth > ranks:
        stages = program.depth // ranks
        raise StrettoError(
            f"chunks is 1, but schedule {name!r} has {stages} stages a rank", hint="leave chunks out"
        )
    return program


def at_least_one(field: str, value: int) -> None:
    """Raise unless `value` is a whole number >= 1."""
    # bool is an int to Python, and a float slips in from YAML
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise StrettoError(
            f"{field} is {value!r}, must be a whole number of at least 1", hint=f"nearest is {field}=1"
        )


def _entry(name: str) -> Entry:
    entry = _ENTRIES.get(name)
    if entry is None:
        close = nearest(name, _ENTRIES)
        raise StrettoError(
            f"schedule is {name!r}, which is not one of {', '.join(_ENTRIES)}",
            hint=f"did you mean {close!r}?" if close else None,
        )
    return entry


def _no_such_option(entry: Entry, option: str, value: object) -> StrettoError:
    takers = [e.name for e in _ENTRIES.values() if option in e.options]
    if not takers:
        known = sorted({name for e in _ENTRIES.values() for name in e.options})
        close = nearest(option, known)
        return StrettoError(
            f"there is no option {option!r} of a schedule",
            hint=f"did you mean {close!r}?" if close else f"options are {', '.join(known)}",
        )
    without = "chunks=1 or none" if option == "chunks" else f"no {option}"
    return StrettoError(
        f"{option} is {value}, but schedule {entry.name!r} takes {without}",
        hint=f"leave {option} out, or use a schedule that takes it: {', '.join(takers)}",
    )
