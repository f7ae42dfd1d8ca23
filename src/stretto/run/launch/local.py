"""Start ranks on this machine, supervise them, and collect their results and failures.

Ranks are processes of `torch.multiprocessing` with the environment variables that torchrun sets (RANK,
WORLD_SIZE, the rendezvous in a TCPStore of the launcher), so a function that runs here also runs under
torchrun. They are forked from a server that has imported torch once. torchrun's own agent is not used: it
turns a signal into an exception and drops the results, it lets a hanging rank wait for half a minute after
another has died, and it resolves this machine's host name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from stretto.errors import StrettoError, counted
from stretto.run.launch.failure import Failure, first_cause
from stretto.run.launch.follow import LAUNCHER, signal_on_parents_death
from stretto.run.launch.network import local_environment, loopback_listener
from stretto.run.launch.stop import SIGNALS

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, ForkServerProcess


Look = Callable[[Mapping[int, int], Mapping[int, Failure]], Failure | None]
ACKNOWLEDGED = "read"  # the launcher's answer to a result
ABANDONED = 70  # exit code when the launcher is gone (EX_SOFTWARE)


class LauncherConnection:
    """This rank's connection to the launcher.

    Args:
        on_loss: called on a thread when the launcher is gone.
    """

    def __init__(self, connection: Connection, on_loss: Callable[[], None]) -> None:
        self._connection, self._on_loss = connection, on_loss
        self._read = threading.Event()
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def _listen(self) -> None:
        try:
            self._connection.recv()
        except (EOFError, OSError):
            self._read.set()
            self._on_loss()
        self._read.set()

    def finish(self, value: Any) -> None:
        """Send the result, and wait until it has been read: tensors in it are shared, not copied."""
        self._connection.send(value)
        self._read.wait()

    def report(self, failure: Failure) -> None:
        """Send this rank's failure, if the launcher still exists."""
        with contextlib.suppress(OSError):
            self._connection.send(failure)


def run_rank(
    rank: int,
    connection: Connection,
    environment: Mapping[str, str],
    folder: str,
    stoppable: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Run `function(*arguments)` as rank `rank`; send its result or failure through `connection`.

    The process starts with SIGINT and SIGTERM blocked, as its fork server has them: the launcher handles
    signals that the terminal sends to the entire group. A `stoppable` function unblocks them when it is ready
    (`launch.stop`).
    """
    from multiprocessing import forkserver

    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # the fork server ends with the launcher, though ranks may live longer
    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    if (alive := server._forkserver_alive_fd) is not None:  # as long as it is open, the server stays
        os.close(alive)
        server._forkserver_alive_fd = None
    signal_on_parents_death(signal.SIGCONT)  # a stopped rank could not see that the launcher is gone
    link = LauncherConnection(connection, _stop_orderly if stoppable else _exit_at_once)
    try:
        result = ("done", function(*arguments))
    except BaseException as error:
        link.report(Failure.of(rank, error))
        sys.exit(1)
    try:
        link.finish(result)
    except (BrokenPipeError, ConnectionError):
        sys.exit(ABANDONED)
    except Exception as error:  # a result that cannot be sent
        link.report(Failure.of(rank, error))
        sys.exit(1)


def _exit_at_once() -> None:
    os._exit(ABANDONED)


def _stop_orderly() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


WAIT_FOR_CAUSE_S = 3.0  # after a first failure, time for the other ranks to report theirs
_UNKNOWN = 255  # exit code of a process whose server has ended, says multiprocessing
_SERVER_END_S = 1.0  # a server closes its connections some moments before it has ended
POLL_S = 0.5  # longest wait before deadlines are checked
RANKS_PER_CORE = 16  # more count as a mistake in the layout
FORCE = 3  # this many Ctrl-C kill the ranks
PRELOAD = (
    "stretto.run.launch.follow",
    "torch",
    "torch.distributed",
    "stretto.run.launch.local",
    "stretto.engine.parallel.mesh",
)


class RankFailed(RuntimeError):
    """A rank failed. `failure` is the cause, with its `rank` and `traceback`; `signal` is the signal that had
    asked the job to stop before, or None.
    """

    def __init__(self, failure: Failure, signal: int | None = None) -> None:
        place = "" if failure.kind == "server" else f"rank {failure.rank} failed: "
        super().__init__(f"{place}{failure.message}\n{failure.traceback}".rstrip())
        self.failure, self.signal = failure, signal
        self.rank = failure.rank
        self.traceback = failure.traceback


class RanksStopped(RuntimeError):
    """This process received `signal`; `results` are the ranks' results if all stopped in order, else None."""

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
    earlier_signal: Callable[[], int | None] | None = None,
    look: Look | None = None,
    restarts: int = 0,
    grace_s: float | None = None,
) -> list[Any]:
    """Run `function(*arguments)` on `ranks` local processes; return their results in rank order.

    `function` has RANK, WORLD_SIZE and the rendezvous in its environment, as under torchrun. Signals are
    handled only if this is called from the main thread.

    Args:
        ranks: number of processes.
        function: function to run; it must be picklable, as must its arguments and its result.
        arguments: arguments of `function`.
        threads: value of OMP_NUM_THREADS on the ranks, unless the environment has one.
        port: port of the rendezvous on the loopback interface; 0 takes a free one.
        stoppable: on one of SIGNALS send SIGTERM to the ranks and wait for their results; otherwise end them
            at once.
        earlier_signal: returns a signal that arrived before this function installed its handlers, if any.
        look: called every half second, until after the first failure, with the processes of the ranks that
            still run and the failures of the others; a failure that it returns ends the job.
        restarts: number of earlier attempts of the job, for the ranks' environment.
        grace_s: longest wait for results after a signal, after which ranks are killed; None for no limit.

    Raises:
        StrettoError: a rank raised it, or the port cannot be used.
        RankFailed: a rank failed otherwise; the others were killed.
        RanksStopped: this process received a signal.
    """
    from torch.distributed import TCPStore

    listener = _listen(port)
    bound_port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        bound_port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **local_environment(os.environ),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's, as under torchrun
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }
    group = _RankGroup(stoppable, look, grace_s)
    with _SignalHandlers(group.on_signal) as signals:
        try:
            signals.first = signals.first or (earlier_signal() if earlier_signal is not None else None)
            group.start(ranks, environment, function, arguments)
            if signals.first is not None:
                group.ask()  # again: some had not started yet
            group.watch()
        finally:
            group.end()
    if group.failures:
        cause = first_cause(group.failures, range(ranks))
        if cause.kind == "input":
            raise StrettoError(cause.message, hint=cause.hint)
        raise RankFailed(cause, signals.first)
    if signals.first is not None:
        complete = len(group.results) == ranks
        raise RanksStopped(signals.first, [group.results[r] for r in range(ranks)] if complete else None)
    return [group.results[rank] for rank in range(ranks)]


def prepare(preload: Sequence[str] = ()) -> None:
    """Start the server that ranks are forked from; it imports `preload` while this process continues.

    Only the first call in a process has an effect; `run_ranks` calls it too.
    """
    from multiprocessing import forkserver, resource_tracker, set_forkserver_preload

    main = getattr(sys.modules.get("__main__"), "__spec__", None)  # every rank imports it again
    package = [main.name.removesuffix(".__main__")] if main is not None else []
    set_forkserver_preload([*PRELOAD, *preload, *package, "stretto.run.launch.freeze"])
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # no pool of threads may run in a process that forks
    if threading.current_thread() is threading.main_thread():  # others may end before the process does
        os.environ[LAUNCHER] = str(os.getpid())
    resource_tracker.ensure_running()  # before signals are blocked, since it unblocks them when it is done
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ.pop(LAUNCHER, None)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def check_ranks(ranks: int) -> None:
    """Raise StrettoError for more than RANKS_PER_CORE ranks on each core of this machine."""
    cores = os.cpu_count() or 1
    if ranks > RANKS_PER_CORE * cores:
        raise StrettoError(
            f"{ranks} ranks are too many for the {counted(cores, 'core')} of this machine",
            hint=f"at most {RANKS_PER_CORE * cores} start here; take fewer, or `stretto launch slurm`",
        )


def check_port(port: int) -> None:
    """Raise StrettoError if ranks cannot meet at `port`; 0 stands for any free one."""
    _listen(port).close()


class _RankGroup:
    """The processes of a job, from start to end."""

    def __init__(self, stoppable: bool, look: Look | None = None, grace_s: float | None = None) -> None:
        self.stoppable, self._grace_s = stoppable, grace_s
        self._look = look
        self.processes: list[ForkServerProcess] = []
        self.links: dict[int, Connection] = {}
        self.results: dict[int, Any] = {}
        self.failures: dict[int, Failure] = {}
        self._interrupts = 0  # how often SIGINT arrived
        self._cut = False  # kill the ranks now
        self._end: float | None = None  # deadline for stopping in order

    def start(
        self,
        ranks: int,
        environment: dict[str, str],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> None:
        """Start all ranks; they share nothing with this process but their arguments."""
        from torch.multiprocessing import get_context

        prepare()
        context: ForkServerContext = get_context("forkserver")
        for rank in range(ranks):
            parent_end, child_end = context.Pipe()
            variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
            arguments_of_rank = (rank, child_end, variables, os.getcwd(), self.stoppable, function, arguments)
            process = context.Process(target=run_rank, args=arguments_of_rank, name=f"rank {rank}")
            try:
                process.start()
            except (OSError, EOFError):
                if (failure := _server_failure(rank)) is None:
                    raise
                self.failures[rank] = failure
                return
            child_end.close()
            self.processes.append(process)
            self.links[rank] = cast(Connection, parent_end)

    def on_signal(self, number: int) -> None:
        """Handle a signal to this process."""
        self._interrupts += number == signal.SIGINT
        self._cut = self._cut or self._interrupts >= FORCE
        self.ask()

    def ask(self) -> None:
        """Ask ranks to stop, or kill them if they cannot stop in order."""
        if self.stoppable:
            if self._grace_s is not None and self._end is None:
                self._end = time.monotonic() + self._grace_s
            self._send(signal.SIGTERM, self.processes)
        else:
            self._cut = True

    def watch(self) -> None:
        """Wait until every rank has sent its result, or one has failed and the others had time to report."""
        deadline: float | None = None
        while (open_ := self._open()) and not self._cut:
            objects = {self.links[r]: r for r in open_} | {self.processes[r].sentinel: r for r in open_}
            ready = wait(list(objects), POLL_S)  # pyright: ignore[reportArgumentType]
            for rank in sorted({objects[source] for source in ready}):  # pyright: ignore[reportArgumentType]
                self._read(rank)
            self._cut = self._cut or (self._end is not None and time.monotonic() > self._end)
            if self._look is not None and deadline is None:
                running = {rank: self.processes[rank].pid or 0 for rank in self._open()}
                if (hung := self._look(running, self.failures)) is not None:
                    self.failures[hung.rank] = hung
            if self.failures and deadline is None:
                deadline = time.monotonic() + WAIT_FOR_CAUSE_S
            # once the cause of a failure is known no further report can change it
            cause_known = any(f.kind not in ("silent", "gone") for f in self.failures.values())
            if deadline is not None and (cause_known or time.monotonic() > deadline):
                return

    def end(self) -> None:
        """End all processes."""
        patience = time.monotonic() + WAIT_FOR_CAUSE_S
        if len(self.results) == len(self.links):  # results are in: they are exiting
            for process in self.processes:
                process.join(max(0.0, patience - time.monotonic()))
        self._send(signal.SIGKILL, self.processes)
        for process in self.processes:
            process.join()
        for link in self.links.values():
            link.close()

    def _open(self) -> list[int]:
        """Ranks that have sent neither a result nor a failure."""
        return [rank for rank in self.links if rank not in self.results and rank not in self.failures]

    def _ready(self, ranks: Iterable[int]) -> list[int]:
        """Ranks that have sent something, or have died."""
        objects = {self.links[r]: r for r in ranks} | {self.processes[r].sentinel: r for r in ranks}
        return sorted({objects[ready] for ready in wait(list(objects), POLL_S)})  # pyright: ignore[reportArgumentType]

    def _read(self, rank: int) -> None:
        """Receive a rank's result or failure; a rank that has died without either has failed."""
        link, process = self.links[rank], self.processes[rank]
        try:
            message = link.recv() if link.poll() else None
        except (EOFError, OSError):
            message = None
        if isinstance(message, Failure):
            self.failures[rank] = message
        elif message is not None:
            self.results[rank] = message[1]
            with contextlib.suppress(OSError):  # the rank has exited
                link.send(ACKNOWLEDGED)
        else:
            process.join(WAIT_FOR_CAUSE_S)
            lost = _server_failure(rank) if process.exitcode == _UNKNOWN else None
            self.failures[rank] = lost or Failure.died(rank, process.exitcode)

    def _send(self, number: int, processes: Iterable[ForkServerProcess]) -> None:
        orphaned = any(failure.kind == "server" for failure in self.failures.values())
        for process in processes:
            runs = process.exitcode is None or (orphaned and process.exitcode == _UNKNOWN)
            if process.pid is not None and runs:
                with contextlib.suppress(ProcessLookupError):  # it has ended, as its server knows
                    os.kill(process.pid, number)


def _server_failure(rank: int) -> Failure | None:
    """Return the failure of a job whose server, from which ranks are forked, has ended; None if it runs."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    end = time.monotonic() + _SERVER_END_S
    ended = None
    with contextlib.suppress(ChildProcessError, AttributeError):  # macOS has no waitid before Python 3.13
        while ended is None and time.monotonic() < end:
            time.sleep(0.02)
            # left for multiprocessing to reap, which then starts another server
            ended = os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    failure = Failure.died(rank, ended.si_status * (1 if ended.si_code == os.CLD_EXITED else -1))
    return replace(failure, kind="server", message=f"the server that ranks are forked from {failure.message}")


class _SignalHandlers:
    """Handles SIGNALS inside a `with`; a signal that is ignored (nohup) stays ignored.

    Args:
        on_signal: called with the signal's number each time.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self.first: int | None = None
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _SignalHandlers:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, _: FrameType | None) -> None:
        self.first = self.first or number
        self._on_signal(number)


def _listen(port: int) -> socket.socket:
    """Return a socket on the loopback interface only, since all ranks are on this machine."""
    try:
        listener = loopback_listener("127.0.0.1", port)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = "give another --port, or 0 for any free one"
        raise StrettoError(f"port {port} cannot be used: {reason}", hint=hint) from None
    assert listener is not None, "127.0.0.1 is an address of the loopback interface"
    return listener
