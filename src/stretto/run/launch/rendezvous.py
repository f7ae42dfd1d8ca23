"""Where the ranks of a job meet: the store at MASTER_ADDR:MASTER_PORT, and in it the part of one attempt.

torchrun keeps one store for all attempts, in which a new attempt would find the addresses of ranks that are
dead. Ranks therefore agree on a name for their attempt (`arrivals`) and keep everything under it. torchrun's
count of restarts is no such name: it stays the same where nodes come or go.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.run.launch.arrivals import (
    RANK_0,
    Clock,
    Member,
    answer_late,
    missing_ranks,
    register,
    started_twice,
    to_stderr,
)
from stretto.run.launch.network import loopback_listener
from stretto.run.launch.stop import Stopped

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

_PROBE_S, _CONNECT_S = 2.0, 10.0  # for a connection to whatever is there, and to a store
_AGAIN_S = 0.2  # from one to the next
_READY, _READ = "stretto/ready", "stretto/ready/read"  # rank 0 has prepared the job, or why it has not
_POLL_S, _READ_S = 0.05, 3.0  # for the others to read it


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """This process's place in an attempt of a job.

    Attributes:
        store: of this attempt alone.
        ended: set when the job is over.
    """

    store: Store
    rank: int
    world: int
    ended: threading.Event


_joined: Attempt | None = None  # before its process group is made


def join_early(start_s: float, timeout: timedelta, check: Callable[[], None] = lambda: None) -> Attempt:
    """Join the attempt before its process group is made, unless this rank has: rank 0 may plan and prepare
    the data for the others while all ranks are there. `attempt_store` then returns the same. Collective.

    Args:
        check: called while it waits; raises where the job was asked to stop.
        start_s, timeout: as of `attempt_store`.
    """
    global _joined
    if _joined is None:
        _joined = _join(start_s, timeout, check)
    return _joined


def attempt_store(start_s: float, timeout: timedelta) -> Attempt:
    """The attempt of the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; waits until all of
    its ranks have come. Collective.

    Args:
        start_s: the longest wait for ranks to come.
        timeout: of the store, from then on.

    Raises:
        RanksMissing: some have not come in time; it names them.
        StrettoError: this rank was started twice, or the environment does not describe a job.
    """
    global _joined
    attempt, _joined = _joined, None
    return attempt or _join(start_s, timeout, lambda: None)


@contextlib.contextmanager
def reported_start(attempt: Attempt) -> Generator[None]:
    """On rank 0, around what it does before the others join it: they wait, and end with its error if it has
    one, or if it was asked to stop.
    """
    try:
        yield
    except (StrettoError, Stopped) as error:
        bad = isinstance(error, StrettoError)
        facts = {"error": error.message if bad else None, "hint": error.hint if bad else None}
        attempt.store.set(_READY, json.dumps(facts))
        end = time.monotonic() + _READ_S  # with this process the store may end
        while attempt.store.add(_READ, 0) < attempt.world - 1 and time.monotonic() < end:
            time.sleep(_POLL_S)
        raise
    attempt.store.set(_READY, "{}")


def await_start(attempt: Attempt, limit_s: float, check: Callable[[], None]) -> None:
    """On the other ranks, wait for the end of rank 0's `reported_start`. The store's own wait would let no
    signal through to Python.

    Args:
        check: called while it waits; raises where the job was asked to stop.

    Raises:
        StrettoError: rank 0 has raised it, is gone, or has not come to the end within `limit_s`.
        Stopped: rank 0 was asked to stop.
    """
    from torch.distributed import DistError

    end = time.monotonic() + limit_s
    try:
        while not attempt.store.check([_READY]):
            check()
            if time.monotonic() > end:
                raise missing_ranks(f"rank 0 has not prepared the job within {limit_s:g} s")
            time.sleep(_POLL_S)
        facts = json.loads(attempt.store.get(_READY))
        attempt.store.add(_READ, 1)
    except DistError:
        raise missing_ranks("rank 0 has ended before the job began") from None
    if facts:
        raise Stopped if facts["error"] is None else StrettoError(facts["error"], hint=facts["hint"])


def _join(start_s: float, timeout: timedelta, check: Callable[[], None]) -> Attempt:
    from torch.distributed import PrefixStore

    rendezvous = RendezvousInfo.of(os.environ)
    me, clock = Member.here(rendezvous.rank, rendezvous.world), Clock(start_s, to_stderr, check)
    store = _host(rendezvous, me, start_s) if rendezvous.hosts_store else _reach(rendezvous, me, clock)
    store.set_timeout(timeout)
    name, ended = register(store, me, clock), threading.Event()
    if me.rank == 0:
        answer_late(store, name, ended)
    return Attempt(store=PrefixStore(name, store), rank=me.rank, world=me.world, ended=ended)


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo:
    """What the environment says of this rank's job.

    Attributes:
        hosts_store: this rank opens the store; else torchrun's agent does, or rank 0.
    """

    rank: int
    world: int
    host: str
    port: int
    hosts_store: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RendezvousInfo:
        """Read it; raises StrettoError for what is missing or no number."""
        world = _number(environment, "WORLD_SIZE", 1, 1 << 24)
        rank = _number(environment, "RANK", 0, world - 1)
        host = environment.get("MASTER_ADDR", "")
        if not host:
            raise StrettoError(
                "RANK is set, and MASTER_ADDR is not",
                hint="set it to the host of rank 0, or start the job with torchrun",
            )
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            world=world,
            host=host,
            port=_number(environment, "MASTER_PORT", 1, 65535),
            hosts_store=rank == 0 and not agent,
        )

    @property
    def address(self) -> str:
        """As people write it."""
        return f"{self.host}:{self.port}"


def _number(environment: Mapping[str, str], name: str, least: int, most: int) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise StrettoError(
            f"{name} is {text!r}, and must be a whole number from {least} to {most}",
            hint="torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without it, set all of them",
        )
    return int(text)


def _host(rendezvous: RendezvousInfo, me: Member, start_s: float) -> TCPStore:
    """Open the store on this host: where MASTER_ADDR is a loopback address, on that interface alone; torch
    itself would listen on all.
    """
    from torch.distributed import DistNetworkError, TCPStore

    try:
        listener = loopback_listener(rendezvous.host, rendezvous.port)
        return TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=True,
            timeout=timedelta(seconds=start_s),  # of its own connection to MASTER_ADDR
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (DistNetworkError, OSError) as error:
        taken = getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)
        if not taken:
            raise StrettoError(
                f"rank 0 on {me.place} cannot open the rendezvous store at {rendezvous.address}: "
                f"{str(error).partition('Exception raised')[0].strip()}",
                hint="MASTER_ADDR is the host of rank 0, and MASTER_PORT a free port there",
            ) from None
    raise _port_taken(rendezvous, me)


def _port_taken(rendezvous: RendezvousInfo, me: Member) -> StrettoError:
    """Why the port of the store is not free."""
    with contextlib.suppress(RuntimeError, StrettoError):
        store = _client(rendezvous, _PROBE_S)
        if store is not None and store.check([RANK_0]):
            return started_twice(me, Member.read(store.get(RANK_0)))
    return StrettoError(
        f"rank 0 on {me.place} cannot open the rendezvous store: another program has port {rendezvous.port}",
        hint="give the job another MASTER_PORT",
    )


def _client(rendezvous: RendezvousInfo, seconds: float) -> TCPStore | None:
    """A connection to the store; None: what listens there does not answer as a store does."""
    from torch.distributed import TCPStore

    connected = list[TCPStore]()

    def connect() -> None:
        with contextlib.suppress(RuntimeError):
            limit = timedelta(seconds=seconds)
            connected.append(
                TCPStore(rendezvous.host, rendezvous.port, timeout=limit, wait_for_workers=False)
            )

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)  # torch waits without a limit for the answer of another program
    return connected[0] if connected else None


def _reach(rendezvous: RendezvousInfo, me: Member, clock: Clock) -> TCPStore:
    """Connect to the store, once it is there."""
    why = ""

    def waiting() -> str:
        return f"rank {me.rank} on {me.place} waits for rank 0 to open {rendezvous.address}: {why}"

    while True:
        try:
            socket.create_connection((rendezvous.host, rendezvous.port), _PROBE_S).close()
            if (store := _client(rendezvous, _CONNECT_S)) is not None:
                return store
            why = "what listens there is no rendezvous store"
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)
        if clock.over(waiting):
            raise missing_ranks(
                f"rank 0 of {me.world} has not come within {clock.start_s:g} s (train.start_s): "
                f"rank {me.rank} on {me.place} cannot reach {rendezvous.address}: {why}"
            )
        time.sleep(_AGAIN_S)
