"""The checker: proves that a program does the work of a step without deadlock, or reports the error."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from stretto.program.action import Action, ActionKind
from stretto.program.checks.structure import check_structure
from stretto.program.checks.transport import backward_of, check_transport
from stretto.program.checks.versions import weight_delays, weight_versions
from stretto.program.memory import peak_activations, peak_held, peak_inputs
from stretto.program.messages import Channel, channel_of, needed_by, receive_of, send_of, sent_by
from stretto.program.program import Program, ScheduleError


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Properties of a program that the checker accepts."""

    ranks: int
    stages: int
    actions: int
    transfers: int  # messages between ranks in one step
    peak_held: tuple[int, ...]  # per rank, peak number of (stage, microbatch) activations
    peak_activations: tuple[float, ...]  # the same in rank units: a microbatch through the whole rank is 1
    peak_inputs: tuple[int, ...]  # per rank, peak number of (stage, microbatch) with only the input held
    weight_versions: tuple[int, ...]  # per stage, peak number of versions of its weights; 1: synchronous
    # per stage and microbatch, updates between its F and the U that applies it
    weight_delays: tuple[tuple[int, ...], ...]


def check(program: Program, transport: str = "rendezvous") -> CheckReport:
    """Prove that a program runs (`prove`); return its properties.

    Raises:
        ScheduleError, StrettoError: as `prove`.
    """
    prove(program, transport)
    computes = [action for order in program.orders for action in order if action.kind.is_compute]
    return CheckReport(
        ranks=program.ranks,
        stages=program.stages,
        actions=sum(map(len, program.orders)),
        transfers=sum(1 for action in computes if sent_by(program, action)),
        peak_held=tuple(peak_held(program)),
        peak_activations=tuple(peak_activations(program)),
        peak_inputs=tuple(peak_inputs(program)),
        weight_versions=weight_versions(program),
        weight_delays=weight_delays(program),
    )


def prove(program: Program, transport: str = "rendezvous") -> None:
    """Prove that every rank completes its order, and that together they do the work of one step.

    Accepts programs before lowering (messages implied by the placement) and after (explicit messages).
    Overlapped pairs must work both as two consecutive actions and as one block.

    Args:
        program: any program.
        transport: behaviour of transfers, one of the five of
            `stretto.program.checks.transport.check_transport`.

    Raises:
        ScheduleError: naming the rank and the action that block or are wrong; for a deadlock, the cycle of
            waits.
        StrettoError: the transport does not exist.
    """
    check_structure(program)
    position = {action: at for order in program.orders for at, action in enumerate(order)}
    for rank, order in enumerate(program.orders):
        needs = dict[tuple[int, ActionKind], Action | None]()  # of a stage and kind, without a microbatch
        for at, action in enumerate(order):
            stage, kind, i = action
            if (stage, kind) not in needs:
                if kind.is_transfer:
                    _check_ends(program, f"rank {rank} action {at} is {action}", stage, kind)
                needs[stage, kind] = _local_dependency(program, stage, kind)
            # inputs from its own rank come earlier in that rank's order
            if (source := needs[stage, kind]) is None:
                continue
            backward = source.kind is ActionKind.B
            need = backward_of(position, source.stage, i) if backward else source._replace(microbatch=i)
            if position.get(need, at) >= at:
                when = f"reaches only after {action}" if need in position else "never does"
                error = ScheduleError(f"rank {rank} waits at {action} for {need}, which it {when}")
                error.cycle = ((action, need),)
                raise error
    if program.lowered:
        if program.trains:
            check_reductions(program)
        _check_channels(program, transport)
    stuck: ScheduleError | None = None
    if program.pairs:
        try:
            check_transport(program, transport, blocks=True)
        except ScheduleError as error:
            stuck = ScheduleError(
                f"with each pair as one block: {error.message}",
                hint="leave one of these pairs out of `pairs`",
            )
    # before lowering, a program waits for less without blocks than with them
    if program.lowered or stuck or not program.pairs:
        check_transport(program, transport)
    if stuck:
        raise stuck


def _check_ends(program: Program, location: str, stage: int, kind: ActionKind) -> None:
    """Check that a transfer is in a lowered program, and between stages on two ranks."""
    if not program.lowered:
        raise ScheduleError(f"{location}, but the program is not lowered")
    onward = kind in (ActionKind.SEND_F, ActionKind.RECV_B)
    neighbour = stage + (1 if onward else -1)
    if program.is_last(stage) if onward else program.is_first(stage):
        raise ScheduleError(f"{location}, but there is no stage {neighbour} in that copy of the model")
    if program.placement[neighbour] == program.placement[stage]:
        raise ScheduleError(f"{location}, but stage {neighbour} is on the same rank")


def _local_dependency(program: Program, stage: int, kind: ActionKind) -> Action | None:
    """Return what must come earlier in the same rank's order for the same microbatch (its B stands for the I,
    if it has one), or None; `check_structure` covers other dependencies.
    """
    if kind is ActionKind.SEND_F:
        return Action(stage, ActionKind.F)
    if kind is ActionKind.SEND_B:
        return Action(stage, ActionKind.B)
    if receive := needed_by(program, Action(stage, kind)):
        return receive if program.lowered else None
    if kind is ActionKind.F and not program.is_first(stage):
        return Action(stage - 1, ActionKind.F)
    if kind in (ActionKind.B, ActionKind.I) and not program.is_last(stage):
        return Action(stage + 1, ActionKind.B)
    return None


def _check_channels(program: Program, transport: str) -> None:
    """Check that receives are posted in the order of the sends on every channel.

    If both directions share a communicator, all messages from one rank to another are one sequence.
    """
    shared = transport in ("paired", "batched")
    sends: dict[Channel, list[Action]] = defaultdict(list)
    receives: dict[Channel, list[Action]] = defaultdict(list)
    for order in program.orders:
        for action in order:
            if not action.kind.is_transfer:
                continue
            source, destination, direction = channel_of(program, action)
            channel = source, destination, ActionKind.F if shared else direction
            side = sends if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B) else receives
            side[channel].append(action)
    for channel in sorted(sends.keys() | receives.keys()):
        source, destination, direction = channel
        way = "" if shared else f" in direction {direction}"
        for nth, (send, receive) in enumerate(zip_longest(sends[channel], receives[channel])):
            if send is None:
                problem = f"rank {destination} posts {receive}, but rank {source} has no {send_of(receive)}"
                raise ScheduleError(problem)
            if receive is None:
                problem = f"rank {source} does {send}, but rank {destination} has no {receive_of(send)}"
                raise ScheduleError(problem)
            if receive != receive_of(send):
                raise ScheduleError(
                    f"message {nth}{way} from rank {source} to rank {destination} is {send}, "
                    f"but the receive for it is {receive}",
                    hint="post receives in the order in which the other rank sends",
                )


def check_reductions(program: Program) -> None:
    """Check the reductions of a lowered program that trains.

    - synchronous: `REDUCE_GRAD` once for each stage that has a backward, after its last B or W; then
      `REDUCE_TIED` once for each tied set of the stage, after the stage's own reduction. With several copies
      of the weights, the copies of every stage are a tied set.
    - asynchronous: `REDUCE_GRAD` right before each `U` of its stage and nowhere else; no tied sets and no
      copies, since stages would apply their shares of one parameter's gradient at different times.

    Raises:
        ScheduleError: naming the rank and the action.
    """
    if program.versions and (program.tied or program.copies > 1):
        cause = f"tied set {program.tied[0]}" if program.tied else f"{program.copies} copies"
        raise ScheduleError(f"the program has {cause} and weights that change within the step")
    if program.copies > 1:
        sets = {frozenset(tie) for tie in program.tied}
        for stage in range(program.depth):
            copies = tuple(range(stage, program.stages, program.depth))
            if frozenset(copies) not in sets:
                raise ScheduleError(
                    f"copies {copies} of stage {stage} are no tied set: their gradients differ"
                )
    for rank in range(program.ranks):
        for stage in program.stages_of(rank):
            if program.versions:
                _check_updates(program, rank, stage)
            else:
                _check_stage(program, rank, stage)


def _check_updates(program: Program, rank: int, stage: int) -> None:
    """Check REDUCE_GRAD and U of one stage of an asynchronous program."""
    order = program.orders[rank]
    for at, action in enumerate(order):
        if action.stage != stage:
            continue
        reduce = Action(stage, ActionKind.REDUCE_GRAD)
        if action.kind is ActionKind.UPDATE and (at == 0 or order[at - 1] != reduce):
            raise ScheduleError(f"rank {rank} has no {reduce} right before {action}")
        if action == reduce:
            after = order[at + 1] if at + 1 < len(order) else None
            if after is None or (after.stage, after.kind) != (stage, ActionKind.UPDATE):
                raise ScheduleError(f"rank {rank} has {reduce}, but no U of stage {stage} right after it")
        if action.kind is ActionKind.REDUCE_TIED:
            raise ScheduleError(f"rank {rank} has {action} 1 times, must be 0: once a tied set")


def _check_stage(program: Program, rank: int, stage: int) -> None:
    """Check the reductions of one stage at the end of a synchronous step."""
    order = program.orders[rank]
    actions = [(at, a.kind) for at, a in enumerate(order) if a.stage == stage]
    # a copy without microbatches has no gradients to reduce, but joins the sum over copies
    last = max((at for at, kind in actions if kind in (ActionKind.B, ActionKind.W)), default=-1)
    reduced = [at for at, kind in actions if kind is ActionKind.REDUCE_GRAD]
    times = int(last >= 0)
    if len(reduced) != times:
        must = "must have it once" if times else "but has no gradient of that stage"
        raise ScheduleError(f"rank {rank} has {stage}REDUCE_GRAD {len(reduced)} times, {must}")
    if reduced and reduced[0] < last:
        raise ScheduleError(f"rank {rank} has {stage}REDUCE_GRAD before {order[last]}")
    tied = [at for at, kind in actions if kind is ActionKind.REDUCE_TIED]
    sets = sum(stage in tie for tie in program.tied)
    if len(tied) != sets:
        raise ScheduleError(
            f"rank {rank} has {stage}REDUCE_TIED {len(tied)} times, must be {sets}: once a tied set"
        )
    if tied and reduced and tied[0] < reduced[0]:
        raise ScheduleError(f"rank {rank} has {stage}REDUCE_TIED before {stage}REDUCE_GRAD")
