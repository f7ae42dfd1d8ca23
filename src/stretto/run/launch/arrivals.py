"""Which ranks of a job have started: each signs in at the rendezvous store, and rank 0 waits for all.

One store may outlive several attempts of a job, and hold what dead ranks have left. An attempt is therefore
named by a word of its rank 0 that nobody else has, and what it signs in under that name is its own:

1. Rank 0 puts itself at the store's FIRST. If somebody is there already, it knocks: a living rank 0 answers,
   so that this one was started twice; a dead one does not, and is replaced.
2. The others knock at the rank 0 that FIRST names until one answers, then sign in for its attempt. A place
   can be taken once. Whoever finds it taken was started twice.
3. Rank 0 tells all to start once nobody is missing, or names the missing ranks when the time is over.

Rank 0 answers knocks for as long as the job runs, so that a rank that is started again beside it is refused.
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
from stretto.run.launch.failure import RanksMissing

FIRST = "stretto/first"  # the member that is rank 0
NOTE_S, NOTE_EVERY_S = 5.0, 15.0  # until the first line that says who is missing, and from one to the next
_ANSWER_S = 3.0  # after which a rank 0 that does not answer is dead
_POLL_S, _LONGEST_POLL_S = 0.01, 0.1
_WAIT_S, _GUARD_S = 0.5, 1.0
_LINGER_S = 1.0  # for the others to read why rank 0 gives up, as it may host the store
_BEYOND_S = 30.0  # after train.start_s: rank 0 may have come later than others
_SHOWN = 6  # hosts, or runs of ranks, in a line
_GO = "go"


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process that has come as a rank.

    Attributes:
        process: its number on the host.
        word: unlike that of any other process.
    """

    rank: int
    world: int
    host: str
    process: int
    word: str

    @classmethod
    def here(cls, rank: int, world: int) -> Member:
        """This process."""
        return cls(
            rank=rank, world=world, host=socket.gethostname(), process=os.getpid(), word=uuid.uuid4().hex
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
                word=str(facts["word"])[:128],
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


def sign_in(store: Any, me: Member, clock: Clock) -> str:
    """Wait until every rank has come; returns the name of the attempt that they are in. Collective.

    Raises:
        RanksMissing: some have not come in time; it names them.
        StrettoError: this rank was started twice, or with another number of ranks than rank 0.
    """
    return _First(store, me, clock).run() if me.rank == 0 else _sign_in_other(store, me, clock)


def answer_late(store: Any, name: str, ended: threading.Event) -> None:
    """On rank 0, answer knocks on a thread until `ended`: those of ranks that are started again beside the
    job.
    """

    def loop() -> None:
        answered = store.add(_answers(name), 0)
        while not ended.wait(_GUARD_S):
            try:
                answered = _answer(store, name, answered)
            except RuntimeError:  # the store has gone, and with it whoever might knock
                return

    threading.Thread(target=loop, name="arrivals", daemon=True).start()


class _First:
    """Rank 0, waiting for the others."""

    def __init__(self, store: Any, me: Member, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._me = me
        self._here = {0: me}
        self._answered = self._signed = 0

    def run(self) -> str:
        self._take_first()
        while len(self._here) < self._me.world:
            if not self._look():
                if self._clock.over(self._waiting_for):
                    self._give_up()
                time.sleep(_POLL_S)
        self._store.set(_start(self._me.word), _GO)
        return self._me.word

    def _take_first(self) -> None:
        """Become the rank 0 of the store, unless one is there that lives."""
        store, me = self._store, self._me
        before = ""
        while (now := store.compare_set(FIRST, before, me.text)) != me.text.encode():
            other = Member.read(now)
            if not _is_gone(me, other) and _answers_within(store, other, _ANSWER_S):
                raise started_twice(me, other)
            before = now.decode()

    def _look(self) -> bool:
        """Answer who has knocked; whether anybody has signed in since."""
        store, name = self._store, self._me.word
        self._answered = _answer(store, name, self._answered)
        if (signed := store.add(_signed(name), 0)) == self._signed:
            return False
        self._signed = signed
        for rank in self._missing():
            if store.check([_seat(name, rank)]):
                self._here[rank] = Member.read(store.get(_seat(name, rank)))
        return True

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
        self._store.set(_start(self._me.word), text)
        time.sleep(_LINGER_S)
        raise missing_ranks(text)


def _sign_in_other(store: Any, me: Member, clock: Clock) -> str:
    """As a rank other than 0."""
    first = _living_first(store, me, clock)
    if first.world != me.world:
        raise StrettoError(
            f"rank {me.rank} on {me.place} was started with WORLD_SIZE={me.world}, and rank 0 on "
            f"{first.place} with {first.world}",
            hint="start all ranks with one WORLD_SIZE; jobs side by side need a MASTER_PORT each",
        )
    holder = store.compare_set(_seat(first.word, me.rank), "", me.text)
    if holder != me.text.encode():
        raise started_twice(me, Member.read(holder))
    store.add(_signed(first.word), 1)

    def waiting() -> str:
        return f"rank {me.rank} on {me.place} waits for rank 0 on {first.place} to start the job"

    while not _wait(store, _start(first.word)):
        if clock.over(lambda: "", _BEYOND_S):
            raise missing_ranks(f"rank 0 on {first.place} has not started the job: {waiting()}")
    said = store.get(_start(first.word)).decode(errors="replace")
    if said != _GO:
        raise missing_ranks(said)
    return first.word


def _living_first(store: Any, me: Member, clock: Clock) -> Member:
    """The rank 0 that answers; who has left its name and does not is dead, or has not come back yet."""
    knocked, number = "", 0

    def waiting() -> str:
        return f"rank {me.rank} on {me.place} waits for rank 0"

    while True:
        if _wait(store, FIRST):
            first = Member.read(store.get(FIRST))
            if first.word != knocked:
                knocked, number = first.word, _knock(store, first)
            if _wait(store, _reply(first.word, number)):
                return first
        if clock.over(waiting):
            raise missing_ranks(
                f"rank 0 of {me.world} has not come within {clock.start_s:g} s (train.start_s); "
                f"rank {me.rank} waits on {me.place}"
            )


# ---------------------------------------------------------------------- knocks


def _knock(store: Any, first: Member) -> int:
    return store.add(_knocks(first.word), 1)


def _answer(store: Any, name: str, answered: int) -> int:
    """Answer all knocks but the first `answered`; returns how many there were."""
    knocks = store.add(_knocks(name), 0)
    for number in range(answered + 1, knocks + 1):
        store.set(_reply(name, number), "")
    if knocks > answered:
        store.add(_answers(name), knocks - answered)
    return knocks


def _answers_within(store: Any, first: Member, seconds: float) -> bool:
    """Whether a rank 0 lives."""
    number, end = _knock(store, first), time.monotonic() + seconds
    while time.monotonic() < end:
        if _wait(store, _reply(first.word, number)):
            return True
    return False


def _is_gone(me: Member, other: Member) -> bool:
    """Whether a process of this host has certainly ended."""
    try:
        os.kill(other.process, 0)
    except ProcessLookupError:
        return other.host == me.host
    except (OSError, OverflowError):
        return False
    return False


def _wait(store: Any, key: str) -> bool:
    """Wait a moment for a key; whether it is there. torch's own wait logs a warning for each time-out."""
    end, pause = time.monotonic() + _WAIT_S, _POLL_S
    while not (there := store.check([key])) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_S)
    return there


def _seat(name: str, rank: int) -> str:
    return f"stretto/{name}/{rank}"


def _signed(name: str) -> str:
    return f"stretto/{name}/signed"


def _knocks(name: str) -> str:
    return f"stretto/{name}/knocks"


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
    return f"rank{'s' if len(ranks) > 1 else ''} {_runs(ranks)} of {world}"


def _runs(ranks: Iterable[int]) -> str:
    """Ranks in rising order as runs, such as "0-7, 64-71"."""
    runs = list[list[int]]()
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(map(str, run)) for run in runs[:_SHOWN])
    return text + ", ..." * (len(runs) > _SHOWN)


def _hosts(members: Iterable[Member]) -> str:
    """Which ranks are on which hosts."""
    hosts = dict[str, list[int]]()
    for member in sorted(members, key=lambda member: member.rank):
        hosts.setdefault(member.host, []).append(member.rank)
    text = ", ".join(f"{_runs(ranks)} on {host}" for host, ranks in list(hosts.items())[:_SHOWN])
    return text + f" and {len(hosts) - _SHOWN} hosts more" * (len(hosts) > _SHOWN)


def to_stderr(text: str) -> None:
    """Tell people a line."""
    print(text, file=sys.stderr, flush=True)
