"""From the words of `stretto schedule` to programs: times, options, names to compare, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.face import read_text
from stretto.errors import StrettoError, nearest

if TYPE_CHECKING:
    from stretto.program import Program
    from stretto.program.replay import Costs

_COSTS = ("F", "I", "W", "hop")
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the command line asks for."""

    name: str | None
    ranks: int | None
    microbatches: int | None
    options: Mapping[str, Any]
    costs: Costs
    file: Path | None = None
    compare: str | None = None


def parse_times(text: str) -> Costs:
    """Costs from text such as "F=1,I=1,W=1,hop=0"; what is left out keeps its default.

    Raises:
        StrettoError: an unknown name, or a value that is no time.
    """
    from stretto.program.replay import Costs

    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        if key not in _COSTS:
            near = nearest(key, _COSTS)
            hint = f"did you mean {near!r}? " * bool(near) + "write times as in F=1,I=1,W=1,hop=0"
            raise StrettoError(f"--times has {key!r}", hint=hint)
        if key in values:
            raise StrettoError(f"--times gives {key} twice", hint="give every time once")
        try:
            values[key] = float(value)
        except ValueError:
            raise StrettoError(f"--times has {part!r}, which is no number", hint=f"write {key}=1") from None
    return Costs(**values)


def options_from(named: Mapping[str, Any], memory: str | None, pairs: Sequence[str]) -> dict[str, Any]:
    """The schedule's options that are given, whether by a name of their own or as NAME=VALUE.

    Raises:
        StrettoError: a pair without `=`, an option given twice, a memory limit that is no number.
    """
    found = {key: value for key, value in named.items() if value is not None}
    if memory is not None:
        found["memory"] = _limits(memory)
    for pair in pairs:
        key, value = _pair(pair, "--option")
        if key in found:
            raise StrettoError(f"option {key} is given twice", hint="give every option once")
        found[key] = _limits(str(value)) if key == "memory" else value
    return found


def programs_of(wanted: Wanted) -> list[Program]:
    """The program named or in the file, or all those to compare.

    Raises:
        StrettoError: nothing named, too much named, or what the schedule or the file says.
    """
    if wanted.compare is not None:
        return _compared(wanted)
    if wanted.file is not None:
        if wanted.options:
            option = next(iter(wanted.options))
            raise StrettoError(
                f"{wanted.file} is a whole program, {option} is an option of a schedule",
                hint=f"leave {option} out",
            )
        return [_from_file(wanted.file, wanted.name, wanted.ranks)]
    return [_program(wanted, wanted.name, dict(wanted.options))]


def _program(wanted: Wanted, name: str | None, options: dict[str, Any]) -> Program:
    from stretto.program import options as taken
    from stretto.program import schedule as generate

    if name is None:
        raise StrettoError("no schedule named", hint="name one of stretto schedule --list")
    if wanted.ranks is None or wanted.microbatches is None:
        given = (("--ranks", wanted.ranks), ("--microbatches", wanted.microbatches))
        missing = " and ".join(option for option, value in given if value is None)
        raise StrettoError(f"schedule {name} needs {missing}", hint=f"{name} --ranks 4 --microbatches 8")
    if "costs" in taken(name):
        options.setdefault("costs", wanted.costs)
    return generate(name, wanted.ranks, wanted.microbatches, **options)


def _compared(wanted: Wanted) -> list[Program]:
    """The programs of --compare; options outside it go to those that take them."""
    from stretto.program import options as taken

    if wanted.name is not None or wanted.file is not None:
        also = wanted.name or str(wanted.file)
        raise StrettoError(
            f"--compare is given, and {also} beside it", hint=f"write --compare {also},{wanted.compare}"
        )
    entries = [entry.strip() for entry in (wanted.compare or "").split(",") if entry.strip()]
    if not entries:
        raise StrettoError("--compare names no schedule", hint="write --compare gpipe,1f1b,zb-v")
    known = {entry: taken(entry.partition(":")[0]) for entry in entries}
    for option, value in wanted.options.items():
        if not any(option in each for each in known.values()):
            raise StrettoError(
                f"{option} is {value}, but none of the schedules to compare takes it",
                hint=f"leave {option} out",
            )
    programs: list[Program] = []
    for entry in entries:
        name, *pairs = entry.split(":")
        own = {key: value for key, value in wanted.options.items() if key in known[entry]}
        own.update(_pair(pair, f"--compare {name}") for pair in pairs)
        program = _program(wanted, name, own)
        programs.append(replace(program, name=entry) if pairs else program)
    return programs


def _pair(text: str, where: str) -> tuple[str, Any]:
    """An option's name, as its parameter is called, and its value."""
    key, mark, value = text.partition("=")
    if not mark or not key.strip() or not value.strip():
        raise StrettoError(f"{where} has {text!r}, must be NAME=VALUE", hint="write it as in waves=2")
    return key.strip().replace("-", "_"), _value(value.strip())


def _value(text: str) -> Any:
    """A truth value, a whole number, a number, or the text itself."""
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _limits(text: str) -> float | list[float]:
    """A memory limit: one number, or one a rank."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise StrettoError(
            f"memory is {text!r}, must be a number, or one for each rank", hint="write --memory 4 or 4,3,2,1"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _from_file(file: Path, name: str | None, ranks: int | None) -> Program:
    """The program in a file: JSON if it begins as an object does, else CSV."""
    from stretto.program.text import from_csv, from_json

    text = read_text(file)
    try:
        if text.lstrip("\ufeff \t\r\n").startswith("{"):
            program = from_json(text.removeprefix("\ufeff"))
            program = replace(program, name=name) if name else program
        else:
            program = from_csv(text, name=name or file.stem)
    except StrettoError as error:
        raise StrettoError(f"{file}: {error.message}", hint=error.hint) from None
    if ranks is not None and ranks != program.ranks:
        raise StrettoError(
            f"{file} has {program.ranks} ranks, --ranks is {ranks}",
            hint="leave --ranks out: the file says how many there are",
        )
    return program
