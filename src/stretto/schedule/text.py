"""Programs as text: single actions, torch's CSV, and JSON that keeps everything.

The CSV is that of torch.distributed.pipelining: a row a rank, a cell an action, "compute only" before
lowering and "compute + comms" after. It says nothing of names, parameters and tied sets; JSON does. torch
does not know `REDUCE_TIED` and `U`: for a file that torch reads, lower without tied sets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.schedule.action import Action, Kind
from stretto.schedule.check import check
from stretto.schedule.program import Program

FORMAT = "stretto.program"
VERSION = 1

# nine digits are plenty, and keep int() from endless input
_ACTION = re.compile(
    f"(0|[1-9][0-9]{{0,8}})({'|'.join(sorted(Kind, key=len, reverse=True))})(0|[1-9][0-9]{{0,8}})?"
)


def parse_action(text: str) -> Action:
    """The action written as `{stage}{kind}{microbatch}`, such as `2F0`, or `{stage}{kind}`, such as
    `0REDUCE_GRAD`.

    Raises:
        StrettoError: the text is not exactly one action.
    """
    found = _ACTION.fullmatch(text)
    if found is None:
        raise StrettoError(f"{text!r} is not an action", hint=_action_hint(text))
    stage, kind, microbatch = int(found[1]), Kind(found[2]), found[3]
    if (kind.is_compute or kind.is_transfer) and microbatch is None:
        raise StrettoError(f"{text!r} has no microbatch", hint=f"write {text}0 for microbatch 0")
    if microbatch is not None and not (kind.is_compute or kind.is_transfer or kind is Kind.UPDATE):
        raise StrettoError(f"{text!r} has a microbatch, but {kind} has none", hint=f"write {stage}{kind}")
    return Action(stage, kind, None if microbatch is None else int(microbatch))


def _action_hint(text: str) -> str:
    if text.startswith("("):
        return "overlapped pairs of actions are not supported; write the two as cells of their own"
    return f"write stage, kind, microbatch, as in 2F0; kinds are {', '.join(Kind)}"


def to_csv(program: Program) -> str:
    """A row a rank, a cell an action, in order; ends with a newline."""
    return "".join(",".join(map(str, order)) + "\n" for order in program.orders)


def from_csv(
    text: str,
    placement: Sequence[int] | None = None,
    name: str = "csv",
    lowered: bool | None = None,
    tied: Iterable[Iterable[int]] | None = None,
) -> Program:
    """Read torch's CSV, and check the program; empty cells (torch's idle slots) are left out.

    Args:
        text: the file's text.
        placement: rank of each stage; by default that of the row in which the stage stands.
        name: the program's name.
        lowered: whether communications are in it; by default whether there is any send or receive.
        tied: sets of stages that share a parameter; by default one set of all stages that have `REDUCE_TIED`.

    Raises:
        StrettoError: a cell that is no action, with its line and column; a stage in two rows.
        ScheduleError: the program cannot be run.
    """
    orders, holder = _rows(text)
    actions = [action for order in orders for action in order]
    if lowered is None:
        lowered = any(action.kind.is_transfer for action in actions)
    if tied is None:
        members = tuple(sorted({action.stage for action in actions if action.kind is Kind.REDUCE_TIED}))
        tied = (members,) if members else ()
    program = Program(
        name,
        tuple(placement) if placement is not None else tuple(holder[stage] for stage in range(len(holder))),
        1 + max((action.microbatch or 0 for action in actions), default=0),
        tuple(orders),
        tied=tuple(tuple(tie) for tie in tied),
        lowered=lowered,
        trains=any(action.kind in (Kind.B, Kind.I, Kind.W) for action in actions),
    )
    check(program)
    return program


def _rows(text: str) -> tuple[list[tuple[Action, ...]], dict[int, int]]:
    """Every line's order, and the line (from 0) that holds each stage."""
    orders: list[tuple[Action, ...]] = []
    holder: dict[int, int] = {}
    for rank, line in enumerate(text.removeprefix("\ufeff").splitlines()):
        order: list[Action] = []
        for column, action in _cells(line, rank + 1):
            first = holder.setdefault(action.stage, rank) + 1
            if first != rank + 1:
                where = f"line {rank + 1} column {column}"
                raise StrettoError(f"{where} has stage {action.stage}, which is in line {first} too")
            order.append(action)
        if not order:
            raise StrettoError(f"line {rank + 1} has no action", hint="write one line for every rank")
        orders.append(tuple(order))
    if not orders:
        raise StrettoError("the text has no action", hint="write one line for every rank, such as 0F0,0B0")
    missing = next((stage for stage in range(max(holder)) if stage not in holder), None)
    if missing is not None:
        raise StrettoError(f"stage {missing} has no action, but stage {max(holder)} has")
    return orders, holder


def _cells(line: str, number: int) -> Iterable[tuple[int, Action]]:
    """The actions of a line with their columns, counted from 1."""
    column = 1
    for cell in line.split(","):
        inner = cell.strip()
        if inner:
            at = column + len(cell) - len(cell.lstrip())
            try:
                yield at, parse_action(inner)
            except StrettoError as error:
                raise StrettoError(f"line {number} column {at}: {error.message}", hint=error.hint) from None
        column += len(cell) + 1


def to_json(program: Program) -> str:
    """All of a program as JSON, versioned; a line for every rank's order. `from_json` reads it."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": program.name,
        "placement": program.placement,
        "microbatches": program.microbatches,
        "parameters": dict(program.parameters),
        "tied": program.tied,
        "lowered": program.lowered,
        "trains": program.trains,
    }
    fields = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rows = ",\n".join("    " + json.dumps([str(action) for action in order]) for order in program.orders)
    return "{\n" + ",\n".join([*fields, f'  "orders": [\n{rows}\n  ]']) + "\n}\n"


def from_json(text: str) -> Program:
    """Read what `to_json` wrote, and check the program.

    Raises:
        StrettoError: no JSON (with line and column), another format or version, an unknown or missing field,
            a
            value of the wrong kind, text that is no action.
        ScheduleError: the program cannot be run.
    """
    fields = _fields(text)
    orders: list[tuple[Action, ...]] = []
    for rank, row in enumerate(_of(fields, "orders", list)):
        if not isinstance(row, list):
            raise StrettoError(f"orders[{rank}] is {row!r}, must be a list of actions")
        orders.append(tuple(_action_at(f"orders[{rank}][{at}]", cell) for at, cell in enumerate(row)))
    parameters = _of(fields, "parameters", dict)
    for key, value in parameters.items():
        _whole(f"parameters.{key}", value)
    tied = [_wholes(f"tied[{at}]", tie) for at, tie in enumerate(_of(fields, "tied", list))]
    program = Program(
        _of(fields, "name", str),
        _wholes("placement", fields["placement"]),
        _whole("microbatches", fields["microbatches"]),
        tuple(orders),
        parameters,
        tuple(tied),
        _of(fields, "lowered", bool),
        _of(fields, "trains", bool),
    )
    check(program)
    return program


_FIELDS = (
    "format",
    "version",
    "name",
    "placement",
    "microbatches",
    "parameters",
    "tied",
    "lowered",
    "trains",
    "orders",
)


def _fields(text: str) -> dict[str, Any]:
    """The object in the text, with exactly the fields of this version."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise StrettoError(
            f"line {error.lineno} column {error.colno}: {error.msg}", hint="is it JSON?"
        ) from None
    except (RecursionError, ValueError) as error:
        raise StrettoError(f"the text is no program: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StrettoError(f"the text is no program: it has no field format={FORMAT!r}")
    if found.get("version") != VERSION:
        raise StrettoError(f"version is {found.get('version')!r}, must be {VERSION}", hint="write it anew")
    for key in found:
        if key not in _FIELDS:
            close = nearest(key, _FIELDS)
            raise StrettoError(f"unknown field {key!r}", hint=f"did you mean {close!r}?" if close else None)
    for key in _FIELDS:
        if key not in found:
            raise StrettoError(f"field {key!r} is missing", hint=f"fields are {', '.join(_FIELDS)}")
    return found


def _of(fields: dict[str, Any], key: str, kind: type) -> Any:
    value = fields[key]
    if not isinstance(value, kind):
        raise StrettoError(f"{key} is {value!r}, must be a {kind.__name__}")
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StrettoError(f"{name} is {value!r}, must be a whole number >= 0")
    return value


def _wholes(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise StrettoError(f"{name} is {values!r}, must be a list of whole numbers")
    return tuple(_whole(f"{name}[{at}]", value) for at, value in enumerate(values))


def _action_at(name: str, cell: Any) -> Action:
    if not isinstance(cell, str):
        raise StrettoError(f"{name} is {cell!r}, must be an action such as '0F0'")
    try:
        return parse_action(cell)
    except StrettoError as error:
        raise StrettoError(f"{name}: {error.message}", hint=error.hint) from None
