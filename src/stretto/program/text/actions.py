"""One action as text, and one cell of a CSV row."""

from __future__ import annotations

import re

from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind

# nine digits suffice, and bound the input of int()
_ACTION = re.compile(
    f"(0|[1-9][0-9]{{0,8}})({'|'.join(sorted(ActionKind, key=len, reverse=True))})(0|[1-9][0-9]{{0,8}})?"
)


def parse_action(text: str) -> Action:
    """Parse an action: `{stage}{kind}{microbatch}`, such as `2F0`, or `{stage}{kind}`, such as
    `0REDUCE_GRAD`.

    Raises:
        StrettoError: the text is not exactly one action.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise StrettoError(f"{text!r} is not an action", hint=_action_hint(text))
    stage = int(match[1])
    kind = ActionKind(match[2])
    microbatch = match[3]
    if kind.has_microbatch and microbatch is None:
        raise StrettoError(f"{text!r} has no microbatch", hint=f"write {text}0 for microbatch 0")
    if microbatch is not None and not (kind.has_microbatch or kind is ActionKind.UPDATE):
        raise StrettoError(f"{text!r} has a microbatch, but {kind} has none", hint=f"write {stage}{kind}")
    return Action(stage, kind, None if microbatch is None else int(microbatch))


def _action_hint(text: str) -> str:
    if text.startswith("("):
        return "an overlapped pair is a cell of CSV: (4F0;1B3)OVERLAP_F_B"
    return f"write stage, kind, microbatch, as in 2F0; kinds are {', '.join(ActionKind)}"


_OVERLAP = "OVERLAP_F_B"


def parse_cell(text: str) -> list[Action]:
    """Parse a cell: a single action, or the forward and the backward of `(4F0;1B3)OVERLAP_F_B`.

    Raises:
        StrettoError: the text is neither.
    """
    if not text.startswith("("):
        return [parse_action(text)]
    inner, closed, kind = text[1:].partition(")")
    parts = inner.split(";")
    if not closed or kind != _OVERLAP or len(parts) != 2:
        raise StrettoError(f"{text!r} is not an overlapped pair", hint=f"write (4F0;1B3){_OVERLAP}")
    pair = [parse_action(part.strip()) for part in parts]
    if pair[0].kind is not ActionKind.F or pair[1].kind not in (ActionKind.B, ActionKind.I):
        raise StrettoError(
            f"{text!r} is not a forward and a backward", hint=f"write (4F0;1B3){_OVERLAP}, the forward first"
        )
    return pair


def write_pair(first: Action, second: Action) -> str:
    """Return the cell of an overlapped pair."""
    return f"({first};{second}){_OVERLAP}"
