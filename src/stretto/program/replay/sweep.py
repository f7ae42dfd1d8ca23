"""The replay of a program whose order of events does not depend on its costs: one pass."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from stretto.program.action import TRANSFER, Action, Kind
from stretto.program.messages import needed_by, sent_by, tied_arrivals
from stretto.program.program import Program

_KINDS = list(Kind)
KINDS = {kind: at for at, kind in enumerate(_KINDS)}
"""A class of actions, those of one stage and kind, has the number `stage * len(KINDS) + KINDS[kind]`."""


class Meeting(NamedTuple):
    """A reduction of tied parameters: `slot` is over when all of `last` are; it comes after `at` nodes."""

    at: int
    slot: int
    last: list[int]


class Code:
    """A program's actions in numbers.

    Every action has a slot: rank after rank, in order; one slot before each rank's first stands for the
    step's start. Nodes are the actions that a rank's clock passes through: all but sends and receives, which
    neither take nor wait for time on their rank.
    """

    def __init__(self, program: Program) -> None:
        self.first: list[int] = []  # per rank, the slot before its first action
        size = 0
        for order in program.orders:
            self.first.append(size)
            size += len(order) + 1
        self.size = size
        # nodes, in the order of the pass
        self.slots: list[int] = []
        self.befores: list[int] = []  # slot of the node before it on its rank
        self.sources: list[int] = []  # slot after which its message can leave; 0: it takes none
        self.posts: list[int] = []  # slot after which its receive is posted; 0: not a lowered program
        self.kinds: list[int] = []  # class
        self.meetings: list[Meeting] = []
        # messages of a lowered program, in the order of the nodes that take them
        self.sends: list[int] = []
        self.receives: list[int] = []
        self.transfers: list[int] = []  # slots of all sends and receives
        self.transfers_before: list[int] = []  # slots of the nodes before them
        self.complete = _Encoder(program, self).run()
        self.counts = {  # how often there is a node of each (stage, kind)
            (kind // len(KINDS), _KINDS[kind % len(KINDS)]): count
            for kind, count in Counter(self.kinds).items()
        }
        self.messages = sum(
            count
            for (stage, kind), count in self.counts.items()
            if sent_by(program, Action(stage, kind, 0)) is not None
        )


def encode(program: Program) -> Code:
    """The program's code, made when first asked for and kept as long as the program is."""
    found = _KNOWN.get(id(program))
    if found is not None and found[0]() is program:
        return found[1]
    key = id(program)
    code = Code(program)
    _KNOWN[key] = (weakref.ref(program, lambda _: _KNOWN.pop(key, None)), code)
    return code


# by identity: programs are compared and hashed by all of their actions
_KNOWN: dict[int, tuple[weakref.ref[Program], Code]] = {}

_FREE, _OWN, _AWAY, _POSTED, _TRANSFER = range(5)  # what an action waits for, or that it is a transfer


class _Rule(NamedTuple):
    """What holds for all actions of a class; lists are by microbatch and have slots, -1 before it is done."""

    what: int
    kind: int
    need: list[int]  # what must be done, or sent
    post: list[int]  # receives
    note: list[int]  # where the action notes that it is done
    source: int  # rank that does what is needed


class _Encoder:
    """Plays the program without times, to sort its actions."""

    def __init__(self, program: Program, code: Code) -> None:
        self.program, self.code = program, code
        self.noted: dict[tuple[int, Kind], list[int]] = defaultdict(lambda: [-1] * program.microbatches)
        self.rules = [self._rules(stage) for stage in range(program.stages)]
        self.tied = tied_arrivals(program) if program.tied else {}
        self.came: dict[tuple[int, int], int] = {}  # at a meeting: rank's last node before it
        self.reached = list(code.first)  # slot that each rank waits at
        self.earlier = [0] * code.size  # for each transfer's slot, the node before it

    def run(self) -> bool:
        """Let every rank go on as far as it can, again whenever the rank it waits for has moved.

        Returns:
            whether all come to their ends.
        """
        walks = [self._walk(rank) for rank in range(self.program.ranks)]
        going = list(range(self.program.ranks))
        sleepers: list[list[int]] = [[] for _ in going]
        left = len(going)
        while going:
            rank = going.pop()
            before = self.reached[rank]
            blocker = next(walks[rank], None)
            if blocker is None:
                left -= 1
            else:
                sleepers[blocker].append(rank)
            if self.reached[rank] > before and sleepers[rank]:
                going.extend(sleepers[rank])
                sleepers[rank] = []
        self.code.transfers_before = list(map(self.earlier.__getitem__, self.code.transfers))
        return left == 0

    def _walk(self, rank: int) -> Iterator[int]:
        """Go through the rank's order; yields the rank to wait for whenever there is one."""
        code = self.code
        rules = self.rules
        earlier = self.earlier
        add_transfer = code.transfers.append
        add_slot = code.slots.append
        add_before = code.befores.append
        add_kind = code.kinds.append
        add_source, add_post = code.sources.append, code.posts.append
        slot = last = code.first[rank]
        for stage, kind, i in self.program.orders[rank]:
            slot += 1
            rule = rules[stage].get(kind)
            if rule is None or i is None:
                for blocker in self._meet(rank, slot, last):
                    self.reached[rank] = slot
                    yield blocker
                add_slot(slot)
                add_before(last)
                add_source(0)
                add_post(0)
                add_kind(stage * len(KINDS) + KINDS[kind])
                last = slot
                continue
            what, number, need, post, note, source = rule
            if what == _TRANSFER:
                note[i] = slot
                earlier[slot] = last
                add_transfer(slot)
                continue
            found = posted = 0
            if what != _FREE:
                while (found := need[i]) < 0:
                    self.reached[rank] = slot
                    yield source
                if what == _OWN:
                    found = 0
                elif what == _POSTED:
                    while (posted := post[i]) < 0:
                        self.reached[rank] = slot
                        yield rank
                    code.sends.append(found)
                    code.receives.append(posted)
                    found, posted = earlier[found], earlier[posted]
            add_slot(slot)
            add_before(last)
            add_source(found)
            add_post(posted)
            add_kind(number)
            note[i] = last = slot
        self.reached[rank] = slot + 1

    def _meet(self, rank: int, slot: int, last: int) -> Iterator[int]:
        """Yields the rank to wait for until all have come, if the action is a meeting."""
        at = slot - 1 - self.code.first[rank]
        others = self.tied.get((rank, at))
        if others is None:
            return
        self.came[rank, at] = last
        for wait in others:
            while (wait.rank, wait.reach) not in self.came:
                yield wait.rank
        members = [last, *(self.came[wait.rank, wait.reach] for wait in others)]
        self.code.meetings.append(Meeting(len(self.code.slots), slot, members))

    def _rules(self, stage: int) -> dict[Kind, _Rule]:
        """The rule of every kind that concerns one microbatch and takes part in the order."""
        program, noted = self.program, self.noted
        rank = program.placement[stage]
        nothing: list[int] = []
        rules = {
            kind: _Rule(
                what=_TRANSFER,
                kind=0,
                need=nothing,
                post=nothing,
                note=noted[stage, kind],
                source=rank,
            )
            for kind in TRANSFER
        }

        def rule(what: int, kind: Kind, need: list[int], source: int = rank) -> _Rule:
            note = noted[stage, Kind.I if kind is Kind.B else kind]
            number = stage * len(KINDS) + KINDS[kind]
            return _Rule(what=what, kind=number, need=need, post=nothing, note=note, source=source)

        rules[Kind.W] = rule(_OWN, Kind.W, noted[stage, Kind.I])
        rules[Kind.RECOMPUTE] = rule(_OWN, Kind.RECOMPUTE, noted[stage, Kind.F])
        for kind in (Kind.F, Kind.I, Kind.B):
            forward = kind is Kind.F
            ends = program.is_first(stage) if forward else program.is_last(stage)
            source = stage - 1 if forward else stage + 1
            if ends:
                # the loss: its gradient is there with the forward
                rules[kind] = rule(_FREE if forward else _OWN, kind, noted[stage, Kind.F])
                continue
            away, made = program.placement[source], noted[source, Kind.F if forward else Kind.I]
            receive = needed_by(program, Action(stage, kind, 0))
            found = rule(_OWN if receive is None else _AWAY, kind, made, away)
            if receive is not None and program.lowered:
                sent = noted[source, Kind.SEND_F if forward else Kind.SEND_B]
                found = found._replace(what=_POSTED, need=sent, post=noted[stage, receive.kind])
            rules[kind] = found
        return rules


def sweep(code: Code, cost: Sequence[float], delay: Sequence[float]) -> tuple[list[float], list[float]]:
    """Start and end of every slot.

    A node starts when the one before it on its rank is over and its message is there; a message leaves once
    what makes it is over and, in a lowered program, its receive is posted.

    Args:
        code: of a program that completes.
        cost: time of a node, by class.
        delay: time of its message, by class.
    """
    starts = [0.0] * code.size
    ends = [0.0] * code.size
    if not code.transfers and not code.meetings:
        _plain(code, cost, delay, starts, ends)
        return starts, ends
    come: list[float] = []
    done = 0
    for at, slot, last in code.meetings:
        _posted(code=code, begin=done, end=at, cost=cost, delay=delay, starts=starts, ends=ends, come=come)
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
        come=come,
    )
    for slot, before in zip(code.transfers, code.transfers_before, strict=True):
        starts[slot] = ends[slot] = ends[before]
    for there, send, receive in zip(come, code.sends, code.receives, strict=True):
        ends[send] = ends[receive] = there
    return starts, ends


def _plain(
    code: Code, cost: Sequence[float], delay: Sequence[float], starts: list[float], ends: list[float]
) -> None:
    """Without sends and receives in the orders."""
    for slot, source, kind in zip(code.slots, code.sources, code.kinds, strict=True):
        start = ends[slot - 1]
        if source:
            there = ends[source] + delay[kind]
            if there > start:
                start = there
        starts[slot] = start
        ends[slot] = start + cost[kind]


def _posted(
    code: Code,
    begin: int,
    end: int,
    cost: Sequence[float],
    delay: Sequence[float],
    starts: list[float],
    ends: list[float],
    come: list[float],
) -> None:
    """Nodes `begin` to `end` of a lowered program; `come` gets when their messages are there."""
    nodes = zip(code.slots, code.befores, code.sources, code.posts, code.kinds, strict=True)
    for slot, before, source, posted, kind in islice(nodes, begin, end):
        start = ends[before]
        if source:
            there = ends[source]
            if ends[posted] > there:
                there = ends[posted]
            there += delay[kind]
            come.append(there)
            if there > start:
                start = there
        starts[slot] = start
        ends[slot] = start + cost[kind]
