"""Which ranks of a job have started: each registers in the rendezvous store, and rank 0 waits for all.

One store may outlive several attempts of a job, and hold the keys of dead ranks. An attempt is therefore
named by the nonce of its rank 0, and all its keys are under that name:

1. Rank 0 writes itself to RANK_0. If another process stands there already, it pings it: a process that
   answers is a living rank 0, so this one was started twice; one that does not answer is dead, and is
   replaced.
2. The others ping the process in RANK_0 until one answers, then register for its attempt. The slot of a rank
   can be taken once. A process that finds its slot taken was started twice.
3. Rank 0 starts the job once every rank has registered, or names the missing ranks after the timeout.

Rank 0 answers pings for as long as the job runs, so that a second rank 0 is refused.
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
NOTE_S, NOTE_EVERY_S = 5.0, 15.0  # until the first message about missing ranks, and between messages
_ANSWER_S = 3.0  # a rank 0 that does not answer for so long is dead
_POLL_S, _LONGEST_POLL_S = 0.01, 0.1
_POLLS = 10_000  # of the store, a second, by all ranks together
_WAIT_S, _GUARD_S = 0.5, 1.0
_GRACE_S = 1.0  # for the other ranks to read why rank 0 gives up, as it may host the store
_BEYOND_S = 30.0  # after train.start_s: rank 0 may have started later than others
_SHOWN = 6  # hosts, or ranges of ranks, in a line
_GO = "go"


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A process that registers as one rank of the job.

    Attributes:
        process: process id on its host.
        nonce: unique to this process.
    """

    rank: int
    world: int
    host: str
    process: int
    nonce: str

    @classmethod
    def current(cls, rank: int, world: int) -> RankProcess:
        """Return this process as a rank."""
        return cls(
            rank=rank, world=world, host=socket.gethostname(), process=os.getpid(), nonce=uuid.uuid4().hex
        )

    @classmethod
    def read(cls, text: bytes) -> RankProcess:
        """Return the process that `text` describes; raise StrettoError for anything else."""
        try:
            fields = json.loads(text)
            return cls(
                rank=int(fields["rank"]),
                world=int(fields["world"]),
                host=str(fields["host"])[:128],
                process=int(fields["process"]),
                nonce=str(fields["nonce"])[:128],
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


class WaitTimer:
    """Start-up timeout, with periodic progress messages.

    Args:
        start_s: longest wait for other ranks, seconds.
        log: prints a line.
        check: called regularly; raises if the job was asked to stop.
    """

    def __init__(self, start_s: float, log: Callable[[str], None], check: Callable[[], None]) -> None:
        self.start_s = start_s
        self._log, self._check = log, check
        self._began = time.monotonic()
        self._next = NOTE_S

    def over(self, waiting: Callable[[], str], beyond: float = 0.0) -> bool:
        """Return True once the timeout plus `beyond` seconds has passed. Every 15 s, log what `waiting`
        returns.
        """
        self._check()
        passed = time.monotonic() - self._began
        if passed >= self._next:
            self._next += NOTE_EVERY_S
            self._log(f"{waiting()} ({passed:.0f} s; train.start_s={self.start_s:g} is the limit)")
        return passed >= self.start_s + beyond


def register(store: Any, me: RankProcess, timer: WaitTimer) -> str:
    """Wait until every rank has registered; return the name of their attempt. Collective.

    Raises:
        RanksMissing: some ranks have not registered in time; the message names them.
        StrettoError: this rank was started twice, or with another number of ranks than rank 0.
    """
    return _RankZero(store, me, timer).run() if me.rank == 0 else _register_other(store, me, timer)


def answer_late(store: Any, name: str, ended: threading.Event) -> None:
    """On rank 0, answer pings on a thread until `ended`: a second rank 0 of the same job pings the first."""

    def loop() -> None:
        answered = store.add(_answers(name), 0)
        while not ended.wait(_GUARD_S):
            try:
                answered = _answer(store, name, answered)
            except RuntimeError:  # the store is gone, and with it the ranks that might ping
                return

    threading.Thread(target=loop, name="registration", daemon=True).start()


class _RankZero:
    """Rank 0, waiting for the other ranks."""

    def __init__(self, store: Any, me: RankProcess, timer: WaitTimer) -> None:
        self._store, self._timer = store, timer
        self._me = me
        self._present = {0: me}
        self._answered = self._registered = 0
        self._pending = list[int]()  # entries that are not read yet

    def run(self) -> str:
        store, me = self._store, self._me
        before = ""
        while (now := store.compare_set(RANK_0, before, me.text)) != me.text.encode():
            other = RankProcess.read(now)
            gone = other.host == me.host and not is_running(other.process)
            if not gone and _answers_within(store, other, _ANSWER_S):
                raise started_twice(me, other)
            before = now.decode()
        while len(self._present) < self._me.world:
            if not self._poll():
                if self._timer.over(self._waiting_for):
                    missing = self._missing()
                    have = "have" if len(missing) > 1 else "has"
                    text = (
                        f"{_of(missing, self._me.world)} {have} not come within {self._timer.start_s:g} s "
                        f"(train.start_s); here: {_hosts(self._present.values())}"
                    )
                    self._store.set(_start(self._me.nonce), text)
                    time.sleep(_GRACE_S)
                    raise missing_ranks(text)
                time.sleep(_POLL_S)
        self._store.set(_start(self._me.nonce), _GO)
        return self._me.nonce

    def _poll(self) -> bool:
        """Answer new pings; return True if another rank has registered."""
        store, name = self._store, self._me.nonce
        self._answered = _answer(store, name, self._answered)
        before, registered = self._registered, store.add(_registered(name), 0)
        self._registered = registered
        # some have drawn their numbers without having written their entries yet
        self._pending += range(before + 1, registered + 1)
        written = [number for number in self._pending if store.check([_arrival(name, number)])]
        for number in written:
            self._pending.remove(number)
            member = RankProcess.read(store.get(_arrival(name, number)))
            self._present[member.rank] = member
        return bool(written)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._me.world) if rank not in self._present]

    def _waiting_for(self) -> str:
        return f"waiting for {_of(self._missing(), self._me.world)}; here: {_hosts(self._present.values())}"


def _register_other(store: Any, me: RankProcess, timer: WaitTimer) -> str:
    """Register a rank other than 0."""
    first = _living_rank_0(store, me, timer)
    if first.world != me.world:
        raise StrettoError(
            f"rank {me.rank} on {me.place} was started with WORLD_SIZE={me.world}, and rank 0 on "
            f"{first.place} with {first.world}",
            hint="start all ranks with one WORLD_SIZE; jobs side by side need a MASTER_PORT each",
        )
    holder = store.compare_set(_slot(first.nonce, me.rank), "", me.text)
    if holder != me.text.encode():
        raise started_twice(me, RankProcess.read(holder))
    store.set(_arrival(first.nonce, store.add(_registered(first.nonce), 1)), me.text)

    def waiting() -> str:
        return f"rank {me.rank} on {me.place} waits for rank 0 on {first.place} to start the job"

    while not _wait(store, _start(first.nonce), me.world):
        if timer.over(lambda: "", _BEYOND_S):
            raise missing_ranks(f"rank 0 on {first.place} has not started the job: {waiting()}")
    reply = store.get(_start(first.nonce)).decode(errors="replace")
    if reply != _GO:
        raise missing_ranks(reply)
    return first.nonce


def _living_rank_0(store: Any, me: RankProcess, timer: WaitTimer) -> RankProcess:
    """Return the rank 0 that answers; one that left its name and does not is dead or not back yet."""
    pinged, number = "", 0

    def waiting() -> str:
        return f"rank {me.rank} on {me.place} waits for rank 0"

    while True:
        if _wait(store, RANK_0, me.world):
            first = RankProcess.read(store.get(RANK_0))
            if first.nonce != pinged:
                pinged, number = first.nonce, _ping(store, first)
            if _wait(store, _reply(first.nonce, number), me.world):
                return first
        if timer.over(waiting):
            raise missing_ranks(
                f"rank 0 of {me.world} has not come within {timer.start_s:g} s (train.start_s); "
                f"rank {me.rank} waits on {me.place}"
            )


# ---------------------------------------------------------------------- pings


def _ping(store: Any, first: RankProcess) -> int:
    return store.add(_pings(first.nonce), 1)


def _answer(store: Any, name: str, answered: int) -> int:
    """Answer all pings after the first `answered`; return their total."""
    pings = store.add(_pings(name), 0)
    for number in range(answered + 1, pings + 1):
        store.set(_reply(name, number), "")
    if pings > answered:
        store.add(_answers(name), pings - answered)
    return pings


def _answers_within(store: Any, first: RankProcess, seconds: float) -> bool:
    """Ping a rank 0; return True if it answers in time."""
    number, end = _ping(store, first), time.monotonic() + seconds
    while time.monotonic() < end:
        if _wait(store, _reply(first.nonce, number), first.world):
            return True
    return False


def _wait(store: Any, key: str, world: int) -> bool:
    """Poll for a key for up to 0.5 s; return True if it exists. torch's own wait logs a warning at a
    timeout.
    """
    end, pause = time.monotonic() + _WAIT_S, _POLL_S
    longest = max(_LONGEST_POLL_S, world / _POLLS)
    while not (exists := store.check([key])) and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return exists


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


# ---------------------------------------------------------------------- messages


def started_twice(me: RankProcess, other: RankProcess) -> StrettoError:
    """Return the error of a rank that another process already is."""
    return StrettoError(
        f"rank {me.rank} was started twice: it runs already on {other.place}; this one, on {me.place}, ends",
        hint="give every process a RANK of its own, and jobs side by side a MASTER_PORT each",
    )


def missing_ranks(text: str) -> RanksMissing:
    """Return the error of a job whose ranks did not all start."""
    return RanksMissing(
        text,
        hint="are their processes running, with the same MASTER_ADDR and MASTER_PORT, and do they reach it? "
        "train.start_s is the limit",
    )


def _of(ranks: Sequence[int], world: int) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)} of {world}"


def _ranges(ranks: Sequence[int]) -> str:
    """Return ranks in rising order, such as "0-7, 64-71"."""
    ranges = rank_ranges(ranks)
    return ", ".join(ranges[:_SHOWN]) + ", ..." * (len(ranges) > _SHOWN)


def _hosts(members: Iterable[RankProcess]) -> str:
    """Return which ranks are on which hosts."""
    hosts = dict[str, list[int]]()
    for member in sorted(members, key=lambda member: member.rank):
        hosts.setdefault(member.host, []).append(member.rank)
    text = ", ".join(f"{_ranges(ranks)} on {host}" for host, ranks in list(hosts.items())[:_SHOWN])
    return text + f" and {len(hosts) - _SHOWN} hosts more" * (len(hosts) > _SHOWN)


def log_stderr(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)
