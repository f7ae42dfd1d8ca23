"""Descriptions of actions, for reports of what a rank is doing."""

from __future__ import annotations

from stretto.program.action import Action, ActionKind

_OF_A_STAGE = {
    ActionKind.UPDATE: "optimizer step of stage {stage}",
    ActionKind.REDUCE_GRAD: "reduction of the gradients of stage {stage}",
    ActionKind.REDUCE_TIED: "sum of the gradients that stages share",
    ActionKind.UNSHARD: "gathering the weights of stage {stage}",
    ActionKind.RESHARD: "releasing the weights of stage {stage}",
}
_MESSAGES = {
    ActionKind.SEND_F: ("send F", "to", 1),
    ActionKind.RECV_F: ("recv F", "from", -1),
    ActionKind.SEND_B: ("send B", "to", -1),
    ActionKind.RECV_B: ("recv B", "from", 1),
}


def in_words(action: Action, microbatches: int) -> str:
    """Describe an action, such as `recv F of microbatch 3 from stage 1`; microbatches are counted within
    their step.
    """
    stage, kind, number = action
    if kind in _OF_A_STAGE:
        return _OF_A_STAGE[kind].format(stage=stage)
    microbatch = "?" if number is None else number % microbatches
    if kind in _MESSAGES:
        name, direction, offset = _MESSAGES[kind]
        return f"{name} of microbatch {microbatch} {direction} stage {stage + offset}"
    return f"{kind} of microbatch {microbatch} on stage {stage}"
