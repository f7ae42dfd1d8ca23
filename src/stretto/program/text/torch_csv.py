"""Programs as torch's CSV."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind
from stretto.program.checks.check import check
from stretto.program.pairing import as_blocks, check_pairs
from stretto.program.program import Program, ScheduleError
from stretto.program.text.actions import parse_cell, write_pair

# torch 2.15 waits for sends and reductions by actions of their own
_WAIT = re.compile(r"\d+WAIT_(SEND_F|SEND_B|REDUCE_GRAD)\d*")


def to_csv(program: Program, waits: bool = False) -> str:
    """Return the CSV: a row per rank, a cell per action, in order, with a newline at the end.

    An overlapped pair is one cell, `(4F0;1B3)OVERLAP_F_B`: receives that a lowered program has between the
    two come before it, sends after it.

    torch's runtime supports F, B, I, W, the transfers, `UNSHARD`, `RESHARD`, `REDUCE_GRAD`, pairs and one
    copy of the weights, but not `U`, `REDUCE_TIED`, `RECOMPUTE`, `OFFLOAD` and `RELOAD`. The boundaries of
    steps in an asynchronous window are not in the CSV either.

    Args:
        waits: of a lowered program, write the waits that torch 2.15 asks for, and older versions refuse: for
            a reduction, at once; for a send forward, after the backward of the same stage and microbatch; for
            other sends, at the end.

    Raises:
        ScheduleError: a pair is not in the program.
    """
    check_pairs(program)
    rows = [",".join(_written(program, order, waits)) for order in as_blocks(program).orders]
    return "".join(row + "\n" for row in rows)


def exact_csv(program: Program) -> str:
    """Return the CSV of a program that is not lowered, if `from_csv` reads the same program from it.

    Raises:
        StrettoError: the CSV does not tell all of the program.
    """
    text = to_csv(program)
    try:
        again = from_csv(text, name=program.name)
    except StrettoError:
        again = None
    if again is None or replace(again, parameters=program.parameters) != program:
        raise StrettoError(
            f"CSV holds orders only, and {program.name} has several copies of the model, or weight versions "
            "that orders do not tell",
            hint="JSON holds all of it",
        )
    return text


_TORCH = frozenset(ActionKind) - {
    ActionKind.UPDATE,
    ActionKind.REDUCE_TIED,
    ActionKind.RECOMPUTE,
    ActionKind.OFFLOAD,
    ActionKind.RELOAD,
}


def check_torch(program: Program) -> None:
    """Check that the runtime of torch.distributed.pipelining (`_PipelineScheduleRuntime`, torch 2.11 to 2.15)
    supports the program.

    Raises:
        StrettoError: it lacks an action or feature, which the message names.
    """
    fix = "a synchronous schedule with one copy, such as 1f1b or zb-v"
    if not program.trains:
        raise StrettoError(
            f"{program.name} has forwards only, torch.distributed.pipelining refuses a CSV without backwards",
            hint=fix,
        )
    if program.copies > 1:
        raise StrettoError(
            f"{program.name} has {program.copies} copies of the model, and torch.distributed.pipelining one: "
            "a stage is on one rank, and takes all microbatches",
            hint=fix,
        )
    for order in program.orders:
        for action in order:
            if action.kind is ActionKind.UPDATE:
                raise StrettoError(
                    f"{program.name} updates weights within the step ({action}), and "
                    "torch.distributed.pipelining has no such action: its optimizer steps after the schedule",
                    hint=fix,
                )
            if action.kind not in _TORCH:
                raise StrettoError(
                    f"{program.name} has {action}, torch.distributed.pipelining has no action {action.kind}",
                    hint="write the schedule's own program, without it",
                )


def _written(program: Program, order: Sequence[Action], waits: bool) -> Iterable[str]:
    partner = dict(program.pairs)
    sent: dict[tuple[ActionKind, int, int | None], str] = {}
    second: Action | None = None  # already written with its first
    for action in order:
        if action == second:
            second = None
            continue
        second = partner.get(action)
        yield str(action) if second is None else write_pair(action, second)
        if waits:
            stage, kind, i = action
            if kind is ActionKind.REDUCE_GRAD:
                yield f"{stage}WAIT_REDUCE_GRAD"
            elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                sent[kind, stage, i] = f"{stage}WAIT_{kind}{i}"
            stage, kind, i = second or action
            if kind in (ActionKind.B, ActionKind.I) and (ActionKind.SEND_F, stage, i) in sent:
                yield sent.pop((ActionKind.SEND_F, stage, i))
    yield from sent.values()


def from_csv(
    text: str,
    placement: Sequence[int] | None = None,
    name: str = "csv",
    lowered: bool | None = None,
    tied: Iterable[Iterable[int]] | None = None,
    copies: int = 1,
    versions: Iterable[Iterable[int]] | None = None,
    steps: int = 1,
) -> Program:
    """Read torch's CSV, and check the program; empty cells (torch's idle slots) and the waits of torch 2.15
    are left out.

    Args:
        text: the file's text.
        placement: rank of each stage; by default the row in which the stage appears.
        name: the program's name.
        lowered: the text has communications; by default true if it has any send or receive.
        tied: sets of stages that share a parameter; by default one set of all stages that have `REDUCE_TIED`.
        copies: copies of the weights; stages are numbered copy after copy.
        versions: `Program.versions`; by default each forward uses the newest weights, if the text has any
            `U`.
        steps: training steps of the window, all with the same number of microbatches.

    Raises:
        StrettoError: a cell is not an action (with line and column), or a stage is in two rows.
        ScheduleError: the program is invalid.
    """
    orders, pairs, holder = _rows(text)
    actions = [action for order in orders for action in order]
    if lowered is None:
        lowered = any(action.kind.is_transfer for action in actions)
    if tied is None:
        members = tuple(sorted({action.stage for action in actions if action.kind is ActionKind.REDUCE_TIED}))
        tied = (members,) if members else ()
    microbatches = 1 + max((action.microbatch or 0 for action in actions), default=0)
    if versions is None:
        versions = _newest(orders, len(holder), microbatches)
    program = Program(
        name=name,
        placement=tuple(placement)
        if placement is not None
        else tuple(holder[stage] for stage in range(len(holder))),
        microbatches=microbatches,
        orders=tuple(orders),
        tied=tuple(tuple(tie) for tie in tied),
        lowered=lowered,
        trains=any(action.kind in (ActionKind.B, ActionKind.I, ActionKind.W) for action in actions),
        copies=copies,
        pairs=frozenset(pairs),
        versions=tuple(tuple(row) for row in versions),
        steps=steps,
    )
    _check_shifted(orders)
    check(program)
    return program


def _newest(orders: Sequence[Sequence[Action]], stages: int, microbatches: int) -> list[list[int]]:
    """Return the versions if every forward uses the newest weights; empty without `U`."""
    actions = [action for order in orders for action in order]
    # a number from a file may be huge; `check` then reports too few actions
    if microbatches > len(actions) or not any(action.kind is ActionKind.UPDATE for action in actions):
        return []
    rows, updates = [[0] * microbatches for _ in range(stages)], [0] * stages
    for stage, kind, i in actions:
        if kind is ActionKind.F and i is not None:
            rows[stage][i] = updates[stage]
        updates[stage] += kind is ActionKind.UPDATE
    return rows


def _check_shifted(orders: Sequence[Sequence[Action]]) -> None:
    """Report the wrong order that torch 2.13's Schedule1F1B exports for its last rank."""
    for rank, order in enumerate(orders):
        forward = sorted(a.microbatch for a in order if a.kind is ActionKind.F and a.microbatch is not None)
        backward = sorted(a.microbatch for a in order if a.kind is ActionKind.B and a.microbatch is not None)
        if backward and backward[0] == 0 and forward == [i + 1 for i in backward]:
            raise ScheduleError(
                f"line {rank + 1} has forwards of microbatches 1 to {forward[-1]}, "
                f"but backwards of 0 to {backward[-1]}",
                hint="torch's Schedule1F1B exports this for its last rank, and runs another order: "
                "number the line's forwards from 0",
            )


_Pair = tuple[Action, Action]


def _rows(text: str) -> tuple[list[tuple[Action, ...]], list[_Pair], dict[int, int]]:
    """Return every line's order, all overlapped pairs, and the line (from 0) of each stage."""
    orders: list[tuple[Action, ...]] = []
    pairs: list[_Pair] = []
    holder: dict[int, int] = {}
    for rank, line in enumerate(text.removeprefix("\ufeff").splitlines()):
        order: list[Action] = []
        for column, cell in _cells(line, rank + 1):
            for action in cell:
                first = holder.setdefault(action.stage, rank) + 1
                if first != rank + 1:
                    location = f"line {rank + 1} column {column}"
                    raise StrettoError(f"{location} has stage {action.stage}, which is in line {first} too")
            order += cell
            if len(cell) == 2:
                pairs.append((cell[0], cell[1]))
        if not order:
            raise StrettoError(f"line {rank + 1} has no action", hint="write one line for every rank")
        orders.append(tuple(order))
    if not orders:
        raise StrettoError("the text has no action", hint="write one line for every rank, such as 0F0,0B0")
    missing = next((stage for stage in range(max(holder)) if stage not in holder), None)
    if missing is not None:
        raise StrettoError(f"stage {missing} has no action, but stage {max(holder)} has")
    return orders, pairs, holder


def _cells(line: str, number: int) -> Iterable[tuple[int, list[Action]]]:
    """Yield the cells of a line with their columns, counted from 1."""
    column = 1
    for cell in line.split(","):
        inner = cell.strip()
        if inner and not _WAIT.fullmatch(inner):
            at = column + len(cell) - len(cell.lstrip())
            try:
                yield at, parse_cell(inner)
            except StrettoError as error:
                raise StrettoError(f"line {number} column {at}: {error.message}", hint=error.hint) from None
        column += len(cell) + 1
