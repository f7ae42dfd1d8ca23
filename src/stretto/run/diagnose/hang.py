"""Why a job hangs: what its ranks have asked for, put side by side.

A collective ends when all ranks of its group have come to it, a message when both of its ranks have. So a
call that has not ended makes its rank wait for those that have not come; following the waits leads to the
ranks that wait for no other, or round in a circle. Calls of one number in a group that differ explain a hang
before any wait does, since from there on the ranks talk at cross purposes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.errors import StrettoError
from stretto.run.diagnose.dump import Call, Group, RankDump

# ranks of these may give each other tensors of different sizes
_UNEVEN = ("all_to_all", "gather", "scatter", "_v", "alltoall")
# a rank can be through with these while others have not come yet
_ONE_SIDED = ("broadcast", "_broadcast_oop", "scatter", "gather", "reduce", "_reduce_oop")

MOST_RANKS = 2**20

Verdict = Literal["mismatch", "missing", "circle", "stalled", "fine"]


class Wait(NamedTuple):
    """`rank` cannot go on before `target` comes to `call`, which is the waiting rank's."""

    rank: int
    target: int
    call: Call


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A collective to which some ranks have come and others have not."""

    group: Group
    number: int
    waiting: Mapping[int, Call]
    missing: tuple[int, ...]
    members_known: bool


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Calls of one number in a group, or the two ends of a message, that do not fit each other.

    odd: the ranks in the minority; all, where there is none.
    about: what differs: "operation", "size" or "type".
    slip: how many calls the odd rank seems to have left out (1) or to have made too many (-1); 0: unknown.
    """

    group: Group
    number: int
    calls: Mapping[int, Call]
    odd: tuple[int, ...]
    about: str
    slip: int = 0


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """A call that all ranks have come to, with the same arguments, and that has not ended on `open_on`.

    queued: those whose device has not begun with it, while others' have.
    """

    calls: Mapping[int, Call]
    open_on: tuple[int, ...]
    queued: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the dumps of a job say.

    world: ranks of the job, as far as the dumps tell.
    absent: ranks without a dump.
    culprits: the ranks that others wait for, directly or through others, and that wait for no other.
    circle: ranks that wait for each other, the first again at the end; () where there is none.
    last: the newest call of each rank.
    """

    world: int
    dumps: Sequence[RankDump]
    absent: tuple[int, ...]
    mismatches: tuple[Mismatch, ...]
    missing: tuple[Missing, ...]
    stalled: tuple[Stalled, ...]
    waits: tuple[Wait, ...]
    culprits: tuple[int, ...]
    circle: tuple[int, ...]
    last: Mapping[int, Call]

    @property
    def verdict(self) -> Verdict:
        if self.mismatches:
            return "mismatch"
        if self.culprits:
            return "missing"
        if self.circle:
            return "circle"
        return "stalled" if self.stalled else "fine"

    def chain(self, rank: int) -> list[Wait]:
        """The waits from a rank to a culprit, the fewest; [] where there is no such way."""
        ways: dict[int, list[Wait]] = {rank: []}
        reached = [rank]
        for at in reached:
            if at in self.culprits and ways[at]:
                return ways[at]
            for wait in self.waits:
                if wait.rank == at and wait.target not in ways:
                    ways[wait.target] = [*ways[at], wait]
                    reached.append(wait.target)
        return []


def diagnose(dumps: Sequence[RankDump], world: int | None = None) -> Diagnosis:
    """Put the ranks' calls side by side.

    Args:
        dumps: at most one a rank.
        world: ranks of the job; None: as many as the dumps speak of.

    Raises:
        StrettoError: they speak of more ranks than any job has.
    """
    named = [rank for dump in dumps for group in dump.groups.values() for rank in group.ranks]
    peers = [call.peer for dump in dumps for call in dump.calls if call.peer is not None]
    ranks = world or 1 + max([*(dump.rank for dump in dumps), *named, *peers])
    if ranks > MOST_RANKS:
        raise StrettoError(
            f"the dumps name rank {ranks - 1:,}, at most {MOST_RANKS:,} ranks are read",
            hint="are they dumps of torch?",
        )
    present = {dump.rank: dump for dump in dumps}
    findings = _Findings(present, ranks)
    for group, calls in _by_group(dumps).items():
        findings.collectives(group, calls)
        findings.messages(group, calls)
    waits = tuple(dict.fromkeys(findings.waits))
    waiting = {wait.rank for wait in waits}
    culprits = tuple(sorted({wait.target for wait in waits} - waiting))
    return Diagnosis(
        world=ranks,
        dumps=dumps,
        absent=tuple(rank for rank in range(ranks) if rank not in present),
        mismatches=tuple(findings.mismatches),
        missing=tuple(findings.missing),
        stalled=tuple(findings.stalled),
        waits=waits,
        culprits=culprits,
        circle=() if culprits else _circle(waits),
        last={rank: max(dump.calls, key=lambda c: c.record) for rank, dump in present.items() if dump.calls},
    )


def _by_group(dumps: Sequence[RankDump]) -> dict[Group, list[Call]]:
    """The calls of each group. Groups of one name with other ranks are others."""
    groups = defaultdict[Group, list[Call]](list)
    for dump in dumps:
        for call in dump.calls:
            groups[call.group].append(call)
    return groups


class _Findings:
    """Collects what is wrong, group by group."""

    def __init__(self, present: Mapping[int, RankDump], world: int) -> None:
        self._present, self._world = present, world
        # these wait in a call that is on record as open, so that none of their others has failed
        self._inside = {rank for rank, dump in present.items() if not all(call.done for call in dump.calls)}
        self.mismatches = list[Mismatch]()
        self.missing = list[Missing]()
        self.stalled = list[Stalled]()
        self.waits = list[Wait]()

    # ------------------------------------------------------------------ collectives

    def collectives(self, group: Group, calls: Iterable[Call]) -> None:
        """Compare the collectives of a group, number by number."""
        at = defaultdict[int, dict[int, list[Call]]](dict)
        for call in calls:
            if not call.message:
                at[call.number].setdefault(call.rank, []).append(call)
        if not at:
            return
        members, known = self._members(group, {rank for each in at.values() for rank in each})
        newest = {
            rank: max(n for n, each in at.items() if rank in each) for rank in members if _has(at, rank)
        }
        for rank in members:
            dump = self._present.get(rank)
            if dump is not None and rank not in newest:
                newest[rank] = 0 if dump.whole else dump.enqueued.get(group.name, 0)
        for number in sorted(at):
            each = at[number]
            unfinished = {
                rank: stuck
                for rank, mine in each.items()
                if (stuck := _open(mine, newest[rank] == number and rank not in self._inside))
            }
            if not unfinished:
                continue
            mismatch = _mismatch(group, number, each, at)
            if mismatch is not None:
                self.mismatches.append(mismatch)
                return
            if self._unfinished(group, number, each, unfinished, members=members, newest=newest, known=known):
                return  # later ones cannot end before it

    def _unfinished(
        self,
        group: Group,
        number: int,
        each: Mapping[int, list[Call]],
        unfinished: Mapping[int, Call],
        *,
        members: Sequence[int],
        newest: Mapping[int, int],
        known: bool,
    ) -> bool:
        """A number to which some ranks have come, and not all ended it; whether it holds up later ones."""
        late = [rank for rank in members if newest.get(rank, number) < number]
        silent = [rank for rank in members if rank not in self._present]
        if late or silent:
            # one without a dump may have come, so it is blamed only where no other is
            blamed = tuple(late or silent)
            self.missing.append(
                Missing(
                    group=group, number=number, waiting=dict(unfinished), missing=blamed, members_known=known
                )
            )
            self.waits += [Wait(rank, target, call) for rank, call in unfinished.items() for target in blamed]
            return True
        pending = {rank: call for rank, call in unfinished.items() if not call.done}
        if pending:
            begun = any(call.started for calls in each.values() for call in calls)
            queued = tuple(rank for rank, call in pending.items() if begun and not call.started)
            firsts = {rank: calls[0] for rank, calls in each.items()}
            self.stalled.append(Stalled(calls=firsts, open_on=tuple(pending), queued=queued))
            self.waits += [
                Wait(rank, target, call)
                for rank, call in pending.items()
                for target in queued
                if rank not in queued
            ]
        return bool(pending)

    def _members(self, group: Group, seen: set[int]) -> tuple[list[int], bool]:
        """The ranks of a group, and whether the dump says so; else all for the default group, and for any
        other those that have been seen to use it.
        """
        if group.ranks:
            return list(group.ranks), True
        if group.about == "default_pg" or group.name == "0":
            return list(range(self._world)), True
        return sorted(seen), False

    # ------------------------------------------------------------------ messages

    def messages(self, group: Group, calls: Iterable[Call]) -> None:
        """Pair the sends and receives of a group, in the order in which they were asked for."""
        ends = defaultdict[tuple[int, int], tuple[list[Call], list[Call]]](lambda: ([], []))
        for call in calls:
            if call.peer is not None:
                channel = (call.rank, call.peer) if call.sends else (call.peer, call.rank)
                ends[channel][0 if call.sends else 1].append(call)
        for (source, target), (sends, receives) in ends.items():
            dumps = [self._present.get(source), self._present.get(target)]
            if not all(dump is not None and dump.whole for dump in dumps):
                # the ends of the oldest may be overwritten: what has ended has been paired
                sends, receives = ([c for c in side if not c.done] for side in (sends, receives))
            for at in range(max(len(sends), len(receives))):
                send = sends[at] if at < len(sends) else None
                receive = receives[at] if at < len(receives) else None
                self._message(group, source, target, send, receive)

    def _message(
        self, group: Group, source: int, target: int, send: Call | None, receive: Call | None
    ) -> None:
        ends = [call for call in (send, receive) if call is not None and not call.done]
        if not ends:
            return
        if send is not None and receive is not None:
            about = _message_differs(send, receive)
            if about:
                calls = {source: send, target: receive}
                self.mismatches.append(
                    Mismatch(group=group, number=send.number, calls=calls, odd=(source, target), about=about)
                )
            elif not send.done and not receive.done:
                both = {source: send, target: receive}
                self.stalled.append(Stalled(calls=both, open_on=(source, target), queued=()))
            return
        (call,) = ends
        self.waits.append(Wait(call.rank, target if call.sends else source, call))


def _has(at: Mapping[int, Mapping[int, object]], rank: int) -> bool:
    return any(rank in each for each in at.values())


def _open(calls: Sequence[Call], newest: bool) -> Call | None:
    """The first of a rank's calls of one number that has not ended, or may have failed: gloo retires a call
    that has timed out as it does one that is done.
    """
    for call in calls:
        if not call.done:
            return call
        if newest and not call.completed and call.operation not in _ONE_SIDED:
            return call
    return None


def _mismatch(
    group: Group, number: int, each: Mapping[int, list[Call]], at: Mapping[int, Mapping[int, list[Call]]]
) -> Mismatch | None:
    """How the ranks' calls of one number differ, if they do."""
    for about, key in (("operation", _operations), ("type", _types), ("size", _shapes)):
        values = {rank: key(calls) for rank, calls in each.items()}
        counts = Counter(values.values()).most_common()
        if len(counts) < 2:
            continue
        (usual, most), (_, next_most) = counts[:2]
        alike = most == next_most
        odd = tuple(sorted(rank for rank, value in values.items() if alike or value != usual))
        slip = 0
        if about == "operation" and not alike and len(odd) == 1:
            slip = _slip(next(rank for rank in values if rank not in odd), odd[0], number, at)
        calls = {rank: mine[0] for rank, mine in sorted(each.items())}
        return Mismatch(group=group, number=number, calls=calls, odd=odd, about=about, slip=slip)
    return None


def _slip(usual: int, odd: int, number: int, at: Mapping[int, Mapping[int, list[Call]]]) -> int:
    """Whether the odd rank's call is the usual one's next (1), or its next is the usual one's (-1)."""

    def operations(rank: int, n: int) -> tuple[str, ...] | None:
        return _operations(at[n][rank]) if n in at and rank in at[n] else None

    if operations(odd, number) == operations(usual, number + 1):
        return 1
    return -1 if operations(odd, number + 1) == operations(usual, number) else 0


def _operations(calls: Sequence[Call]) -> tuple[str, ...]:
    return tuple(call.operation for call in calls)


def _types(calls: Sequence[Call]) -> object:
    return tuple((call.operation, frozenset({*call.input_dtypes, *call.output_dtypes})) for call in calls)


def _shapes(calls: Sequence[Call]) -> object:
    """What must be alike on all ranks; tensors count by their elements, as they are sent flat."""
    return tuple(
        None
        if any(word in call.operation for word in _UNEVEN) and not call.operation.startswith("all_gather")
        else sum(map(_elements, call.input_sizes))
        for call in calls
    )


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _message_differs(send: Call, receive: Call) -> str:
    """What of a message differs at its two ends."""
    sent, expected = send.input_sizes or send.output_sizes, receive.output_sizes or receive.input_sizes
    if sent and expected and sum(map(_elements, sent)) != sum(map(_elements, expected)):
        return "size"
    kinds = [set(call.input_dtypes or call.output_dtypes) for call in (send, receive)]
    return "type" if all(kinds) and kinds[0] != kinds[1] else ""


def _circle(waits: Sequence[Wait]) -> tuple[int, ...]:
    """A shortest circle of waits, from its smallest rank round to it again; () without one."""
    after = defaultdict[int, list[int]](list)
    for wait in waits:
        after[wait.rank].append(wait.target)
    best: tuple[int, ...] = ()
    for start in sorted(after):
        ways: dict[int, tuple[int, ...]] = {start: (start,)}
        reached = [start]
        for at in reached:
            if start in after[at] and (not best or len(ways[at]) + 1 < len(best)):
                best = (*ways[at], start)
                break
            for target in after[at]:
                if target not in ways:
                    ways[target] = (*ways[at], target)
                    reached.append(target)
    return best
