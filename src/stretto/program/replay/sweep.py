"""Replay in one pass, for costs that do not affect the order of events.

A program is encoded once as flat arrays in topological order; one pass over them computes all times. The
search of layouts replays one program under many costs.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from stretto.program.action import TRANSFER, Action, ActionKind
from stretto.program.messages import needed_by, sent_by, tied_waits
from stretto.program.program import Program

_KINDS = list(ActionKind)
KINDS = {kind: at for at, kind in enumerate(_KINDS)}
"""The actions of one stage and kind form a class with index `stage * len(KINDS) + KINDS[kind]`."""


class TiedReduction(NamedTuple):
    """A reduction of tied parameters after `at` nodes: `slot` ends when all slots in `last` have ended."""

    at: int
    slot: int
    last: list[int]


class CompiledProgram:
    """A program's actions as flat arrays.

    Every action has a slot: rank after rank, in order; a slot before each rank's first action represents the
    start of the step. Nodes are the actions that advance a rank's clock: all but sends and receives, which
    take no time on their rank.
    """

    def __init__(self, program: Program) -> None:
        self.first: list[int] = []  # per rank, the slot before its first action
        size = 0
        for order in program.orders:
            self.first.append(size)
            size += len(order) + 1
        self.size = size
        # nodes, in topological order
        self.slots: list[int] = []
        self.predecessors: list[int] = []  # slot of the node before it on its rank
        self.sources: list[int] = []  # slot after which its message can leave; 0: no message
        self.posts: list[int] = []  # slot after which its receive is posted; 0: program not lowered
        self.kinds: list[int] = []  # class
        self.tied_reductions: list[TiedReduction] = []
        # messages of a lowered program, in the order of the nodes that consume them
        self.sends: list[int] = []
        self.receives: list[int] = []
        self.transfers: list[int] = []  # slots of all sends and receives
        self.transfers_before: list[int] = []  # slots of the nodes before them
        # per rank, the actions before the first that can never start
        self.completed = _Encoder(program, self).run()
        self.complete = self.completed == [len(order) for order in program.orders]
        self.counts = {  # number of nodes of each (stage, kind)
            (kind // len(KINDS), _KINDS[kind % len(KINDS)]): count
            for kind, count in Counter(self.kinds).items()
        }
        self.messages = sum(
            count
            for (stage, kind), count in self.counts.items()
            if sent_by(program, Action(stage, kind, 0)) is not None
        )


def encode(program: Program) -> CompiledProgram:
    """Return the program's encoding, built on first use and cached as long as the program lives."""
    cached = _CACHE.get(id(program))
    if cached is not None and cached[0]() is program:
        return cached[1]
    key = id(program)
    code = CompiledProgram(program)
    _CACHE[key] = (weakref.ref(program, lambda _: _CACHE.pop(key, None)), code)
    return code


# by identity, since hashing a program hashes all of its actions
_CACHE: dict[int, tuple[weakref.ref[Program], CompiledProgram]] = {}

_FREE, _LOCAL, _REMOTE, _RENDEZVOUS, _TRANSFER = range(
    5
)  # the dependency that an action waits for, or that it is a transfer


class _Rule(NamedTuple):
    """The dependencies of a class of actions; lists have a slot per microbatch, -1 until it is done."""

    dependency: int
    kind: int
    need: list[int]  # the action or send that must be done
    post: list[int]  # receives
    slots: list[int]  # where the action records its slot once done
    source: int  # rank of the needed action


class _Encoder:
    """Executes the program without times, to sort its actions topologically."""

    def __init__(self, program: Program, code: CompiledProgram) -> None:
        self.program, self.code = program, code
        self.slots_of: dict[tuple[int, ActionKind], list[int]] = defaultdict(
            lambda: [-1] * program.microbatches
        )
        self.rules = [self._rules(stage) for stage in range(program.stages)]
        self.tied = tied_waits(program) if program.tied else {}
        self.joined: dict[tuple[int, int], int] = {}  # the rank's last node before a tied reduction
        self.reached = list(code.first)  # slot that each rank waits at
        self.earlier = [0] * code.size  # for each transfer's slot, the node before it

    def run(self) -> list[int]:
        """Advance every rank as far as possible, and again when the rank that it waits for has advanced.

        Returns:
            For each rank, the number of actions before the first that can never start.
        """
        walks = [self._walk(rank) for rank in range(self.program.ranks)]
        runnable = list(range(self.program.ranks))
        blocked: list[list[int]] = [[] for _ in runnable]
        while runnable:
            rank = runnable.pop()
            before = self.reached[rank]
            blocker = next(walks[rank], None)
            if blocker is not None:
                blocked[blocker].append(rank)
            if self.reached[rank] > before and blocked[rank]:
                runnable.extend(blocked[rank])
                blocked[rank] = []
        self.code.transfers_before = list(map(self.earlier.__getitem__, self.code.transfers))
        return [slot - first - 1 for slot, first in zip(self.reached, self.code.first, strict=True)]

    def _walk(self, rank: int) -> Iterator[int]:
        """Run the rank's order; yields each rank to wait for."""
        code = self.code
        rules = self.rules
        earlier = self.earlier
        add_transfer = code.transfers.append
        add_slot = code.slots.append
        add_before = code.predecessors.append
        add_kind = code.kinds.append
        add_source, add_post = code.sources.append, code.posts.append
        slot = last = code.first[rank]
        for stage, kind, i in self.program.orders[rank]:
            slot += 1
            rule = rules[stage].get(kind)
            if rule is None or i is None:
                for blocker in self._join(rank, slot, last):
                    self.reached[rank] = slot
                    yield blocker
                add_slot(slot)
                add_before(last)
                add_source(0)
                add_post(0)
                add_kind(stage * len(KINDS) + KINDS[kind])
                last = slot
                continue
            dependency, number, need, post, slots, source = rule
            if dependency == _TRANSFER:
                slots[i] = slot
                earlier[slot] = last
                add_transfer(slot)
                continue
            sent = posted = 0
            if dependency != _FREE:
                while (sent := need[i]) < 0:
                    self.reached[rank] = slot
                    yield source
                if dependency == _LOCAL:
                    sent = 0
                elif dependency == _RENDEZVOUS:
                    while (posted := post[i]) < 0:
                        self.reached[rank] = slot
                        yield rank
                    code.sends.append(sent)
                    code.receives.append(posted)
                    sent, posted = earlier[sent], earlier[posted]
            add_slot(slot)
            add_before(last)
            add_source(sent)
            add_post(posted)
            add_kind(number)
            slots[i] = last = slot
        self.reached[rank] = slot + 1

    def _join(self, rank: int, slot: int, last: int) -> Iterator[int]:
        """Yield the ranks to wait for until all have joined, if the action is a tied reduction."""
        at = slot - 1 - self.code.first[rank]
        others = self.tied.get((rank, at))
        if others is None:
            return
        self.joined[rank, at] = last
        for wait in others:
            while (wait.rank, wait.completed) not in self.joined:
                yield wait.rank
        members = [last, *(self.joined[wait.rank, wait.completed] for wait in others)]
        self.code.tied_reductions.append(TiedReduction(len(self.code.slots), slot, members))

    def _rules(self, stage: int) -> dict[ActionKind, _Rule]:
        """Return the rule of every kind that concerns one microbatch."""
        program, slots_of = self.program, self.slots_of
        rank = program.placement[stage]
        nothing: list[int] = []
        rules = {
            kind: _Rule(
                dependency=_TRANSFER,
                kind=0,
                need=nothing,
                post=nothing,
                slots=slots_of[stage, kind],
                source=rank,
            )
            for kind in TRANSFER
        }

        def rule(dependency: int, kind: ActionKind, need: list[int], source: int = rank) -> _Rule:
            slots = slots_of[stage, ActionKind.I if kind is ActionKind.B else kind]
            number = stage * len(KINDS) + KINDS[kind]
            return _Rule(
                dependency=dependency, kind=number, need=need, post=nothing, slots=slots, source=source
            )

        rules[ActionKind.W] = rule(_LOCAL, ActionKind.W, slots_of[stage, ActionKind.I])
        rules[ActionKind.RECOMPUTE] = rule(_LOCAL, ActionKind.RECOMPUTE, slots_of[stage, ActionKind.F])
        for kind in (ActionKind.F, ActionKind.I, ActionKind.B):
            forward = kind is ActionKind.F
            ends = program.is_first(stage) if forward else program.is_last(stage)
            source = stage - 1 if forward else stage + 1
            if ends:
                # the loss: its gradient exists once the forward is done
                rules[kind] = rule(_FREE if forward else _LOCAL, kind, slots_of[stage, ActionKind.F])
                continue
            away, source_terms = (
                program.placement[source],
                slots_of[source, ActionKind.F if forward else ActionKind.I],
            )
            receive = needed_by(program, Action(stage, kind, 0))
            remote = rule(_LOCAL if receive is None else _REMOTE, kind, source_terms, away)
            if receive is not None and program.lowered:
                sent = slots_of[source, ActionKind.SEND_F if forward else ActionKind.SEND_B]
                remote = remote._replace(
                    dependency=_RENDEZVOUS, need=sent, post=slots_of[stage, receive.kind]
                )
            rules[kind] = remote
        return rules


def sweep(
    code: CompiledProgram, cost: Sequence[float], delay: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return start and end of every slot.

    A node starts when the previous one on its rank has ended and its message has arrived; a message leaves
    once its producer has ended and, in a lowered program, its receive is posted.

    Args:
        code: the encoding of a program that completes.
        cost: time of a node, by class.
        delay: time of its message, by class.
    """
    starts = [0.0] * code.size
    ends = [0.0] * code.size
    if not code.transfers and not code.tied_reductions:
        _plain(code, cost, delay, starts, ends)
        return starts, ends
    arrivals: list[float] = []
    done = 0
    for at, slot, last in code.tied_reductions:
        _posted(
            code=code, begin=done, end=at, cost=cost, delay=delay, starts=starts, ends=ends, arrivals=arrivals
        )
        starts[slot] = ends[slot] = max(ends[member] for member in last)
        done = at + 1
    _posted(
        code=code,
        begin=done,
        end=len(code.slots),
        cost=cost,
        delay=delay,
        starts=starts,
        ends=ends,
        arrivals=arrivals,
    )
    for slot, before in zip(code.transfers, code.transfers_before, strict=True):
        starts[slot] = ends[slot] = ends[before]
    for arrival, send, receive in zip(arrivals, code.sends, code.receives, strict=True):
        ends[send] = ends[receive] = arrival
    return starts, ends


def _plain(
    code: CompiledProgram,
    cost: Sequence[float],
    delay: Sequence[float],
    starts: list[float],
    ends: list[float],
) -> None:
    """Compute the times of all nodes of a program that is not lowered."""
    for slot, source, kind in zip(code.slots, code.sources, code.kinds, strict=True):
        start = ends[slot - 1]
        if source:
            arrival = ends[source] + delay[kind]
            if arrival > start:
                start = arrival
        starts[slot] = start
        ends[slot] = start + cost[kind]


def _posted(
    code: CompiledProgram,
    begin: int,
    end: int,
    cost: Sequence[float],
    delay: Sequence[float],
    starts: list[float],
    ends: list[float],
    arrivals: list[float],
) -> None:
    """Compute the times of nodes `begin` to `end` of a lowered program; append their messages' arrivals."""
    nodes = zip(code.slots, code.predecessors, code.sources, code.posts, code.kinds, strict=True)
    for slot, before, source, posted, kind in islice(nodes, begin, end):
        start = ends[before]
        if source:
            arrival = ends[source]
            if ends[posted] > arrival:
                arrival = ends[posted]
            arrival += delay[kind]
            arrivals.append(arrival)
            if arrival > start:
                start = arrival
        starts[slot] = start
        ends[slot] = start + cost[kind]
