"""Why a job hangs: a comparison of the calls that its ranks have issued.

A collective ends when all ranks of its group have issued it, a message when both of its ranks have. A call
that has not ended makes its rank wait for the ranks that have not issued it; following the waits leads to
ranks that wait for no other, or round in a circle. Calls with the same number in a group that differ explain
a hang before any wait does, since from there on the ranks' calls do not match.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from stretto.errors import StrettoError
from stretto.run.diagnose.dump import RankDump, RecordedCall, RecordedGroup

# in these operations ranks may send each other tensors of different sizes
_UNEVEN = ("all_to_all", "gather", "scatter", "_v", "alltoall")
# a rank can complete these while others have not issued them yet
_ONE_SIDED = ("broadcast", "_broadcast_oop", "scatter", "gather", "reduce", "_reduce_oop")

MOST_RANKS = 2**20

HangKind = Literal["mismatch", "missing", "circle", "stalled", "fine"]


class RankWait(NamedTuple):
    """`rank` cannot continue before `target` issues `call`, which is the waiting rank's."""

    rank: int
    target: int
    call: RecordedCall


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A collective that some ranks have issued and others have not."""

    group: RecordedGroup
    number: int
    waiting: Mapping[int, RecordedCall]
    missing: tuple[int, ...]
    members_known: bool


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Calls of one number in a group, or the two ends of a message, that do not fit each other.

    odd: ranks in the minority, or all in case of a tie.
    about: the difference: "operation", "size" or "type".
    slip: 1 if the odd rank seems to have skipped a call, -1 if it made one too many, 0 if unknown.
    """

    group: RecordedGroup
    number: int
    calls: Mapping[int, RecordedCall]
    odd: tuple[int, ...]
    about: str
    slip: int = 0


@dataclass(frozen=True, kw_only=True)
class Stalled:
    """A call that all ranks have issued, with the same arguments, and that has not ended on `open_on`.

    queued: ranks whose device has not started it, while others' have.
    """

    calls: Mapping[int, RecordedCall]
    open_on: tuple[int, ...]
    queued: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The diagnosis of a job, from its dumps.

    world: number of ranks of the job, as far as the dumps show it.
    absent: ranks without a dump.
    culprits: ranks that others wait for, directly or indirectly, and that wait for no other.
    circle: ranks that wait for each other, with the first repeated at the end; () if there are none.
    last: newest call of each rank.
    """

    world: int
    dumps: Sequence[RankDump]
    absent: tuple[int, ...]
    mismatches: tuple[Mismatch, ...]
    missing: tuple[Missing, ...]
    stalled: tuple[Stalled, ...]
    waits: tuple[RankWait, ...]
    culprits: tuple[int, ...]
    circle: tuple[int, ...]
    last: Mapping[int, RecordedCall]

    @property
    def verdict(self) -> HangKind:
        if self.mismatches:
            return "mismatch"
        if self.culprits:
            return "missing"
        if self.circle:
            return "circle"
        return "stalled" if self.stalled else "fine"

    def chain(self, rank: int) -> list[RankWait]:
        """Return the shortest chain of waits from a rank to a culprit; [] if there is none."""
        chains: dict[int, list[RankWait]] = {rank: []}
        reached = [rank]
        for waiting in reached:
            if waiting in self.culprits and chains[waiting]:
                return chains[waiting]
            for wait in self.waits:
                if wait.rank == waiting and wait.target not in chains:
                    chains[wait.target] = [*chains[waiting], wait]
                    reached.append(wait.target)
        return []


def diagnose(dumps: Sequence[RankDump], world: int | None = None) -> Diagnosis:
    """Compare the ranks' calls.

    Args:
        dumps: at most one dump per rank.
        world: number of ranks of the job, or None for as many as the dumps name.

    Raises:
        StrettoError: the dumps name more than MOST_RANKS ranks.
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
    groups = defaultdict[RecordedGroup, list[RecordedCall]](list)  # those of one name with other ranks differ
    for dump in dumps:
        for call in dump.calls:
            groups[call.group].append(call)
    for group, calls in groups.items():
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


class _Findings:
    """Collects what is wrong, one group after another."""

    def __init__(self, present: Mapping[int, RankDump], world: int) -> None:
        self._present, self._world = present, world
        # these wait in a call that is recorded as open, so that none of their other calls has failed
        self._inside = {rank for rank, dump in present.items() if not all(call.done for call in dump.calls)}
        self.mismatches = list[Mismatch]()
        self.missing = list[Missing]()
        self.stalled = list[Stalled]()
        self.waits = list[RankWait]()

    # ------------------------------------------------------------------ collectives

    def collectives(self, group: RecordedGroup, calls: Iterable[RecordedCall]) -> None:
        """Compare the collectives of a group in order of their numbers."""
        by_number = defaultdict[int, dict[int, list[RecordedCall]]](dict)
        for call in calls:
            if not call.message:
                by_number[call.number].setdefault(call.rank, []).append(call)
        if not by_number:
            return
        members, members_known = self._members(group, {rank for each in by_number.values() for rank in each})
        newest = {
            rank: max(numbers)
            for rank in members
            if (numbers := [n for n, each in by_number.items() if rank in each])
        }
        for rank in members:
            dump = self._present.get(rank)
            if dump is not None and rank not in newest:
                newest[rank] = 0 if dump.complete else dump.enqueued.get(group.name, 0)
        for number in sorted(by_number):
            each = by_number[number]
            unfinished = {
                rank: stuck
                for rank, own_calls in each.items()
                if (stuck := _open(own_calls, newest[rank] == number and rank not in self._inside))
            }
            if not unfinished:
                continue
            mismatch = _mismatch(group, number, each, by_number)
            if mismatch is not None:
                self.mismatches.append(mismatch)
                return
            if self._unfinished(
                group, number, each, unfinished, members=members, newest=newest, members_known=members_known
            ):
                return  # later ones cannot end before it

    def _unfinished(
        self,
        group: RecordedGroup,
        number: int,
        each: Mapping[int, list[RecordedCall]],
        unfinished: Mapping[int, RecordedCall],
        *,
        members: Sequence[int],
        newest: Mapping[int, int],
        members_known: bool,
    ) -> bool:
        """Record a call that not all ranks have ended; return True if it holds up later ones."""
        late = [rank for rank in members if newest.get(rank, number) < number]
        silent = [rank for rank in members if rank not in self._present]
        if late or silent:
            # a rank without a dump may have issued the call, so it is blamed only if no other is
            blamed = tuple(late or silent)
            self.missing.append(
                Missing(
                    group=group,
                    number=number,
                    waiting=dict(unfinished),
                    missing=blamed,
                    members_known=members_known,
                )
            )
            self.waits += [
                RankWait(rank, target, call) for rank, call in unfinished.items() for target in blamed
            ]
            return True
        pending = {rank: call for rank, call in unfinished.items() if not call.done}
        if pending:
            begun = any(call.started for calls in each.values() for call in calls)
            queued = tuple(rank for rank, call in pending.items() if begun and not call.started)
            firsts = {rank: calls[0] for rank, calls in each.items()}
            self.stalled.append(Stalled(calls=firsts, open_on=tuple(pending), queued=queued))
            self.waits += [
                RankWait(rank, target, call)
                for rank, call in pending.items()
                for target in queued
                if rank not in queued
            ]
        return bool(pending)

    def _members(self, group: RecordedGroup, users: set[int]) -> tuple[list[int], bool]:
        """Return the ranks of a group, and whether they are known: from the dump, or all ranks for the
        default group. Of another group they are the ranks that have used it.
        """
        if group.ranks:
            return list(group.ranks), True
        if group.about == "default_pg" or group.name == "0":
            return list(range(self._world)), True
        return sorted(users), False

    # ------------------------------------------------------------------ messages

    def messages(self, group: RecordedGroup, calls: Iterable[RecordedCall]) -> None:
        """Pair the sends and receives of a group, in the order in which they were issued."""
        ends = defaultdict[tuple[int, int], tuple[list[RecordedCall], list[RecordedCall]]](lambda: ([], []))
        for call in calls:
            if call.peer is not None:
                channel = (call.rank, call.peer) if call.sends else (call.peer, call.rank)
                ends[channel][0 if call.sends else 1].append(call)
        for (source, target), (sends, receives) in ends.items():
            dumps = [self._present.get(source), self._present.get(target)]
            if not all(dump is not None and dump.complete for dump in dumps):
                # the ends of the oldest may be overwritten: what has ended has been paired
                sends, receives = ([c for c in side if not c.done] for side in (sends, receives))
            for position in range(max(len(sends), len(receives))):
                send = sends[position] if position < len(sends) else None
                receive = receives[position] if position < len(receives) else None
                self._message(group, source, target, send, receive)

    def _message(
        self,
        group: RecordedGroup,
        source: int,
        target: int,
        send: RecordedCall | None,
        receive: RecordedCall | None,
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
        self.waits.append(RankWait(call.rank, target if call.sends else source, call))


def _open(calls: Sequence[RecordedCall], newest: bool) -> RecordedCall | None:
    """Return the first of a rank's calls of one number that has not ended or may have failed: gloo retires a
    call that timed out as it does a completed one.
    """
    for call in calls:
        if not call.done:
            return call
        if newest and not call.completed and call.operation not in _ONE_SIDED:
            return call
    return None


def _mismatch(
    group: RecordedGroup,
    number: int,
    each: Mapping[int, list[RecordedCall]],
    by_number: Mapping[int, Mapping[int, list[RecordedCall]]],
) -> Mismatch | None:
    """Return how the ranks' calls of one number differ, if they do."""
    for about, key in (("operation", _operations), ("type", _types), ("size", _shapes)):
        values = {rank: key(calls) for rank, calls in each.items()}
        counts = Counter(values.values()).most_common()
        if len(counts) < 2:
            continue
        (majority, majority_count), (_, next_most) = counts[:2]
        alike = majority_count == next_most
        odd = tuple(sorted(rank for rank, value in values.items() if alike or value != majority))
        slip = 0
        if about == "operation" and not alike and len(odd) == 1:
            slip = _slip(next(rank for rank in values if rank not in odd), odd[0], number, by_number)
        calls = {rank: own_calls[0] for rank, own_calls in sorted(each.items())}
        return Mismatch(group=group, number=number, calls=calls, odd=odd, about=about, slip=slip)
    return None


def _slip(
    majority: int, odd: int, number: int, by_number: Mapping[int, Mapping[int, list[RecordedCall]]]
) -> int:
    """Return 1 if the odd rank's call is the majority's next one, -1 if its next is the majority's, else
    0.
    """

    def operations(rank: int, n: int) -> tuple[str, ...] | None:
        return _operations(by_number[n][rank]) if n in by_number and rank in by_number[n] else None

    if operations(odd, number) == operations(majority, number + 1):
        return 1
    return -1 if operations(odd, number + 1) == operations(majority, number) else 0


def _operations(calls: Sequence[RecordedCall]) -> tuple[str, ...]:
    return tuple(call.operation for call in calls)


def _types(calls: Sequence[RecordedCall]) -> object:
    return tuple((call.operation, frozenset({*call.input_dtypes, *call.output_dtypes})) for call in calls)


def _shapes(calls: Sequence[RecordedCall]) -> object:
    """Return what must agree on all ranks; tensors count by their elements, as they are sent flat."""
    return tuple(
        None
        if any(word in call.operation for word in _UNEVEN) and not call.operation.startswith("all_gather")
        else sum(map(prod, call.input_sizes))
        for call in calls
    )


def _message_differs(send: RecordedCall, receive: RecordedCall) -> str:
    """Return what differs at the two ends of a message: "size", "type" or ""."""
    sent, expected = send.input_sizes or send.output_sizes, receive.output_sizes or receive.input_sizes
    if sent and expected and sum(map(prod, sent)) != sum(map(prod, expected)):
        return "size"
    kinds = [set(call.input_dtypes or call.output_dtypes) for call in (send, receive)]
    return "type" if all(kinds) and kinds[0] != kinds[1] else ""


def _circle(waits: Sequence[RankWait]) -> tuple[int, ...]:
    """Return a shortest circle of waits, with its smallest rank first and last; () if there is none."""
    after = defaultdict[int, list[int]](list)
    for wait in waits:
        after[wait.rank].append(wait.target)
    best: tuple[int, ...] = ()
    for start in sorted(after):
        ways: dict[int, tuple[int, ...]] = {start: (start,)}
        reached = [start]
        for rank in reached:
            if start in after[rank] and (not best or len(ways[rank]) + 1 < len(best)):
                best = (*ways[rank], start)
                break
            for target in after[rank]:
                if target not in ways:
                    ways[target] = (*ways[rank], target)
                    reached.append(target)
    return best
