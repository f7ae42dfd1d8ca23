"""The checker: proves that a program does a step's work and comes to its end, or says why not.

Sends do not block and complete when the receive is posted (rendezvous); compute actions wait for their
messages; a reduction of tied parameters waits for all its members. Which message a receive gets depends on
the two orders alone, since channels are first in, first out; so one playing-out of the program decides for
all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

from stretto.schedule.action import Action, Kind
from stretto.schedule.memory import peak_activations, peak_held
from stretto.schedule.messages import Channel, channel_of, needed_by, receive_of, send_of, sent_by
from stretto.schedule.program import Program
from stretto.schedule.structure import ScheduleError, check_structure
from stretto.schedule.waits import Wait, tied_arrivals


@dataclass(frozen=True)
class Report:
    """What the checker found in a program that completes."""

    ranks: int
    stages: int
    actions: int
    transfers: int  # messages between ranks in one step
    peak_held: tuple[int, ...]  # per rank, most (stage, microbatch) activations held at once
    peak_activations: tuple[float, ...]  # the same in rank units: a microbatch through the whole rank is 1


def check(program: Program) -> Report:
    """Prove that every rank gets to the end of its order having done its work.

    Takes programs before lowering (messages implied by the placement) and after (messages as written).

    Raises:
        ScheduleError: naming the rank and the action that block or are wrong; for a deadlock, the circle of
            waits.
    """
    check_structure(program)
    position = {action: at for order in program.orders for at, action in enumerate(order)}
    for rank in range(program.ranks):
        _check_rank(program, rank, position)
        if program.lowered and program.trains:
            _check_reductions(program, rank)
    if program.lowered:
        _check_channels(program)
    _Run(program, position).play()
    return Report(
        program.ranks,
        program.stages,
        sum(map(len, program.orders)),
        sum(1 for action in position if action.kind.is_compute and sent_by(program, action)),
        tuple(peak_held(program)),
        tuple(peak_activations(program)),
    )


def _check_rank(program: Program, rank: int, position: Mapping[Action, int]) -> None:
    """What a rank needs from itself comes earlier in its own order."""
    for at, action in enumerate(program.orders[rank]):
        if action.kind.is_transfer:
            _check_transfer(program, f"rank {rank} action {at} is {action}", action)
        need = _own_need(program, action, position)
        if need is not None and position.get(need, at) >= at:
            when = f"reaches only after {action}" if need in position else "never does"
            raise ScheduleError(f"rank {rank} waits at {action} for {need}, which it {when}")


def _check_transfer(program: Program, where: str, action: Action) -> None:
    """A transfer stands in a lowered program, between stages on two ranks."""
    if not program.lowered:
        raise ScheduleError(f"{where}, but the program is not lowered")
    onward = action.kind in (Kind.SEND_F, Kind.RECV_B)
    neighbour = action.stage + (1 if onward else -1)
    if program.is_last(action.stage) if onward else program.is_first(action.stage):
        raise ScheduleError(f"{where}, but there is no stage {neighbour} in that copy of the model")
    if program.placement[neighbour] == program.placement[action.stage]:
        raise ScheduleError(f"{where}, but stage {neighbour} is on the same rank")


def _own_need(program: Program, action: Action, position: Mapping[Action, int]) -> Action | None:
    """What must come earlier in the rank's own order, beyond what `check_structure` sees to."""
    stage, kind, i = action
    if kind is Kind.SEND_F:
        return Action(stage, Kind.F, i)
    if kind is Kind.SEND_B:
        return _backward(position, stage, i)
    if receive := needed_by(program, action):
        return receive if program.lowered else None
    if kind is Kind.F and not program.is_first(stage):
        return Action(stage - 1, Kind.F, i)
    if kind in (Kind.B, Kind.I) and not program.is_last(stage):
        return _backward(position, stage + 1, i)
    return None


def _backward(position: Mapping[Action, int], stage: int, microbatch: int | None) -> Action:
    """The action that yields the gradient of the stage's input: its I where it has one, or else its B."""
    split = Action(stage, Kind.I, microbatch)
    return split if split in position else Action(stage, Kind.B, microbatch)


def _check_reductions(program: Program, rank: int) -> None:
    """Gradients are reduced once they are complete, and then once for each tied set of the stage."""
    for stage in program.stages_of(rank):
        mine = [(at, a.kind) for at, a in enumerate(program.orders[rank]) if a.stage == stage]
        last = max(at for at, kind in mine if kind in (Kind.B, Kind.W))
        reduced = [at for at, kind in mine if kind is Kind.REDUCE_GRAD]
        if len(reduced) != 1:
            raise ScheduleError(f"rank {rank} has {stage}REDUCE_GRAD {len(reduced)} times, must have it once")
        if reduced[0] < last:
            raise ScheduleError(f"rank {rank} has {stage}REDUCE_GRAD before {program.orders[rank][last]}")
        tied = [at for at, kind in mine if kind is Kind.REDUCE_TIED]
        sets = sum(stage in tie for tie in program.tied)
        if len(tied) != sets:
            raise ScheduleError(
                f"rank {rank} has {stage}REDUCE_TIED {len(tied)} times, must be {sets}: once a tied set"
            )
        if tied and tied[0] < reduced[0]:
            raise ScheduleError(f"rank {rank} has {stage}REDUCE_TIED before {stage}REDUCE_GRAD")


def _check_channels(program: Program) -> None:
    """On every channel, receives are posted in the order of the sends."""
    sends: dict[Channel, list[Action]] = defaultdict(list)
    receives: dict[Channel, list[Action]] = defaultdict(list)
    for order in program.orders:
        for action in order:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                sends[channel_of(program, action)].append(action)
            elif action.kind in (Kind.RECV_F, Kind.RECV_B):
                receives[channel_of(program, action)].append(action)
    for channel in sorted(sends.keys() | receives.keys()):
        source, destination, direction = channel
        for nth, (send, receive) in enumerate(zip_longest(sends[channel], receives[channel])):
            if send is None:
                fault = f"rank {destination} posts {receive}, but rank {source} has no {send_of(receive)}"
                raise ScheduleError(fault)
            if receive is None:
                fault = f"rank {source} does {send}, but rank {destination} has no {receive_of(send)}"
                raise ScheduleError(fault)
            if receive != receive_of(send):
                raise ScheduleError(
                    f"message {nth} in direction {direction} from rank {source} to rank {destination} "
                    f"is {send}, but the receive for it is {receive}",
                    hint="post receives in the order in which the other rank sends",
                )


class _Run:
    """A playing-out of the program without times: how far each rank is, and what it waits for."""

    def __init__(self, program: Program, position: Mapping[Action, int]) -> None:
        self.program = program
        self.position = position
        self.done = [0] * program.ranks
        self.tied = tied_arrivals(program) if program.lowered else {}

    def play(self) -> None:
        """Let every rank go on as far as it can.

        Raises:
            ScheduleError: some cannot get to the end of their orders.
        """
        going = list(range(self.program.ranks))
        sleepers: dict[int, list[int]] = defaultdict(list)
        while going:
            rank = going.pop()
            before = self.done[rank]
            wait = self._advance(rank)
            if wait is not None:
                sleepers[wait.rank].append(rank)
            if self.done[rank] > before:
                going.extend(sleepers.pop(rank, ()))
        for rank, order in enumerate(self.program.orders):
            if self.done[rank] < len(order):
                raise ScheduleError(self._circle(rank), hint="do one of the awaited actions earlier")

    def _advance(self, rank: int) -> Wait | None:
        """Move the rank on until it has to wait; what it waits for, None at its end."""
        for _ in range(len(self.program.orders[rank]) - self.done[rank]):
            if wait := self._wait(rank):
                return wait
            self.done[rank] += 1
        return None

    def _wait(self, rank: int) -> Wait | None:
        """What the rank waits for at its next action."""
        at, program = self.done[rank], self.program
        action = program.orders[rank][at]
        if receive := needed_by(program, action):
            source = send_of(receive)
            if not program.lowered:
                stage, kind, i = source
                forward = kind is Kind.SEND_F
                source = Action(stage, Kind.F, i) if forward else _backward(self.position, stage, i)
            wait = Wait(program.placement[source.stage], self.position[source] + 1, source)
            return wait if self.done[wait.rank] < wait.reach else None
        # a collective needs the others to have come to it, not to have done it
        waits = self.tied.get((rank, at), ())
        return next((wait for wait in waits if self.done[wait.rank] < wait.reach), None)

    def _circle(self, rank: int) -> str:
        """The waits from a stuck rank on, until one comes round again."""
        lines: dict[int, str] = {}
        while rank not in lines:
            here = self.program.orders[rank][self.done[rank]]
            wait = self._wait(rank)
            assert wait is not None, "only a rank that waits is stuck"
            blocked = self.program.orders[wait.rank][self.done[wait.rank]]
            lines[rank] = (
                f"rank {rank} waits at {here} for {wait.action}, "
                f"which rank {wait.rank} reaches only after {blocked}"
            )
            rank = wait.rank
        circle = list(lines)
        return "deadlock: " + "; ".join(lines[r] for r in circle[circle.index(rank) :])
