"""Which ranks of a job have started: each registers in the rendezvous store, and rank 0 waits for all.

One store may outlive several attempts of a job, and hold the keys of dead ranks. An attempt is therefore
named by the nonce of its rank 0, and all its keys are under that name:

1. Rank 0 writes itself to RANK_0. If another process is there already, it pings it: one that answers is a
   living rank 0, so this one was started twice; one that does not answer is dead, and is replaced.
2. The others ping the process in RANK_0 until one answers, then register for its attempt. The slot of a rank
   can be taken once. A process that finds its slot taken was started twice.
3. Rank 0 starts the job once every rank is there, or names the missing ranks when the time is over.

Rank 0 answers pings for as long as the job runs, so that a rank 0 that is started beside it is refused.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stretto.errors import StrettoError
from stretto.layout.ranges import rank_ranges
from stretto.run.launch.failure import RanksMissing
from stretto.run.launch.lease import is_running

RANK_0 = "stretto/rank0"  # the member that is rank 0
NOTE_S, NOTE_EVERY_S = 5.0, 15.0  # until the first line that says who is missing, and from one to the next
_ANSWER_S = 3.0  # after which a rank 0 that does not answer is dead
_POLL_S, _LONGEST_POLL_S = 0.01, 0.1
_POLLS = 10_000  # of the store, a second, by all ranks together
_WAIT_S, _GUARD_S = 0.5, 1.0
_LINGER_S = 1.0  # for the others to read why rank 0 gives up, as it may host the store
_BEYOND_S = 30.0  # after train.start_s: rank 0 may have come later than others
_SHOWN = 6  # hosts, or ranges of ranks, in a line
_GO = "go"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process that has come as a rank.

    Attributes:
        process: its number on the host.
        nonce: unlike any other process's.
    """

    rank: int
    world: int
    host: str
    process: int
    nonce: str

    @classmethod
    def here(cls, rank: int, world: int) -> Member:
        """This process."""
        return cls(
            rank=rank, world=world, host=socket.gethostname(), process=os.getpid(), nonce=uuid.uuid4().hex
        )

    @classmethod
    def read(cls, text: bytes) -> Member:
        """From what `text` writes; anything else raises StrettoError."""
        try:
            facts = json.loads(text)
            return cls(
                rank=int(facts["rank"]),
                world=int(facts["world"]),
                host=str(facts["host"])[:128],
                process=int(facts["process"]),
                nonce=str(facts["nonce"])[:128],
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            raise StrettoError(
                "the rendezvous store has an entry that no rank of Stretto has written",
                hint="another program uses it; give the job a MASTER_PORT of its own",
            ) from None

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @property
    def place(self) -> str:
        """Host and process, in words."""
        return f"host {self.host}, process {self.process}"


class Clock:
    """The time since a rank began to wait, and when to say so.

    Args:
        start_s: the longest wait for others.
        say: tells people a line.
        check: called now and then; raises where the job was asked to stop.
    """

    def __init__(self, start_s: float, say: Callable[[str], None], check: Callable[[], None]) -> None:
        self.start_s = start_s
        self._say, self._check = say, check
        self._began = time.monotonic()
        self._next = NOTE_S

    def over(self, what: Callable[[], str], beyond: float = 0.0) -> bool:
        """Whether the time is over, by `beyond` seconds; now and then says `what` is waited for."""
        self._check()
        passed = time.monotonic() - self._began
        if passed >= self._next:
            self._next += NOTE_EVERY_S
            self._say(f"{what()} ({passed:.0f} s; train.start_s={self.start_s:g} is the limit)")
        return passed >= self.start_s + beyond


def register(store: Any, me: Member, clock: Clock) -> str:
    """Wait until every rank has come; returns the name of the attempt that they are in. Collective.

    Raises:
        RanksMissing: some have not come in time; it names them.
        StrettoError: this rank was started twice, or with another number of ranks than rank 0.
    """
    return _RankZero(store, me, clock).run() if me.rank == 0 else _register_other(store, me, clock)


def answer_late(store: Any, name: str, ended: threading.Event) -> None:
    """On rank 0, answer pings on a thread until `ended`: a rank 0 that is started beside the job pings it."""

    def loop() -> None:
        answered = store.add(_answers(name), 0)
        while not ended.wait(_GUARD_S):
            try:
                answered = _answer(store, name, answered)
            except RuntimeError:  # the store has gone, and with it the ranks that might ping
                return

    threading.Thread(target=loop, name="arrivals", daemon=True).start()


class _RankZero:
    """Rank 0, waiting for the others."""

    def __init__(self, store: Any, me: Member, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._me = me
        self._here = {0: me}
        self._answered = self._registered = 0
        self._pending = list[int]()  # numbers of arrivals that are to be read

    def run(self) -> str:
        self._take_rank_0()
        while len(self._here) < self._me.world:
            if not self._look():
                if self._clock.over(self._waiting_for):
                    self._give_up()
                time.sleep(_POLL_S)
        self._store.set(_start(self._me.nonce), _GO)
        return self._me.nonce

    def _take_rank_0(self) -> None:
        """Become the rank 0 of the store, unless one is there that lives."""
        store, me = self._store, self._me
        before = ""
        while (now := store.compare_set(RANK_0, before, me.text)) != me.text.encode():
            other = Member.read(now)
            gone = other.host == me.host and not is_running(other.process)
            if not gone and _answers_within(store, other, _ANSWER_S):
                raise started_twice(me, other)
            before = now.decode()

    def _look(self) -> bool:
        """Answer who has pinged; whether another rank has registered since."""
        store, name = self._store, self._me.nonce
        self._answered = _answer(store, name, self._answered)
        before, registered = self._registered, store.add(_registered(name), 0)
        self._registered = registered
        # some have drawn their numbers and not written themselves yet
        self._pending += range(before + 1, registered + 1)
        written = [number for number in self._pending if store.check([_arrival(name, number)])]
        for number in written:
            self._pending.remove(number)
            member = Member.read(store.get(_arrival(name, number)))
            self._here[member.rank] = member
        return bool(written)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._me.world) if rank not in self._here]

    def _waiting_for(self) -> str:
        return f"waiting for {_of(self._missing(), self._me.world)}; here: {_hosts(self._here.values())}"

    def _give_up(self) -> None:
        missing = self._missing()
        have = "have" if len(missing) > 1 else "has"
        text = (
            f"{_of(missing, self._me.world)} {have} not come within {self._clock.start_s:g} s "
            f"(train.start_s); here: {_hosts(self._here.values())}"
        )
        self._store.set(_start(self._me.nonce), text)
        time.sleep(_LINGER_S)
        raise missing_ranks(text)


def _register_other(store: Any, me: Member, clock: Clock) -> str:
    """As a rank other than 0."""
    first = _living_rank_0(store, me, clock)
    if first.world != me.world:
        raise StrettoError(
            f"rank {me.rank} on {me.place} was started with WORLD_SIZE={me.world}, and rank 0 on "
            f"{first.place} with {first.world}",
            hint="start all ranks with one WORLD_SIZE; jobs side by side need a MASTER_PORT each",
        )
    holder = store.compare_set(_slot(first.nonce, me.rank), "", me.text)
    if holder != me.text.encode():
        raise started_twice(me, Member.read(holder))
    store.set(_arrival(first.nonce, store.add(_registered(first.nonce), 1)), me.text)

    def waiting() -> str:
        return f"rank {me.rank} on {me.place} waits for rank 0 on {first.place} to start the job"

    while not _wait(store, _start(first.nonce), me.world):
        if clock.over(lambda: "", _BEYOND_S):
            raise missing_ranks(f"rank 0 on {first.place} has not started the job: {waiting()}")
    said = store.get(_start(first.nonce)).decode(errors="replace")
    if said != _GO:
        raise missing_ranks(said)
    return first.nonce


def _living_rank_0(store: Any, me: Member, clock: Clock) -> Member:
    """The rank 0 that answers; who has left its name and does not is dead, or has not come back yet."""
    pinged, number = "", 0

    def waiting() -> str:
        return f"rank {me.rank} on {me.place} waits for rank 0"

    while True:
        if _wait(store, RANK_0, me.world):
            first = Member.read(store.get(RANK_0))
            if first.nonce != pinged:
                pinged, number = first.nonce, _ping(store, first)
            if _wait(store, _reply(first.nonce, number), me.world):
                return first
        if clock.over(waiting):
            raise missing_ranks(
                f"rank 0 of {me.world} has not come within {clock.start_s:g} s (train.start_s); "
                f"rank {me.rank} waits on {me.place}"
            )


# ---------------------------------------------------------------------- pings


def _ping(store: Any, first: Member) -> int:
    return store.add(_pings(first.nonce), 1)


def _answer(store: Any, name: str, answered: int) -> int:
    """Answer all pings but the first `answered`; returns how many there were."""
    pings = store.add(_pings(name), 0)
    for number in range(answered + 1, pings + 1):
        store.set(_reply(name, number), "")
    if pings > answered:
        store.add(_answers(name), pings - answered)
    return pings


def _answers_within(store: Any, first: Member, seconds: float) -> bool:
    """Whether a rank 0 lives."""
    number, end = _ping(store, first), time.monotonic() + seconds
    while time.monotonic() < end:
        if _wait(store, _reply(first.nonce, number), first.world):
            return True
    return False


def _wait(store: Any, key: str, world: int) -> bool:
    """Wait a moment for a key; whether it is there. torch's own wait logs a warning for each time-out."""
    end, pause = time.monotonic() + _WAIT_S, _POLL_S
    longest = max(_LONGEST_POLL_S, world / _POLLS)
    while not (there := store.check([key])) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return there


def _slot(name: str, rank: int) -> str:
    return f"stretto/{name}/{rank}"


def _registered(name: str) -> str:
    return f"stretto/{name}/registered"


def _arrival(name: str, number: int) -> str:
    return f"stretto/{name}/arrival/{number}"


def _pings(name: str) -> str:
    return f"stretto/{name}/pings"


def _answers(name: str) -> str:
    return f"stretto/{name}/answers"


def _reply(name: str, number: int) -> str:
    return f"stretto/{name}/reply/{number}"


def _start(name: str) -> str:
    return f"stretto/{name}/start"


# ---------------------------------------------------------------------- words


def started_twice(me: Member, other: Member) -> StrettoError:
    """The error of a rank whose place another process has."""
    return StrettoError(
        f"rank {me.rank} was started twice: it runs already on {other.place}; this one, on {me.place}, ends",
        hint="give every process a RANK of its own, and jobs side by side a MASTER_PORT each",
    )


def missing_ranks(text: str) -> RanksMissing:
    """The error of a job whose start is given up."""
    return RanksMissing(
        text,
        hint="are their processes running, with the same MASTER_ADDR and MASTER_PORT, and do they reach it? "
        "train.start_s is the limit",
    )


def _of(ranks: Sequence[int], world: int) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)} of {world}"


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks in rising order, such as "0-7, 64-71"."""
    ranges = rank_ranges(ranks)
    return ", ".join(ranges[:_SHOWN]) + ", ..." * (len(ranges) > _SHOWN)


def _hosts(members: Iterable[Member]) -> str:
    """Which ranks are on which hosts."""
    hosts = dict[str, list[int]]()
    for member in sorted(members, key=lambda member: member.rank):
        hosts.setdefault(member.host, []).append(member.rank)
    text = ", ".join(f"{_ranges(ranks)} on {host}" for host, ranks in list(hosts.items())[:_SHOWN])
    return text + f" and {len(hosts) - _SHOWN} hosts more" * (len(hosts) > _SHOWN)


def to_stderr(text: str) -> None:
    """Tell people a line."""
    print(text, file=sys.stderr, flush=True)
