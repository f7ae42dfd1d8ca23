"""Programs as lossless JSON; docs/reference/program-format.md describes every field."""

from __future__ import annotations

import json
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.program.action import Action
from stretto.program.checks.check import check
from stretto.program.program import Program
from stretto.program.text.actions import parse_action
from stretto.versions import PROGRAM


def to_json(program: Program) -> str:
    """Return a program as versioned JSON, with a line for every rank's order. `from_json` reads it."""
    head = {
        "format": PROGRAM.name,
        "version": PROGRAM.version,
        "name": program.name,
        "placement": program.placement,
        "microbatches": program.microbatches,
        "parameters": dict(program.parameters),
        "tied": program.tied,
        "lowered": program.lowered,
        "trains": program.trains,
        "copies": program.copies,
        "pairs": sorted([str(first), str(second)] for first, second in program.pairs),
        "versions": program.versions,
        "steps": program.steps,
    }
    fields = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rows = ",\n".join("    " + json.dumps([str(action) for action in order]) for order in program.orders)
    return "{\n" + ",\n".join([*fields, f'  "orders": [\n{rows}\n  ]']) + "\n}\n"


def from_json(text: str) -> Program:
    """Read the JSON of this or an earlier version of `to_json`, and check the program.

    Raises:
        StrettoError: the text is not JSON (with line and column), has another format or version, an unknown
            or missing field, a value of the wrong type, or text that is not an action.
        ScheduleError: the program is invalid.
    """
    fields = _fields(text)
    orders: list[tuple[Action, ...]] = []
    for rank, row in enumerate(_of(fields, "orders", list)):
        if not isinstance(row, list):
            raise StrettoError(f"orders[{rank}] is {row!r}, must be a list of actions")
        orders.append(tuple(_action_at(f"orders[{rank}][{at}]", cell) for at, cell in enumerate(row)))
    parameters = _of(fields, "parameters", dict)
    for key, value in parameters.items():
        _integer(f"parameters.{key}", value)
    program = Program(
        name=_of(fields, "name", str),
        placement=_integers("placement", fields["placement"]),
        microbatches=_integer("microbatches", fields["microbatches"]),
        orders=tuple(orders),
        parameters=parameters,
        tied=_integer_rows(fields, "tied"),
        lowered=_of(fields, "lowered", bool),
        trains=_of(fields, "trains", bool),
        copies=_integer("copies", fields["copies"]),
        pairs=frozenset(_pair(f"pairs[{at}]", pair) for at, pair in enumerate(_of(fields, "pairs", list))),
        versions=_integer_rows(fields, "versions"),
        steps=_integer("steps", fields["steps"]),
    )
    check(program)
    return program


# fields that later versions added, with the values of older files
_SECOND: dict[str, Any] = {"copies": 1, "pairs": [], "versions": []}
_THIRD: dict[str, Any] = {"steps": 1}
_FIRST = ("format", "version", "name", "placement", "microbatches", "parameters", "tied", "lowered", "trains")
_FIELDS = {
    1: (*_FIRST, "orders"),
    2: (*_FIRST, *_SECOND, "orders"),
    3: (*_FIRST, *_SECOND, *_THIRD, "orders"),
}


def _fields(text: str) -> dict[str, Any]:
    """Parse the object, which must have exactly the fields of its version, and add the defaults of later
    ones.
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise StrettoError(
            f"line {error.lineno} column {error.colno}: {error.msg}", hint="is it JSON?"
        ) from None
    except (RecursionError, ValueError) as error:
        raise StrettoError(f"the text is no program: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != PROGRAM.name:
        raise StrettoError(f"the text is no program: it has no field format={PROGRAM.name!r}")
    allowed = _FIELDS[PROGRAM.check(fields.get("version"), "the text")]
    for key in fields:
        if key not in allowed:
            close = nearest(key, allowed)
            raise StrettoError(f"unknown field {key!r}", hint=f"did you mean {close!r}?" if close else None)
    for key in allowed:
        if key not in fields:
            raise StrettoError(f"field {key!r} is missing", hint=f"fields are {', '.join(allowed)}")
    return {**_SECOND, **_THIRD, **fields}


def _of(fields: dict[str, Any], key: str, kind: type) -> Any:
    value = fields[key]
    if not isinstance(value, kind):
        raise StrettoError(f"{key} is {value!r}, must be a {kind.__name__}")
    return value


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StrettoError(f"{name} is {value!r}, must be a whole number >= 0")
    return value


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise StrettoError(f"{name} is {values!r}, must be a list of whole numbers")
    return tuple(_integer(f"{name}[{at}]", value) for at, value in enumerate(values))


def _integer_rows(fields: dict[str, Any], key: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_integers(f"{key}[{at}]", row) for at, row in enumerate(_of(fields, key, list)))


def _pair(name: str, pair: Any) -> tuple[Action, Action]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise StrettoError(f"{name} is {pair!r}, must be a forward and a backward, such as ['0F1', '0B0']")
    return _action_at(f"{name}[0]", pair[0]), _action_at(f"{name}[1]", pair[1])


def _action_at(name: str, cell: Any) -> Action:
    if not isinstance(cell, str):
        raise StrettoError(f"{name} is {cell!r}, must be an action such as '0F0'")
    try:
        return parse_action(cell)
    except StrettoError as error:
        raise StrettoError(f"{name}: {error.message}", hint=error.hint) from None
