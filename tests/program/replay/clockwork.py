"""A second replay, written to be plain: at every moment every rank does what it can, until nothing changes.

Knows nothing of the product's replay; costs are read from `Costs` with one entry for each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from stretto.program import Action, ActionKind, Program
from stretto.program.replay import Costs

SENDS, RECEIVES = (ActionKind.SEND_F, ActionKind.SEND_B), (ActionKind.RECV_F, ActionKind.RECV_B)
STREAMS = {
    ActionKind.UNSHARD: "unshard",
    ActionKind.OFFLOAD: "offload",
    ActionKind.RELOAD: "reload",
    ActionKind.REDUCE_GRAD: "reduce",
}
Span = tuple[float, float]
Name = tuple[int, int | None, bool]  # of a message: stage that takes it, microbatch, forward


class Stuck(Exception):
    """No rank can proceed."""


class Clockwork:
    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.orders = [self.blocks(order) for order in program.orders]
        self.next = [0] * program.ranks
        self.busy = [0.0] * program.ranks
        self.spans: dict[tuple[int, int], Span] = {}  # by rank and place
        self.done: dict[Action, float] = {}
        self.there: dict[Name, float] = {}
        self.sides: dict[Name, dict[str, tuple[int, int]]] = {}
        self.asking: list[tuple[tuple[int, int], Name]] = []
        self.leaving: list[tuple[float, tuple[int, int], Name]] = []  # results of running actions
        self.hold: list[list[Name]] = [[] for _ in program.orders]
        self.link_free: dict[object, float] = {}
        self.stream_free: dict[object, float] = {}
        self.times = [0.0]
        self.now = 0.0
        self.updates = any(a.kind is ActionKind.UPDATE for order in program.orders for a in order)

    def blocks(self, order: Sequence[Action]) -> list[list[int]]:
        """Places of the order; two of a pair together, what is between them before or after."""
        if self.costs.pair is None:
            return [[at] for at in range(len(order))]
        groups: list[list[int]] = []
        late: list[list[int]] = []
        waiting: int | None = None  # first of a pair
        firsts = {first for first, _ in self.program.pairs}
        seconds = {second for _, second in self.program.pairs}
        for at, action in enumerate(order):
            if action in firsts:
                waiting = at
            elif waiting is not None and action in seconds:
                groups += [[waiting, at], *late]
                late, waiting = [], None
            elif waiting is not None and (
                action.kind is ActionKind.RESHARD or action[::2] == order[waiting][::2]
            ):
                late.append([at])
            else:
                groups.append([at])
        return groups

    def run(self) -> dict[tuple[int, int], Span]:
        """Start and end of every action, by rank and place."""
        while self.times:
            self.now = heappop(self.times)
            changed = True
            while changed:
                changed = self.leave()
                for rank in range(self.program.ranks):
                    while self.step(rank):
                        changed = True
                if not changed and self.asking:
                    self.serve()
                    changed = True
        if any(at < len(order) for at, order in zip(self.next, self.orders, strict=True)):
            raise Stuck
        return self.spans

    def at(self, time: float) -> None:
        if time > self.now:
            heappush(self.times, time)

    def leave(self) -> bool:
        """Results that have come out by now ask for their links."""
        ready = [item for item in self.leaving if item[0] <= self.now]
        for item in ready:
            self.leaving.remove(item)
            self.ask(item[1], item[2])
        return bool(ready)

    def ask(self, turn: tuple[int, int], name: Name) -> None:
        if self.costs.contention:
            self.asking.append((turn, name))
        else:
            self.arrive(name, self.now + self.costs.hop + self.wire(name))

    def serve(self) -> None:
        for _, name in sorted(self.asking):
            pair = self.route(name)
            link = self.costs.links.get(pair, pair)
            start = max(self.now, self.link_free.get(link, 0.0))
            self.link_free[link] = start + self.wire(name)
            self.arrive(name, start + self.wire(name) + self.costs.hop)
        self.asking = []

    def arrive(self, name: Name, time: float) -> None:
        self.there[name] = time
        self.at(time)
        for rank, place in self.sides.get(name, {}).values():
            self.spans[rank, place] = (self.spans[rank, place][0], time)

    def route(self, name: Name) -> tuple[int, int]:
        stage, _, forward = name
        return self.program.placement[stage + (-1 if forward else 1)], self.program.placement[stage]

    def wire(self, name: Name) -> float:
        stage, _, forward = name
        sizes, rates = self.costs.message_bytes, self.costs.bandwidth
        assert isinstance(sizes, Sequence)
        rate = rates if isinstance(rates, float) else rates[self.route(name)]
        return sizes[(stage - forward) % self.program.depth] / rate

    def takes(self, action: Action) -> Name | None:
        """The message from another rank that an action needs."""
        stage, kind, i = action
        placement = self.program.placement
        if kind is ActionKind.F and stage % self.program.depth and placement[stage - 1] != placement[stage]:
            return (stage, i, True)
        last = (stage + 1) % self.program.depth == 0
        if kind in (ActionKind.B, ActionKind.I) and not last and placement[stage + 1] != placement[stage]:
            return (stage, i, False)
        return None

    def makes(self, action: Action) -> Name | None:
        stage, kind, i = action
        forward = kind is ActionKind.F
        if kind not in (ActionKind.F, ActionKind.B, ActionKind.I):
            return None
        if (stage + 1) % self.program.depth == 0 if forward else stage % self.program.depth == 0:
            return None
        to = stage + (1 if forward else -1)
        there = self.program.placement[to] != self.program.placement[stage]
        return (to, i, forward) if there else None

    def cost(self, action: Action) -> float:
        stage, kind, _ = action
        assert self.costs.per_stage is not None
        f, i, w = self.costs.per_stage[stage]
        if kind is ActionKind.RECOMPUTE:
            return self.entry("recompute", stage)
        if kind is ActionKind.UPDATE:
            return self.entry("update", stage)
        return {ActionKind.F: f, ActionKind.I: i, ActionKind.W: w, ActionKind.B: i + w}[kind]

    def entry(self, name: str, stage: int) -> float:
        values = getattr(self.costs, name)
        return values[stage]

    def ready(self, rank: int, action: Action) -> bool:
        """True if all dependencies of the action are finished and have arrived."""
        stage, kind, i = action
        name = self.takes(action)
        if name is not None and self.there.get(name, self.now + 1) > self.now:
            return False
        waits = (
            [Action(stage, ActionKind.UNSHARD)]
            if kind is not ActionKind.UPDATE
            else [Action(stage, ActionKind.REDUCE_GRAD)]
        )
        if kind in (ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.RECOMPUTE):
            waits.append(Action(stage, ActionKind.RELOAD, i))
        return not any(self.done.get(wait, 0.0) > self.now for wait in waits)

    def step(self, rank: int) -> bool:
        """Do the rank's next thing if it can be done now."""
        self.hold[rank] = [n for n in self.hold[rank] if self.there.get(n, self.now + 1) > self.now]
        if self.busy[rank] > self.now or self.next[rank] == len(self.orders[rank]) or self.hold[rank]:
            return False
        places = self.orders[rank][self.next[rank]]
        order = self.program.orders[rank]
        actions = [order[at] for at in places]
        kind = actions[0].kind
        if kind in SENDS or kind in RECEIVES:
            self.transfer(rank, places[0], actions[0])
        elif kind is ActionKind.REDUCE_TIED:
            self.spans.setdefault((rank, places[0]), (self.now, self.now))  # has come
            if not self.all_came(rank, places[0]):
                return False
            self.spans[rank, places[0]] = (self.now, self.now)
        elif kind in STREAMS or kind is ActionKind.RESHARD:
            self.start_on_stream(rank, places[0], actions[0])
        else:
            if (
                kind is ActionKind.UPDATE
                and not self.program.lowered
                and (rank, places[0]) not in self.stream_free
            ):
                self.stream_free[rank, places[0]] = 0.0  # its reduction has been started
                self.start_on_stream(rank, None, Action(actions[0].stage, ActionKind.REDUCE_GRAD))
            if not all(self.ready(rank, action) for action in actions):
                return False
            self.work(rank, places, actions)
        self.next[rank] += 1
        return True

    def work(self, rank: int, places: list[int], actions: list[Action]) -> None:
        cost = sum(map(self.cost, actions))
        if len(actions) > 1:
            assert self.costs.pair is not None
            cost *= self.costs.pair
        end = self.now + cost
        self.busy[rank] = end
        self.at(end)
        for at, action in zip(places, actions, strict=True):
            self.spans[rank, at] = (self.now, end)
            name = self.makes(action)
            if name is not None and not self.program.lowered:
                self.leaving.append((end, (rank, at), name))
                if self.costs.blocking:
                    self.hold[rank].append(name)

    def transfer(self, rank: int, at: int, action: Action) -> None:
        stage, kind, i = action
        sends = kind in SENDS
        name = (stage + (1 if kind is ActionKind.SEND_F else -1), i, kind is ActionKind.SEND_F)
        if not sends:
            name = (stage, i, kind is ActionKind.RECV_F)
        self.spans[rank, at] = (self.now, self.now)
        sides = self.sides.setdefault(name, {})
        sides["sent" if sends else "posted"] = (rank, at)
        if len(sides) == 2:
            self.ask(sides["sent"], name)
        if sends and self.costs.blocking:
            self.hold[rank].append(name)

    def start_on_stream(self, rank: int, at: int | None, action: Action) -> None:
        stage, kind, i = action
        if kind is ActionKind.RESHARD:
            assert at is not None
            self.spans[rank, at] = (self.now, self.now)
            return
        cost = self.entry(STREAMS[kind], stage)
        start = self.now
        if cost:
            start = max(start, self.stream_free.get((rank, kind), 0.0))
            if kind is ActionKind.RELOAD:
                start = max(start, self.done[Action(stage, ActionKind.OFFLOAD, i)])
            self.stream_free[rank, kind] = start + cost
        self.done[action] = start + cost
        self.at(start + cost)
        if at is not None:
            self.spans[rank, at] = (start, start + cost)
        if kind is ActionKind.REDUCE_GRAD and self.updates and not self.costs.reduce_overlaps:
            self.busy[rank] = start + cost

    def all_came(self, rank: int, place: int) -> bool:
        """True if all ranks of the tied set have reached their reduction."""
        joins: list[dict[int, int]] = [{} for _ in self.program.tied]
        for r, order in enumerate(self.program.orders):
            seen: dict[int, int] = {}
            for at, action in enumerate(order):
                if action.kind is ActionKind.REDUCE_TIED:
                    sets = [k for k, tie in enumerate(self.program.tied) if action.stage in tie]
                    joins[sets[seen.get(action.stage, 0)]][r] = at
                    seen[action.stage] = seen.get(action.stage, 0) + 1
        join = next((join for join in joins if join.get(rank) == place), {})
        return all((r, at) in self.spans for r, at in join.items())
