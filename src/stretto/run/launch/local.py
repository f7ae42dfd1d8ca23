"""Start ranks on this machine, watch over them, and bring their results and failures back.

Ranks are processes of `torch.multiprocessing` with the environment that torchrun gives (RANK, WORLD_SIZE,
the rendezvous in a TCPStore of the launcher's), so a function that runs here runs under torchrun. They are
forked from a server that has imported torch once. torchrun's agent itself is not used: it turns a signal
into an exception and drops the results, it gives a rank that hangs half a minute after another has died, and
it asks the name server who this machine is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from stretto.errors import StrettoError
from stretto.run.launch.failure import Failure, first_cause
from stretto.run.launch.rank import BYE, enter

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess

    from torch.distributed import TCPStore

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WAIT_FOR_CAUSE_S = 3.0  # when a rank has failed, the others may say so too before they are ended
LOOK_S = 0.5  # longest time between two looks at the clock
RANKS_PER_CORE = 16  # more on each core are a mistake, not a wish
FORCE = 3  # so many Ctrl-C end ranks that do not stop
PRELOAD = ("torch", "torch.distributed", "stretto.run.launch.rank", "stretto.engine.parallel.mesh")


class RankFailed(RuntimeError):
    """A rank failed; `failure` is the cause, `rank` and `traceback` are its rank and what it raised."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"rank {failure.rank} failed: {failure.message}\n{failure.traceback}".rstrip())
        self.failure = failure
        self.rank = failure.rank
        self.traceback = failure.traceback


class RanksStopped(RuntimeError):
    """This process was told by `signal` to end; `results` are those of ranks that stopped in order, or
    None."""

    def __init__(self, signal: int, results: list[Any] | None = None) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal
        self.results = results


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    threads: int = 1,
    port: int = 0,
    stoppable: bool = False,
    heard: Callable[[], int | None] | None = None,
) -> list[Any]:
    """Run `function(*arguments)` on `ranks` local processes; return their results in rank order.

    `function` finds RANK, WORLD_SIZE and the rendezvous in its environment, as under torchrun. Call it from
    the main thread for signals to be heard.

    Args:
        threads: value of OMP_NUM_THREADS on the ranks, where the environment has none.
        port: of the rendezvous, on the loopback interface; 0 takes a free one.
        stoppable: on SIGINT, SIGTERM or SIGHUP send SIGTERM to the ranks and wait for their results;
            otherwise end them at once.
        heard: tells of a signal that came before this function listened.

    Raises:
        StrettoError: one that a rank raised; or the port cannot be used.
        RankFailed: a rank failed otherwise; the others have been ended.
        RanksStopped: this process got a signal.
    """
    store = _store(port)
    environment = _environment(ranks, store.port, threads)
    group = _Ranks(stoppable)
    with _Signals(group.hear) as signals:
        try:
            signals.first = signals.first or (heard() if heard is not None else None)
            group.start(ranks, environment, function, arguments)
            if signals.first is not None:
                group.ask()  # once more: some were not there yet
            group.watch()
        finally:
            group.end()
    if group.failures:
        raise _raised(group)
    if signals.first is not None:
        whole = len(group.results) == ranks
        raise RanksStopped(signals.first, [group.results[r] for r in range(ranks)] if whole else None)
    return [group.results[rank] for rank in range(ranks)]


def prepare(preload: Sequence[str] = ()) -> None:
    """Start the server that ranks are forked from; it imports `preload` while this process goes on.

    Only the first call in a process has an effect, that of `run_ranks` included.
    """
    from multiprocessing import forkserver, resource_tracker, set_forkserver_preload

    set_forkserver_preload([*PRELOAD, *preload, *_main_package()])
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # no pool of threads may run in a process that forks
    resource_tracker.ensure_running()  # by itself: it unblocks signals when it is done
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def check_ranks(ranks: int) -> None:
    """Raise StrettoError when they are too many for the cores of this machine."""
    cores = os.cpu_count() or 1
    if ranks > RANKS_PER_CORE * cores:
        raise StrettoError(
            f"{ranks} ranks are too many for the {cores} cores of this machine",
            hint=f"at most {RANKS_PER_CORE * cores} start here; take fewer, or `stretto launch slurm`",
        )


def check_port(port: int) -> None:
    """Raise StrettoError when ranks cannot meet at `port`; 0 is any free one."""
    _listen(port).close()


class _Ranks:
    """The processes of a job, from start to end."""

    def __init__(self, stoppable: bool) -> None:
        self.stoppable = stoppable
        self.processes: list[ForkServerProcess] = []
        self.links: dict[int, Connection] = {}
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self._interrupts = 0  # times that SIGINT was heard
        self._cut = False  # end them now

    def start(
        self,
        ranks: int,
        environment: dict[str, str],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        """Start all ranks; they find nothing of this process but what they are given."""
        from torch.multiprocessing import get_context

        prepare()
        context: ForkServerContext = get_context("forkserver")
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
            given = (rank, theirs, own, os.getcwd(), self.stoppable, function, arguments)
            process = context.Process(target=enter, args=given, name=f"rank {rank}")
            process.start()
            theirs.close()
            self.processes.append(process)
            self.links[rank] = cast(Connection, ours)

    def hear(self, number: int) -> None:
        """This process got a signal."""
        self._interrupts += number == signal.SIGINT
        self._cut = self._cut or self._interrupts >= FORCE
        self.ask()

    def ask(self) -> None:
        """Ask ranks to stop, or end them where they cannot be asked."""
        if self.stoppable:
            self._send(signal.SIGTERM, self.processes)
        else:
            self._cut = True

    def watch(self) -> None:
        """Until every rank has given its result, or one has failed and the others had time to say so."""
        deadline: float | None = None
        while (open_ := self._open()) and not self._cut:
            for rank in self._ready(open_):
                self._read(rank)
            if self.failures and deadline is None:
                deadline = time.monotonic() + WAIT_FOR_CAUSE_S
            if deadline is not None and (time.monotonic() > deadline or self._known()):
                return

    def end(self) -> None:
        """Leave no process behind."""
        patience = time.monotonic() + WAIT_FOR_CAUSE_S
        if len(self.results) == len(self.links):  # they are on their way out
            for process in self.processes:
                process.join(max(0.0, patience - time.monotonic()))
        self._send(signal.SIGKILL, self.processes)
        for process in self.processes:
            process.join()
        for link in self.links.values():
            link.close()

    def _known(self) -> bool:
        """Whether a cause has been heard, so that what the others say does not matter."""
        return any(f.kind not in ("silent", "gone") for f in self.failures.values())

    def _open(self) -> list[int]:
        """Ranks that have not ended with a word."""
        return [rank for rank in self.links if rank not in self.results and rank not in self.failures]

    def _ready(self, ranks: Iterable[int]) -> list[int]:
        """Ranks that have something to say, or have died."""
        objects = {self.links[r]: r for r in ranks} | {self.processes[r].sentinel: r for r in ranks}
        return sorted({objects[found] for found in wait(list(objects), LOOK_S)})  # pyright: ignore[reportArgumentType]

    def _read(self, rank: int) -> None:
        """Take what a rank has said; one that has died without a word has failed."""
        link, process = self.links[rank], self.processes[rank]
        try:
            message = link.recv() if link.poll() else None
        except (EOFError, OSError):
            message = None
        if isinstance(message, Failure):
            self.failures[rank] = message
        elif message is not None:
            self.results[rank] = message[1]
            _answer(link)
        else:
            process.join(WAIT_FOR_CAUSE_S)
            self.failures[rank] = Failure.died(rank, process.exitcode)

    def _send(self, number: int, processes: Iterable[ForkServerProcess]) -> None:
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)


class _Signals:
    """Listens to SIGNALS while in a `with`; a signal that is ignored (nohup) stays so.

    Args:
        hear: called with the signal's number each time.
    """

    def __init__(self, hear: Callable[[int], None]) -> None:
        self.first: int | None = None
        self._hear = hear
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        self._hear(number)


def _raised(group: _Ranks) -> Exception:
    cause = first_cause(group.failures, range(len(group.links)))
    return StrettoError(cause.message, hint=cause.hint) if cause.kind == "input" else RankFailed(cause)


def _answer(link: Connection) -> None:
    with contextlib.suppress(OSError):  # a rank that has gone has been heard
        link.send(BYE)


def _listen(port: int) -> socket.socket:
    """A socket on the loopback interface: nobody else has business at the rendezvous."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(("127.0.0.1", port))
        found.listen(1024)
    except (OSError, OverflowError) as error:
        found.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        hint = "give another --port, or 0 for any free one"
        raise StrettoError(f"port {port} cannot be used: {why}", hint=hint) from None
    return found


def _store(port: int) -> TCPStore:
    from torch.distributed import TCPStore

    found = _listen(port)
    at = found.getsockname()[1]
    return TCPStore("127.0.0.1", at, is_master=True, wait_for_workers=False, master_listen_fd=found.detach())


def _environment(ranks: int, port: int, threads: int) -> dict[str, str]:
    """What all ranks have in their environment."""
    loopback = "lo" if "lo" in (name for _, name in socket.if_nameindex()) else "lo0"
    return {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": loopback,
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's, as under torchrun
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _main_package() -> list[str]:
    """The package whose `__main__` this process runs, which every rank imports again."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return [spec.name.removesuffix(".__main__")] if spec is not None else []
