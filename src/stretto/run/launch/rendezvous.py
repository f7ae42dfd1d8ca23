"""The rendezvous of a job's ranks: the store at MASTER_ADDR:MASTER_PORT, and in it the part of one attempt.

torchrun keeps one store for all attempts, in which a new attempt would find the addresses of dead ranks.
Ranks therefore agree on a name for their attempt (`registration`) and keep everything under it. torchrun's
restart count is no such name: it stays the same if nodes come or go.
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
from stretto.run.launch.network import loopback_listener
from stretto.run.launch.registration import (
    RANK_0,
    RankProcess,
    WaitTimer,
    answer_late,
    log_stderr,
    missing_ranks,
    register,
    started_twice,
)
from stretto.run.launch.stop import Stopped

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

_PROBE_S, _CONNECT_S = 5.0, 10.0  # time limits for a connection to any program, and to a store
_AGAIN_S = 0.2  # between attempts to connect
_READY, _READ = "stretto/ready", "stretto/ready/read"  # rank 0 has prepared the job, or why it has not
_POLL_S, _READ_S = 0.05, 3.0  # between polls; for the other ranks to read why rank 0 failed


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """This process as a rank of one attempt of a job.

    Attributes:
        store: the part of the store that belongs to this attempt.
        ended: set when the job is over.
    """

    store: Store
    rank: int
    world: int
    ended: threading.Event


_joined: Attempt | None = None  # the attempt that this rank has joined, until its process group is created


def join_early(start_s: float, timeout: timedelta, check: Callable[[], None] = lambda: None) -> Attempt:
    """Join the attempt before its process group is created, unless this rank already has: rank 0 may plan and
    prepare the data for the others in between. `attempt_store` then returns the same attempt. Collective.

    Args:
        start_s, timeout: see `attempt_store`.
        check: called while it waits; raises if the job was asked to stop.
    """
    global _joined
    if _joined is None:
        _joined = _enter_attempt(start_s, timeout, check)
    return _joined


def attempt_store(start_s: float, timeout: timedelta) -> Attempt:
    """Join the attempt of the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; return once
    all of its ranks have registered. Collective.

    Args:
        start_s: longest wait for ranks to register, seconds.
        timeout: timeout of the store's operations from then on.

    Raises:
        RanksMissing: some ranks have not registered in time; the message names them.
        StrettoError: this rank was started twice, or the environment does not describe a job.
    """
    global _joined
    attempt, _joined = _joined, None
    return attempt or _enter_attempt(start_s, timeout, lambda: None)


@contextlib.contextmanager
def reported_start(attempt: Attempt) -> Generator[None]:
    """Surrounds what rank 0 does while the other ranks wait for it in `await_start`: they end with its error
    if it raises one, and stop if it was asked to stop.
    """
    try:
        yield
    except (StrettoError, Stopped) as error:
        bad = isinstance(error, StrettoError)
        reply = {"error": error.message if bad else None, "hint": error.hint if bad else None}
        attempt.store.set(_READY, json.dumps(reply))
        end = time.monotonic() + _READ_S  # with this process the store may end
        while attempt.store.add(_READ, 0) < attempt.world - 1 and time.monotonic() < end:
            time.sleep(_POLL_S)
        raise
    attempt.store.set(_READY, "{}")


def await_start(attempt: Attempt, limit_s: float, check: Callable[[], None]) -> None:
    """On the other ranks, wait for the end of rank 0's `reported_start`. During the store's own wait Python
    would handle no signal.

    Args:
        attempt: this rank's attempt.
        limit_s: longest wait, seconds.
        check: called while it waits; raises if the job was asked to stop.

    Raises:
        StrettoError: rank 0 has raised it, is gone, or has not ended within `limit_s`.
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
        reply = json.loads(attempt.store.get(_READY))
        attempt.store.add(_READ, 1)
    except DistError:
        raise missing_ranks("rank 0 has ended before the job began") from None
    if reply:
        raise Stopped if reply["error"] is None else StrettoError(reply["error"], hint=reply["hint"])


def _enter_attempt(start_s: float, timeout: timedelta, check: Callable[[], None]) -> Attempt:
    from torch.distributed import PrefixStore

    rendezvous = RendezvousInfo.of(os.environ)
    me, timer = RankProcess.current(rendezvous.rank, rendezvous.world), WaitTimer(start_s, log_stderr, check)
    store = (
        _open_store(rendezvous, me, start_s) if rendezvous.hosts_store else _connect(rendezvous, me, timer)
    )
    store.set_timeout(timeout)
    name, ended = register(store, me, timer), threading.Event()
    if me.rank == 0:
        answer_late(store, name, ended)
    return Attempt(store=PrefixStore(name, store), rank=me.rank, world=me.world, ended=ended)


@dataclass(frozen=True, kw_only=True)
class RendezvousInfo:
    """RANK, WORLD_SIZE and the address of the rendezvous, from the environment.

    Attributes:
        hosts_store: True if this rank opens the store; otherwise torchrun's agent or rank 0 does.
    """

    rank: int
    world: int
    host: str
    port: int
    hosts_store: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RendezvousInfo:
        """Read the environment; raise StrettoError for a variable that is missing or no number."""
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
        """Host and port, as "host:port"."""
        return f"{self.host}:{self.port}"


def _number(environment: Mapping[str, str], name: str, smallest: int, largest: int) -> int:
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and smallest <= int(text) <= largest):
        raise StrettoError(
            f"{name} is {text!r}, and must be a whole number from {smallest} to {largest}",
            hint="torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without it, set all of them",
        )
    return int(text)


def _open_store(rendezvous: RendezvousInfo, me: RankProcess, start_s: float) -> TCPStore:
    """Open the store on this host. If MASTER_ADDR is a loopback address, it listens on that interface alone;
    torch itself would listen on all.
    """
    from torch.distributed import DistNetworkError, TCPStore

    try:
        listener = loopback_listener(rendezvous.host, rendezvous.port)
        return TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=True,
            timeout=timedelta(seconds=start_s),  # for its own connection to MASTER_ADDR
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


def _port_taken(rendezvous: RendezvousInfo, me: RankProcess) -> StrettoError:
    """Return the error that says what has the store's port."""
    with contextlib.suppress(RuntimeError, StrettoError):
        store = _client(rendezvous, _PROBE_S)
        if store is not None:
            store.wait([RANK_0], timedelta(seconds=_PROBE_S))  # the other rank 0 may have just opened it
            return started_twice(me, RankProcess.read(store.get(RANK_0)))
    return StrettoError(
        f"rank 0 on {me.place} cannot open the rendezvous store: another program has port {rendezvous.port}",
        hint="give the job another MASTER_PORT",
    )


def _client(rendezvous: RendezvousInfo, seconds: float) -> TCPStore | None:
    """Connect to the store; return None if the program that listens there does not answer like a store."""
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


def _connect(rendezvous: RendezvousInfo, me: RankProcess, timer: WaitTimer) -> TCPStore:
    """Connect to the store once it is open."""
    reason = ""

    def waiting() -> str:
        return f"rank {me.rank} on {me.place} waits for rank 0 to open {rendezvous.address}: {reason}"

    while True:
        try:
            socket.create_connection((rendezvous.host, rendezvous.port), _PROBE_S).close()
            if (store := _client(rendezvous, _CONNECT_S)) is not None:
                return store
            reason = "what listens there is no rendezvous store"
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if timer.over(waiting):
            raise missing_ranks(
                f"rank 0 of {me.world} has not come within {timer.start_s:g} s (train.start_s): "
                f"rank {me.rank} on {me.place} cannot reach {rendezvous.address}: {reason}"
            )
        time.sleep(_AGAIN_S)
