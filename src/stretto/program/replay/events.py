"""Discrete-event replay of a program, for costs that `sweep` cannot handle.

With these costs the order of events depends on times, or a rank's clock on more than its last action and one
message: links with contention, blocking sends, overlapped pairs as blocks, and work that overlaps with
compute (gathers, offloads).

Ranks run ahead of one another: a rank depends on others only for messages and reductions of tied parameters,
and waits only if the time of one is not known yet. Once all ranks wait, the earliest message that requests a
link is the next on it, since any later request waits for one of these messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import fsum
from typing import NamedTuple, TypeVar

from stretto.program.action import TRANSFER, Action, ActionKind
from stretto.program.messages import needed_by, receive_of, sent_by, tied_waits
from stretto.program.pairing import Step, steps_of
from stretto.program.program import Program
from stretto.program.replay.costs import OVERLAPPED, Prices

_BACKWARD = frozenset({ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.RECOMPUTE})
_UNKNOWN, _NONE = -1.0, -1

_T = TypeVar("_T")


class Messages:
    """Indices of a program's messages: by direction, receiving stage and microbatch, forwards first."""

    def __init__(self, program: Program) -> None:
        self.stages, self.microbatches = program.stages, program.microbatches
        self.count = 2 * self.stages * self.microbatches

    def first(self, stage: int, kind: ActionKind) -> int:
        """Return the index of the message of microbatch 0 that `stage` receives as RECV_F or RECV_B."""
        return (self.stages * (kind is ActionKind.RECV_B) + stage) * self.microbatches

    def name(self, number: int) -> Action:
        """Return the receive that takes the message."""
        group, i = divmod(number, self.microbatches)
        backward, stage = divmod(group, self.stages)
        return Action(stage, ActionKind.RECV_B if backward else ActionKind.RECV_F, i)


class _OnDemand(Mapping[Action, _T]):
    """A mapping that is built when it is first read; most replays never read it."""

    def __init__(self, make: Callable[[], dict[Action, _T]]) -> None:
        self._make = make

    @cached_property
    def _values(self) -> dict[Action, _T]:
        return self._make()

    def __getitem__(self, name: Action) -> _T:
        return self._values[name]

    def __iter__(self) -> Iterator[Action]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Link(NamedTuple):
    """How messages of one direction reach one stage."""

    number: int  # index of the link, shared by all routes on it; `_NONE` without contention
    source: int  # rank
    destination: int
    occupied: float
    delay: float
    waits: bool  # whether requests may be simulated in another order than they occur in time


class _Rule(NamedTuple):
    """Costs and messages of all actions of one stage and kind that keep their rank busy or are transfers.

    Messages are those of microbatch 0, or `_NONE`.
    """

    cost: float
    need: int = _NONE  # the message that the action consumes
    message: int = _NONE  # the message that it sends, or that the transfer is a side of
    side: int = _NONE  # for transfers: 0 for the sender, 1 for the receiver
    link: _Link | None = None  # link of `message`


@dataclass
class _Stream:
    """One kind of work that overlaps with the ranks' compute."""

    costs: list[float]  # by stage
    free: list[float]  # time at which each rank's stream is free
    done: list[float]  # end of each piece of work, by stage and microbatch


class Events:
    """A replay. After `run` it has starts and ends of every rank's completed actions.

    Args:
        kinds: kinds of actions in the program.
    """

    def __init__(self, program: Program, prices: Prices, kinds: Set[ActionKind]) -> None:
        self.program = program
        self.prices = prices
        self.costs = prices.costs
        self.starts = [[0.0] * len(order) for order in program.orders]
        self.ends = [[0.0] * len(order) for order in program.orders]
        self.messages = Messages(program)
        # by direction and stage, like messages
        routes = [*self.prices.forward, *self.prices.backward]
        senders: dict[Hashable, set[int]] = {}
        for route in filter(None, routes):
            senders.setdefault(route.link, set()).add(route.source)
        immediate = {route.link for route in routes if route and not route.delay}
        numbers = {link: number for number, link in enumerate(senders)}
        contention, lowered = self.costs.contention, self.program.lowered
        self._links = [
            route
            and _Link(
                number=numbers[route.link] if contention else _NONE,
                source=route.source,
                destination=route.destination,
                occupied=route.occupied,
                delay=route.delay,
                # A rank's results come in its order, but either side of a transfer may be the later one; and
                # consequences of a message that takes no time come after all requests of the same moment.
                waits=contention and (lowered or len(senders[route.link]) > 1 or route.link in immediate),
            )
            for route in routes
        ]
        self._rules = [self._rules_of(stage) for stage in range(program.stages)]
        self._arrival_times = [_UNKNOWN] * self.messages.count
        # for both sides of each message in lowered programs: the time it is ready, its index in the order
        self._ready = [_UNKNOWN] * (2 * self.messages.count * program.lowered)
        self._places = [_NONE] * (2 * self.messages.count * program.lowered)
        self._free = [0.0] * len(self._links)  # time at which each link is free
        self._last = [_NONE] * len(self._links)  # the last message on each link
        self._behind: dict[int, int] = {}  # a message and the one it queued behind
        self._requests: list[tuple[float, int, int, int]] = []  # time, sending rank, its index, message
        # each rank's next action, the message that it waits for, and the ranks that can continue
        self._reached = [0] * program.ranks
        self._awaited = [_NONE] * program.ranks
        self._runnable = list(range(program.ranks))
        self._tied = tied_waits(program) if program.tied else {}
        self._joined: dict[tuple[int, int], float] = {}
        self._joining: list[int] = []
        overlapped = {kind: prices.overlapped[kind] for kind in OVERLAPPED if kind in kinds}
        if ActionKind.UPDATE in kinds:
            overlapped[ActionKind.REDUCE_GRAD] = prices.reduce
        pieces = program.stages * program.microbatches
        self._streams = {
            kind: _Stream(costs, [0.0] * program.ranks, [0.0] * pieces) for kind, costs in overlapped.items()
        }

    def _rules_of(self, stage: int) -> dict[ActionKind, _Rule]:
        """Return the rule of every kind that keeps the stage's rank busy, and of its transfers."""
        program, first = self.program, self.messages.first

        def rule(cost: float, need: Action | None, taken: Action | None, side: int = _NONE) -> _Rule:
            message = _NONE if taken is None else first(taken.stage, taken.kind)
            return _Rule(
                cost=cost,
                need=_NONE if need is None else first(need.stage, need.kind),
                message=message,
                side=side,
                link=None if taken is None else self._links[message // program.microbatches],
            )

        rules: dict[ActionKind, _Rule] = {}
        for kind, cost in self.prices.times(stage).items():
            action = Action(stage, kind, 0)
            sent = None if program.lowered else sent_by(program, action)
            rules[kind] = rule(cost, needed_by(program, action), sent and receive_of(sent))
        for kind in TRANSFER if program.lowered else ():
            action = Action(stage, kind, 0)
            ends = (
                program.is_last(stage)
                if kind in (ActionKind.SEND_F, ActionKind.RECV_B)
                else program.is_first(stage)
            )
            if not ends:
                sends = kind in (ActionKind.SEND_F, ActionKind.SEND_B)
                rules[kind] = rule(0.0, None, receive_of(action) if sends else action, int(not sends))
        return rules

    @property
    def arrivals(self) -> Mapping[Action, float]:
        """The arrival time of each message, by its receive."""
        return _OnDemand(self._arrivals)

    def _arrivals(self) -> dict[Action, float]:
        name = self.messages.name
        return {name(message): time for message, time in enumerate(self._arrival_times) if time != _UNKNOWN}

    @property
    def queued(self) -> Mapping[Action, Action]:
        """For each message that queued, the message before it on the link; both by their receives."""
        return _OnDemand(self._queued)

    def _queued(self) -> dict[Action, Action]:
        name = self.messages.name
        return {name(message): name(before) for message, before in self._behind.items()}

    @property
    def stuck(self) -> dict[int, Action]:
        """The ranks that have not completed their order, with the action that they wait at."""
        positions = enumerate(zip(self._reached, self.program.orders, strict=True))
        return {rank: order[at] for rank, (at, order) in positions if at < len(order)}

    def run(self) -> None:
        """Advance all ranks to their ends, or until none can continue."""
        walks = [self._walk(rank) for rank in range(self.program.ranks)]
        runnable, requests = self._runnable, self._requests
        while runnable or requests:
            while runnable:
                next(walks[runnable.pop()], None)
            # consequences of arrivals come after all requests of the same moment
            moment = requests[0][0] if requests else 0.0
            served: list[int] = []
            while requests and requests[0][0] == moment:
                served.append(heappop(requests)[-1])
            for message in served:
                link = self._links[message // self.program.microbatches]
                assert link is not None
                self._serve(message, link, moment)

    def _walk(self, rank: int) -> Iterator[None]:
        """Run the rank's order; yields when the rank has to wait."""
        order = self.program.orders[rank]
        starts, ends = self.starts[rank], self.ends[rank]
        rules, arrivals = self._rules, self._arrival_times
        awaited, reached = self._awaited, self._reached
        blocking, streams = self.costs.blocking, bool(self._streams)
        steps = steps_of(self.program, rank, blocks=True) if self.costs.pair is not None else []
        blocks = {step[0]: step for step in steps if len(step) > 1}
        now = 0.0
        for at in [step[0] for step in steps] if blocks else range(len(order)):
            stage, kind, i = action = order[at]
            rule = rules[stage].get(kind)
            if rule is None and kind is not ActionKind.REDUCE_TIED:
                now = self._start_beside(rank, at, action, now)
                continue
            if rule is None or at in blocks:
                reached[rank] = at
                wait = self._join(rank, at, now) if rule is None else self._block(rank, blocks[at], now)
                now = yield from wait
                continue
            cost, need, message, side, link = rule
            if need >= 0:
                need += i or 0
                if arrivals[need] < 0.0:
                    reached[rank], awaited[rank] = at, need
                    yield
                if arrivals[need] > now:
                    now = arrivals[need]
            if streams and side < 0:
                now = self._released(rank, action, now)
            starts[at] = now
            now += cost
            ends[at] = now
            if link is None:
                continue
            message += i or 0
            if side < 0:
                self._request(message, link, now, at)
            else:
                # a transfer: the message leaves when both sides are ready
                index, other = 2 * message + side, 2 * message + 1 - side
                self._ready[index], self._places[index] = now, at
                if self._ready[other] >= 0.0:
                    self._request(message, link, max(now, self._ready[other]), self._places[2 * message])
            if blocking and side <= 0:
                if arrivals[message] < 0.0:
                    reached[rank], awaited[rank] = at, message
                    yield
                now = max(now, arrivals[message])
        reached[rank] = len(order)

    def _block(self, rank: int, step: Step, now: float) -> Generator[None, None, float]:
        """Run a pair as one block, which needs both inputs at its start and has both results at its end."""
        actions = [self.program.orders[rank][at] for at in step]
        rules = [self._rules[stage][kind] for stage, kind, _ in actions]
        for action, rule in zip(actions, rules, strict=True):
            if rule.need >= 0:
                now = yield from self._wait(rank, rule.need + (action.microbatch or 0), now)
        now = max(self._released(rank, action, now) for action in actions)
        assert self.costs.pair is not None
        end = now + fsum(rule.cost for rule in rules) * self.costs.pair
        sent: list[int] = []
        for at, action, rule in zip(step, actions, rules, strict=True):
            self.starts[rank][at], self.ends[rank][at] = now, end
            if rule.link is not None:
                sent.append(rule.message + (action.microbatch or 0))
                self._request(sent[-1], rule.link, end, at)
        if self.costs.blocking:
            for message in sent:
                end = yield from self._wait(rank, message, end)
        return end

    def _wait(self, rank: int, message: int, now: float) -> Generator[None, None, float]:
        """Wait until the message has arrived; return the time."""
        if self._arrival_times[message] < 0.0:
            self._awaited[rank] = message
            yield
        return max(now, self._arrival_times[message])

    def _join(self, rank: int, at: int, now: float) -> Generator[None, None, float]:
        """Run a reduction of tied parameters, which starts when all ranks have reached it and takes no
        time.
        """
        self._joined[rank, at] = now
        self._runnable += self._joining
        self._joining.clear()
        for wait in self._tied.get((rank, at), ()):
            while (wait.rank, wait.completed) not in self._joined:
                self._joining.append(rank)
                yield
            now = max(now, self._joined[wait.rank, wait.completed])
        self.starts[rank][at] = self.ends[rank][at] = now
        return now

    # --- work that overlaps with compute

    def _released(self, rank: int, action: Action, now: float) -> float:
        """Return when the gathers, reloads and reductions that the action needs are done; all have
        started.
        """
        stage, kind, i = action
        streams, piece = self._streams, stage * self.program.microbatches
        if kind is ActionKind.UPDATE:
            if not self.program.lowered:
                self._start_beside(rank, None, Action(stage, ActionKind.REDUCE_GRAD), now)
            return max(now, streams[ActionKind.REDUCE_GRAD].done[piece])
        if (gathers := streams.get(ActionKind.UNSHARD)) and gathers.done[piece] > now:
            now = gathers.done[piece]
        if (reloads := streams.get(ActionKind.RELOAD)) and kind in _BACKWARD:
            now = max(now, reloads.done[piece + (i or 0)])
        return now

    def _start_beside(self, rank: int, at: int | None, action: Action, now: float) -> float:
        """Start work on a separate stream; `at` is its index in the order, or None if it is not in one.

        Returns:
            the time at which the rank continues.
        """
        stage, kind, i = action
        start = end = now
        # releases take no time, and in synchronous programs reductions are timed after the step
        if (stream := self._streams.get(kind)) is not None:
            piece, cost = stage * self.program.microbatches + (i or 0), stream.costs[stage]
            if cost:
                start = max(start, stream.free[rank])
                if kind is ActionKind.RELOAD and ActionKind.OFFLOAD in self._streams:
                    start = max(start, self._streams[ActionKind.OFFLOAD].done[piece])
                end = stream.free[rank] = start + cost
            stream.done[piece] = end
        if at is not None:
            self.starts[rank][at], self.ends[rank][at] = start, end
        exposed = kind is ActionKind.REDUCE_GRAD and not self.costs.reduce_overlaps
        return max(now, end) if exposed else now

    # --- messages

    def _request(self, message: int, link: _Link, ready: float, at: int) -> None:
        """Request the link of a message whose sides are ready; the sender's has index `at` in its order."""
        if link.waits:
            heappush(self._requests, (ready, link.source, at, message))
        else:
            self._serve(message, link, ready)

    def _serve(self, message: int, link: _Link, ready: float) -> None:
        """Transfer a message that is the next on its link or needs none."""
        number, source, destination, occupied, delay, _ = link
        if number >= 0:
            if self._free[number] > ready:
                ready = self._free[number]
                self._behind[message] = self._last[number]
            self._free[number] = ready + occupied
            self._last[number] = message
        time = self._arrival_times[message] = ready + delay
        if self._places:
            send, receive = self._places[2 * message : 2 * message + 2]
            self.ends[source][send] = self.ends[destination][receive] = time
        awaited = self._awaited
        if awaited[destination] == message:
            awaited[destination] = _NONE
            self._runnable.append(destination)
        if awaited[source] == message:
            awaited[source] = _NONE
            self._runnable.append(source)
