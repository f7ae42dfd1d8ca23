"""Actions in words, for people who ask what a rank is doing."""

from __future__ import annotations

from stretto.program.action import Action, Kind

_OF_A_STAGE = {
    Kind.UPDATE: "optimizer step of stage {stage}",
    Kind.REDUCE_GRAD: "reduction of the gradients of stage {stage}",
    Kind.REDUCE_TIED: "sum of the gradients that stages share",
    Kind.UNSHARD: "gathering the weights of stage {stage}",
    Kind.RESHARD: "releasing the weights of stage {stage}",
}
_MESSAGES = {
    Kind.SEND_F: ("send F", "to", 1),
    Kind.RECV_F: ("recv F", "from", -1),
    Kind.SEND_B: ("send B", "to", -1),
    Kind.RECV_B: ("recv B", "from", 1),
}


def in_words(action: Action, microbatches: int) -> str:
    """Such as `recv F of microbatch 3 from stage 1`, with the microbatch's number within its step."""
    stage, kind, number = action
    if kind in _OF_A_STAGE:
        return _OF_A_STAGE[kind].format(stage=stage)
    microbatch = "?" if number is None else number % microbatches
    if kind in _MESSAGES:
        what, direction, beside = _MESSAGES[kind]
        return f"{what} of microbatch {microbatch} {direction} stage {stage + beside}"
    return f"{kind} of microbatch {microbatch} on stage {stage}"
