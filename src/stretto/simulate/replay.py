"""Replay a program against costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import itemgetter
from typing import NamedTuple

from stretto.schedule.action import TRANSFER, Action, Kind
from stretto.schedule.check import check
from stretto.schedule.messages import needed_by, sent_by
from stretto.schedule.program import Program
from stretto.schedule.structure import ScheduleError
from stretto.schedule.waits import Wait, tied_arrivals
from stretto.simulate.costs import Costs
from stretto.simulate.timeline import Timeline

_NEVER = -1.0


class _Step(NamedTuple):
    """What an action of one stage and kind does, whatever its microbatch; lists are by microbatch."""

    cost: float
    need: list[float] | None  # when the input is ready on its own rank, or is sent
    post: list[float] | None  # when the receive is posted, in a lowered program
    delay: float  # of the input on its way
    source: int  # rank that the input comes from
    done: list[float]  # where the action notes its end


def simulate(program: Program, costs: Costs | None = None) -> Timeline:
    """When every action of `program` starts and ends, each rank working through its order without a pause.

    Transfers take `costs.hop` and cost the ranks nothing. Before lowering they start when the result is
    there; in a lowered program when it has been sent and its receive is posted (rendezvous). Reductions take
    no time, but ranks that reduce tied parameters wait for one another.

    Raises:
        ScheduleError: the program comes to a standstill; names ranks and actions.
    """
    costs = costs or Costs()
    play = _Play(program, costs)
    play.run()
    if any(len(starts) < len(order) for starts, order in zip(play.starts, program.orders, strict=True)):
        check(program)  # says why
        raise ScheduleError(f"program {program.name!r} comes to a standstill")
    if program.lowered:
        play.end_transfers()
    times, work, transfers = costs.of_stages(program), [0.0] * program.ranks, 0
    for rank, order in enumerate(program.orders):
        for (stage, kind), count in Counter(map(itemgetter(0, 1), order)).items():
            work[rank] += count * times[stage].get(kind, 0.0)
            transfers += count * (sent_by(program, Action(stage, kind, 0)) is not None)
    return Timeline(program, tuple(play.starts), tuple(play.ends), tuple(work), transfers)


class _Play:
    """The state of a replay."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.hop = costs.hop
        self.clock = [0.0] * program.ranks
        self.starts: list[list[float]] = [[] for _ in range(program.ranks)]
        self.ends: list[list[float]] = [[] for _ in range(program.ranks)]
        # when each stage's F, I, W, sends and receives of each microbatch were done; B counts as I
        self.done: dict[tuple[int, Kind], list[float]] = defaultdict(lambda: [_NEVER] * program.microbatches)
        self.steps = self._steps(costs)
        self.tied = tied_arrivals(program) if program.lowered else {}

    def _steps(self, costs: Costs) -> list[dict[Kind, _Step]]:
        """Per stage, the step of every kind that has a microbatch."""
        steps: list[dict[Kind, _Step]] = []
        for stage, times in enumerate(costs.of_stages(self.program)):
            found = {kind: self._compute_step(stage, kind, cost) for kind, cost in times.items()}
            for kind in TRANSFER:
                found[kind] = _Step(0.0, None, None, 0.0, 0, self.done[stage, kind])
            steps.append(found)
        return steps

    def _compute_step(self, stage: int, kind: Kind, cost: float) -> _Step:
        placement = self.program.placement
        rank = placement[stage]
        note = self.done[stage, Kind.I if kind is Kind.B else kind]
        if kind is Kind.W:
            return _Step(cost, self.done[stage, Kind.I], None, 0.0, rank, note)
        forward = kind is Kind.F
        source = stage - 1 if forward else stage + 1
        if forward and self.program.is_first(stage):
            return _Step(cost, None, None, 0.0, rank, note)
        if not forward and self.program.is_last(stage):  # the loss: its gradient is there with the forward
            return _Step(cost, self.done[stage, Kind.F], None, 0.0, rank, note)
        made = Kind.F if forward else Kind.I
        receive = needed_by(self.program, Action(stage, kind, 0))
        if receive is None:
            return _Step(cost, self.done[source, made], None, 0.0, rank, note)
        if not self.program.lowered:
            return _Step(cost, self.done[source, made], None, self.hop, placement[source], note)
        sent = self.done[source, Kind.SEND_F if forward else Kind.SEND_B]
        return _Step(cost, sent, self.done[stage, receive.kind], self.hop, placement[source], note)

    def run(self) -> None:
        """Let every rank go on as far as it can, again whenever the rank it waits for has moved."""
        going = list(range(self.program.ranks))
        sleepers: list[list[int]] = [[] for _ in going]
        while going:
            rank = going.pop()
            before = len(self.starts[rank])
            blocker = self._advance(rank)
            if blocker is not None:
                sleepers[blocker].append(rank)
            if len(self.starts[rank]) > before and sleepers[rank]:
                going.extend(sleepers[rank])
                sleepers[rank] = []

    def _advance(self, rank: int) -> int | None:
        """Move the rank on until it has to wait; the rank it waits for, None at its end."""
        order, steps = self.program.orders[rank], self.steps
        starts, ends, clock = self.starts[rank], self.ends[rank], self.clock[rank]
        blocker = None
        for at in range(len(starts), len(order)):
            stage, kind, i = order[at]
            step = steps[stage].get(kind)
            if step is None or i is None:  # a reduction, or an action that takes no time
                others = self.tied.get((rank, at), ())
                blocker = next((w.rank for w in others if len(self.starts[w.rank]) < w.reach), None)
                if blocker is not None:
                    break
                clock = max([clock, *map(self._came, others)])
                starts.append(clock)
                ends.append(clock)
                continue
            cost, need, post, delay, source, done = step
            if need is not None:
                ready = need[i]
                if ready < 0.0:
                    blocker = source
                    break
                if post is not None:
                    posted = post[i]
                    if posted < 0.0:
                        blocker = rank
                        break
                    if posted > ready:
                        ready = posted
                ready += delay
                if ready > clock:
                    clock = ready
            starts.append(clock)
            clock += cost
            ends.append(clock)
            done[i] = clock
        self.clock[rank] = clock
        return blocker

    def _came(self, wait: Wait) -> float:
        """When a rank came to a reduction: if it has gone on from there, the time at which all had come."""
        starts = self.starts[wait.rank]
        return starts[wait.reach] if len(starts) > wait.reach else self.clock[wait.rank]

    def end_transfers(self) -> None:
        """Let sends and receives last until the message has come."""
        for rank, order in enumerate(self.program.orders):
            for at, action in enumerate(order):
                if action.kind.is_transfer:
                    assert action.microbatch is not None
                    self.ends[rank][at] = self._arrival(action)

    def _arrival(self, transfer: Action) -> float:
        """When the message of a send or a receive has come."""
        stage, kind, i = transfer
        assert i is not None
        forward = kind in (Kind.SEND_F, Kind.RECV_F)
        away = {Kind.SEND_F: stage, Kind.RECV_F: stage - 1, Kind.SEND_B: stage, Kind.RECV_B: stage + 1}[kind]
        to = away + 1 if forward else away - 1
        sent = self.done[away, Kind.SEND_F if forward else Kind.SEND_B][i]
        posted = self.done[to, Kind.RECV_F if forward else Kind.RECV_B][i]
        return max(sent, posted) + self.hop
