"""Discrete-event replay of a program, for costs that `sweep` cannot handle.

These are costs that make the order of events depend on times, or a rank's clock on more than its last action
and one message: links with contention, blocking sends, overlapped pairs as blocks, and work that overlaps
with compute (gathers, offloads). Every rank is a generator over its order; it yields a time to sleep until,
or a token to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from stretto.program.action import Action, Kind
from stretto.program.messages import receive_of, send_of, tied_waits
from stretto.program.pairing import Step, steps_of
from stretto.program.program import Program
from stretto.program.replay.costs import BESIDE, Prices, Route


@dataclass(kw_only=True)
class Message:
    """A message that waits for its two sides; `name` is the receive that takes it."""

    name: Action
    route: Route
    priority: tuple[int, int] = (
        0,
        0,
    )  # sending rank, place in its order: who is first of those at one moment
    sent: bool = False
    posted: bool = False


class Links:
    """All links of a replay; `arrive` is called with a message's time of arrival once the link is its own."""

    def __init__(self, contention: bool, arrive: Callable[[Action, float], None]) -> None:
        self.contention, self.arrive = contention, arrive
        self.requests: list[Message] = []
        self.queued: dict[Action, Action] = {}  # message to the one whose end it waited for
        self._free: dict[Hashable, float] = {}
        self._last: dict[Hashable, Action] = {}

    def request(self, message: Message, now: float) -> None:
        """Both sides of the message are ready."""
        if self.contention:
            self.requests.append(message)
        else:
            self.arrive(message.name, now + message.route.delay)

    def serve(self, now: float) -> None:
        """Assign links to all requests by priority; called when nothing else can happen at `now`."""
        requests, self.requests = sorted(self.requests, key=lambda message: message.priority), []
        for name, route in ((message.name, message.route) for message in requests):
            start = now
            free = self._free.get(route.link, 0.0)
            if free > now:
                start = free
                self.queued[name] = self._last[route.link]
            self._free[route.link] = start + route.occupied
            self._last[route.link] = name
            self.arrive(name, start + route.delay)


_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE})
_TIMED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE, Kind.UPDATE})


class _Plan(NamedTuple):
    """What holds for all actions of one stage and kind."""

    cost: float
    needs: list[tuple[int, Kind]]  # tokens but for the microbatch
    result: tuple[int, Kind, Route] | None  # the receive that takes its message, but for the microbatch


class Events:
    """A replay; after `run`, starts and ends of every rank's actions, as far as it came."""

    def __init__(self, program: Program, prices: Prices) -> None:
        self.program = program
        self.prices = prices
        self.costs = prices.costs
        self.starts = [[0.0] * len(order) for order in program.orders]
        self.ends = [[0.0] * len(order) for order in program.orders]
        self.arrivals: dict[Action, float] = {}  # by receive
        self.stuck: dict[int, Action] = {}  # ranks that have not come to their end, and where they stand
        self.links = Links(self.costs.contention, self._arrive)
        self.now = 0.0
        self._heap: list[tuple[float, int]] = []
        # tokens: an action that is done, a receive whose message is there, a place that a rank has come to
        self._when: dict[Hashable, float] = {}
        self._waiting: dict[Hashable, list[int]] = {}
        self._messages: dict[Action, Message] = {}
        self._places: dict[Action, tuple[int, int]] = {}  # of sends and receives: rank, place
        self._tied = tied_waits(program) if program.tied else {}
        self._updates = any(a.kind is Kind.UPDATE for order in program.orders for a in order)
        self._plans = {
            (stage, kind): _Plan(cost, self._needs(stage, kind), self._result(stage, kind))
            for stage in range(program.stages)
            for kind, cost in prices.times(stage).items()
        }
        # beside the work: when each stream of a rank is free, when each piece of it is done
        self._stream: dict[tuple[int, Kind], float] = {}
        self._beside: dict[Action, float] = {}

    def run(self) -> None:
        """Advance all ranks to their ends, or until none can go on."""
        ranks = [self._rank(rank) for rank in range(self.program.ranks)]
        self._heap = [(0.0, rank) for rank in range(len(ranks))]
        heapify(self._heap)
        while self._heap or self.links.requests:
            if self.links.requests and (not self._heap or self._heap[0][0] > self.now):
                self.links.serve(self.now)
                continue
            self.now, rank = heappop(self._heap)
            wait = next(ranks[rank], None)
            if isinstance(wait, float):
                heappush(self._heap, (wait, rank))
            elif wait is not None:
                self._waiting.setdefault(wait, []).append(rank)

    def _rank(self, rank: int) -> Iterator[float | Hashable]:
        order = self.program.orders[rank]
        for step in steps_of(self.program, rank, self.costs.pair is not None):
            action = order[step[0]]
            self.stuck[rank] = action
            if action.kind in _TIMED:
                yield from self._work(rank, step)
            elif action.kind.is_transfer:
                yield from self._transfer(rank, step[0], action)
            elif action.kind is Kind.REDUCE_TIED:
                yield from self._join_reduction(rank, step[0])
            else:
                yield from self._start_beside(rank, step[0], action)
        self.stuck.pop(rank, None)

    def _work(self, rank: int, step: Step) -> Iterator[float | Hashable]:
        """One action, or the two of a pair as one block."""
        actions = [self.program.orders[rank][at] for at in step]
        for action in actions:
            for stage, kind in self._plans[action.stage, action.kind].needs:
                token = Action(stage, kind, action.microbatch)
                ready = self._when.get(token)
                if ready is None or ready > self.now:  # most are there: spare them a generator
                    yield from self._wait(token)
            if action.kind is Kind.UPDATE and not self.program.lowered:
                yield from self._start_beside(rank, None, Action(action.stage, Kind.REDUCE_GRAD))
        if self._beside:
            yield from self._until(max(map(self._released, actions)))
        cost = self._plans[actions[0].stage, actions[0].kind].cost
        if len(step) > 1:
            assert self.costs.pair is not None
            cost = sum(self._plans[stage, kind].cost for stage, kind, _ in actions) * self.costs.pair
        start, end = self.now, self.now + cost
        for at in step:
            self.starts[rank][at], self.ends[rank][at] = start, end
        if end > start:
            yield end
        for at, action in zip(step, actions, strict=True):
            stage, kind, i = action
            # a B has made what an I makes
            self._resolve(Action(stage, Kind.I, i) if kind is Kind.B else action, end)
            if not self.program.lowered:
                self._send_result(rank, at, action)
        if self.costs.blocking and not self.program.lowered:
            for stage, kind, i in actions:
                if (result := self._plans[stage, kind].result) is not None:
                    yield from self._wait(Action(result[0], result[1], i))

    def _needs(self, stage: int, kind: Kind) -> list[tuple[int, Kind]]:
        """What has to be done or there before a compute action: stage and kind of tokens."""
        program = self.program
        if kind is Kind.W:
            return [(stage, Kind.I)]
        if kind is Kind.RECOMPUTE:
            return [(stage, Kind.F)]
        if kind is Kind.F and not program.is_first(stage):
            return [(stage, Kind.RECV_F) if self.prices.forward[stage] else (stage - 1, Kind.F)]
        if kind in (Kind.B, Kind.I) and not program.is_last(stage):
            return [
                (stage, Kind.F),
                (stage, Kind.RECV_B) if self.prices.backward[stage] else (stage + 1, Kind.I),
            ]
        return [(stage, Kind.F)] if kind in (Kind.B, Kind.I) else []

    def _released(self, action: Action) -> float:
        """When the gathers, reloads and reductions that the action needs are done; all have been started."""
        stage, kind, i = action
        if kind is Kind.UPDATE:
            return self._beside.get(Action(stage, Kind.REDUCE_GRAD), 0.0)
        ready = self._beside.get(Action(stage, Kind.UNSHARD), 0.0)
        if kind in _BACKWARD:
            ready = max(ready, self._beside.get(Action(stage, Kind.RELOAD, i), 0.0))
        return ready

    def _start_beside(self, rank: int, at: int | None, action: Action) -> Iterator[float]:
        """Start work on a separate stream; `at` is its index in the order, None where it is not in one."""
        stage, kind, i = action
        cost, inside = 0.0, False
        if kind in BESIDE:
            cost = self.prices.beside[kind][stage]
        elif kind is Kind.REDUCE_GRAD and self._updates:
            cost, inside = self.prices.reduce[stage], not self.costs.reduce_overlaps
        start = self.now
        if cost:
            start = max(start, self._stream.get((rank, kind), 0.0))
            if kind is Kind.RELOAD:
                start = max(start, self._beside.get(Action(stage, Kind.OFFLOAD, i), 0.0))
            self._stream[rank, kind] = start + cost
        self._beside[action] = start + cost
        if at is not None:
            self.starts[rank][at], self.ends[rank][at] = start, start + cost
        if inside:
            yield from self._until(start + cost)

    # --- messages

    def _result(self, stage: int, kind: Kind) -> tuple[int, Kind, Route] | None:
        """The receive that takes the result of a compute action, and its route."""
        route = None
        if kind is Kind.F and not self.program.is_last(stage):
            stage += 1
            kind = Kind.RECV_F
            route = self.prices.forward[stage]
        elif kind in (Kind.B, Kind.I) and not self.program.is_first(stage):
            stage -= 1
            kind = Kind.RECV_B
            route = self.prices.backward[stage]
        return None if route is None else (stage, kind, route)

    def _send_result(self, rank: int, at: int, action: Action) -> None:
        """Send the action's result, if it goes to another rank."""
        if (result := self._plans[action.stage, action.kind].result) is not None:
            stage, kind, route = result
            self.links.request(
                Message(name=Action(stage, kind, action.microbatch), route=route, priority=(rank, at)),
                self.now,
            )

    def _transfer(self, rank: int, at: int, action: Action) -> Iterator[float | Hashable]:
        """A send or a receive of a lowered program; the message leaves when both are there."""
        sends = action.kind in (Kind.SEND_F, Kind.SEND_B)
        name = receive_of(action) if sends else action
        self._places[action] = rank, at
        self.starts[rank][at] = self.ends[rank][at] = self.now
        message = self._messages.get(name)
        if message is None:
            routes = self.prices.forward if name.kind is Kind.RECV_F else self.prices.backward
            route = routes[name.stage]
            assert route is not None, f"{name} is a message within one rank"
            message = self._messages[name] = Message(name=name, route=route)
        if sends:
            message.sent, message.priority = True, (rank, at)
        else:
            message.posted = True
        if message.sent and message.posted:
            self.links.request(message, self.now)
        if sends and self.costs.blocking:
            yield from self._wait(name)

    def _arrive(self, name: Action, time: float) -> None:
        self.arrivals[name] = time
        if self._places:
            for transfer in (name, send_of(name)):
                rank, place = self._places[transfer]
                self.ends[rank][place] = time
        self._resolve(name, time)

    def _join_reduction(self, rank: int, at: int) -> Iterator[float | Hashable]:
        """A reduction of tied parameters starts when all ranks have reached it, and takes no time."""
        self._resolve((rank, at), self.now)
        for wait in self._tied.get((rank, at), ()):
            yield from self._wait((wait.rank, wait.completed))
        self.starts[rank][at] = self.ends[rank][at] = self.now

    # --- tokens

    def _resolve(self, token: Hashable, time: float) -> None:
        """Make a token's time known; a token that is waited for wakes the rank then."""
        self._when[token] = time
        for rank in self._waiting.pop(token, ()):
            heappush(self._heap, (max(time, self.now), rank))

    def _wait(self, token: Hashable) -> Iterator[float | Hashable]:
        while token not in self._when:
            yield token
        yield from self._until(self._when[token])

    def _until(self, time: float) -> Iterator[float]:
        if time > self.now:
            yield time
