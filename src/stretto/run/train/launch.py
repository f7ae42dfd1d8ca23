"""Starts the ranks of any job: as one rank under torchrun, or on local ranks, which are restarted after a
failure if the config asks for it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from stretto.engine.checkpoint.folder import checkpoints, step_of
from stretto.errors import StrettoError, counted
from stretto.job.devices import AUTO, HOST
from stretto.run.config.required import check_required
from stretto.run.config.schema import LoopConfig, RunConfig
from stretto.run.launch.lease import STALE_S, lease
from stretto.run.launch.local import RanksStopped, check_port, check_ranks, prepare, run_ranks
from stretto.run.launch.network import bind_to_loopback, check_interfaces, describe, local_environment
from stretto.run.launch.rendezvous import RendezvousInfo, await_start, join_early, reported_start
from stretto.run.launch.restart import JobProgress, supervise
from stretto.run.launch.stop import SAVED, Stopped, StopRequest
from stretto.run.train.restarts import Restarts
from stretto.run.train.resume import is_fresh_run
from stretto.run.watch.local import watching


class RanksConfig(Protocol):
    """What starting ranks needs of a config."""

    @property
    def train(self) -> LoopConfig: ...

    @property
    def required(self) -> tuple[str, ...]: ...


C = TypeVar("C", bound=RanksConfig)
D = TypeVar("D")

# what every rank needs anyway: imported once by the server that ranks are forked from, and not by each rank
# for half a second. The optimisers import torch._dynamo.
PRELOAD = (
    "stretto.run.train.assemble",
    "stretto.run.train.async_step",
    "stretto.run.train.companions",
    "stretto.run.train.language_job",
    "stretto.run.train.warm",
    "torch._dynamo",
    "numpy.random",
    "stretto.cli.main",
)


@dataclass(frozen=True, kw_only=True)
class Elastic(Generic[C]):
    """How a job changes its number of ranks.

    Attributes:
        choices: returns the numbers of ranks that a job can have, the largest first.
        for_ranks: returns the job on another of these numbers, and logs its layout. Raises StrettoError if
            there is no layout for this number.
    """

    choices: Callable[[C], Sequence[int]]
    for_ranks: Callable[[C, int, Callable[[str], None]], C]


@dataclass(frozen=True, kw_only=True)
class JobType(Generic[C, D]):
    """What a job's ranks do, and what precedes their start.

    Attributes:
        preload: modules that every rank imports.
        ranks: number of ranks.
        check: raises StrettoError for a job that is known to fail. It gets the number of torchrun's ranks, or
            None, and of accelerators, or None if they are not counted or ranks are on CPUs.
        prepare: makes sure that the data exists, and raises StrettoError if it does not fit the job.
        print_start: prints what the job does; with `quiet` to stderr.
        run_rank: what a rank runs, a function that can be pickled. It gets the data, or None under torchrun.
        folder: the folder of the run that the job trains, to which no other job may write; None if it trains
            none.
        check_fresh: raises StrettoError if a new run would mix its checkpoints with those of an earlier one.
        elastic: None if the number of ranks is fixed.
        orderly: the ranks agree on where to stop; otherwise a signal ends them at once.
    """

    preload: tuple[str, ...]
    ranks: Callable[[C], int]
    check: Callable[[C, int | None, int | None], None]
    prepare: Callable[[C, StopRequest], D]
    print_start: Callable[[C, D, bool], None]
    run_rank: Callable[[C, D | None, StopRequest, bool], dict[str, Any]]
    folder: Callable[[C], Path] | None = None
    check_fresh: Callable[[C], None] | None = None
    elastic: Elastic[C] | None = None
    orderly: bool = True

    def run_folder(self, config: C) -> Path | None:
        """Return the folder of the run that the job trains, or None."""
        return None if self.folder is None else self.folder(config)


@dataclass(frozen=True)
class Result:
    """How a job ended: `outcome` of its ranks, or None if it was stopped before they had one, and the number
    of its restarts.
    """

    outcome: dict[str, Any] | None
    signal: int | None = None
    restarts: int = 0

    @property
    def stopped(self) -> bool:
        """True if it was stopped before its last step."""
        return self.outcome is None or bool(self.outcome["stopped"])


def under_torchrun() -> bool:
    """Return True if torchrun, or another launcher that sets RANK and WORLD_SIZE, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_job(job: JobType[C, D], config: C, quiet: bool = False, port: int = 0) -> Result:
    """Run a job: as one rank under torchrun, otherwise on local ranks that this process starts.

    Args:
        quiet: print nothing to stdout.
        port: on which local ranks meet; 0 for any.

    Raises:
        StrettoError: bad input; before any rank is started, if it can be known without ranks.
        RankFailed: a rank failed.
    """
    check_required(config)
    return _join(job, config, quiet) if under_torchrun() else _launch(job, config, quiet, port)


def _join(job: JobType[C, D], config: C, quiet: bool) -> Result:
    """Run as one rank of torchrun's. Rank 0 prepares the data while the others wait for it."""
    rendezvous = RendezvousInfo.of(os.environ)
    world, folder = rendezvous.world, job.run_folder(config)
    bind_to_loopback(os.environ)
    check_interfaces()
    job.check(config, world, _device_count(config, world))
    if job.check_fresh is not None:  # a local launcher has chosen a free name, or asked before
        job.check_fresh(config)
    from stretto.run.launch.failure import report_root_cause_first

    stopping = StopRequest() if job.orderly else nullcontext(StopRequest())
    with stopping as stop, report_root_cause_first(stop):
        try:
            train = config.train
            attempt = join_early(train.start_s, timedelta(seconds=train.timeout_s), stop.check)
            with ExitStack() as cleanup:
                if rendezvous.rank > 0:
                    await_start(attempt, train.timeout_s + STALE_S, stop.check)
                else:
                    with reported_start(attempt):
                        cleanup.enter_context(lease(folder))
                        job.print_start(config, job.prepare(config, stop), quiet)
                        _print_network(folder, train, quiet)
                return Result(job.run_rank(config, None, stop, quiet), stop.signal)
        except Stopped:
            return Result(None, stop.signal)


def _launch(job: JobType[C, D], config: C, quiet: bool, port: int) -> Result:
    """Run on ranks of this machine, and again after failures."""
    check_interfaces()
    job.check(config, None, None)
    ranks, folder = job.ranks(config), job.run_folder(config)
    check_port(port)
    with lease(folder):
        prepare(job.preload)  # it imports torch while this process looks at the data
        devices = _device_count(config, None)
        job.check(config, None, devices)
        if devices is None:
            check_ranks(ranks)
        restarts = Restarts(folder, quiet)
        with StopRequest() as stop:
            try:
                data = job.prepare(config, stop)
                stop.check()
                job.print_start(config, data, quiet)
                _print_network(folder, config.train, quiet)
                attempts = _Attempts(job=job, config=config, data=data, stop=stop, quiet=quiet, port=port)

                def progress() -> JobProgress:
                    return replace(restarts.progress(), begun=attempts.begun)

                outcomes = supervise(
                    attempts.run,
                    limit=config.train.restarts if folder is not None else 0,
                    stop=stop,
                    progress=progress,
                    prepare=restarts.begin,
                    shrink=attempts.shrink,
                )
            except Stopped:
                return Result(None, stop.signal, restarts.count)
            except RanksStopped as stopped:
                outcome = stopped.results[0] if stopped.results else None
                return Result(outcome, stopped.signal, restarts.count)
    return Result(outcomes[0], restarts=restarts.count)


def _run_local_rank(
    run_rank: Callable[[C, D | None, StopRequest, bool], dict[str, Any]],
    config: C,
    data: D,
    orderly: bool,
    quiet: bool,
) -> dict[str, Any]:
    """One rank of this machine."""
    with StopRequest() if orderly else nullcontext(StopRequest()) as stop:
        return run_rank(config, data, stop, quiet)


@dataclass(kw_only=True)
class _Attempts(Generic[C, D]):
    """The attempts of a job on this machine, each on ranks of its own.

    Attributes:
        begun: whether a rank of the last attempt has begun a step.
    """

    job: JobType[C, D]
    config: C
    data: D
    stop: StopRequest
    quiet: bool
    port: int
    begun: bool = False

    def run(self, number: int) -> list[Any]:
        """Return the results of all ranks of one attempt; `number` is the number of earlier ones.

        Raises:
            StrettoError: devices are gone, and there is no layout for those that are left.
        """
        job, ranks = self.job, self.job.ranks(self.config)
        devices = _device_count(self.config, None) if number else None
        if devices is not None and devices < ranks:
            reason = f"this machine has {counted(devices, 'device')} now"
            if not self._shrink_to(devices, reason):
                raise StrettoError(
                    f"{reason}, and there is no layout for so few ranks",
                    hint=f"repair it, or add a layout of {counted(devices, 'rank')} to elastic.layouts",
                )
        config, ranks = self.config, job.ranks(self.config)
        with watching(ranks, job.run_folder(config), config.train.hang_s) as (watched, look, has_begun):
            try:
                return run_ranks(
                    ranks,
                    *watched,
                    _run_local_rank,
                    job.run_rank,
                    config,
                    self.data,
                    job.orderly,
                    self.quiet,
                    threads=config.train.threads,
                    port=self.port,
                    stoppable=job.orderly,
                    earlier_signal=lambda: self.stop.signal,
                    look=look,
                    restarts=number,
                    grace_s=config.train.grace_s,
                )
            finally:
                self.begun = has_begun()

    def shrink(self) -> bool:
        """Give further attempts the next smaller number of ranks; return False if there is none."""
        return self._shrink_to(self.job.ranks(self.config) - 1, "one was lost twice in a row")

    def _shrink_to(self, limit: int, reason: str) -> bool:
        """Take the largest number of ranks up to `limit` that the job allows; return False if none is."""
        job, before = self.job, self.job.ranks(self.config)
        if job.elastic is None:
            return False

        def log(text: str) -> None:
            print(text, file=sys.stderr if self.quiet else sys.stdout, flush=True)

        for ranks in job.elastic.choices(self.config):
            if ranks > limit:
                continue
            try:
                config = job.elastic.for_ranks(self.config, ranks, log)
                job.check(config, None, None)
            except StrettoError:  # there is no such layout
                continue
            self.config, self.data = config, job.prepare(config, self.stop)
            log(f"continuing with {ranks} of {before} ranks, for {reason}")
            return True
        return False


def _print_network(folder: Path | None, train: LoopConfig, quiet: bool) -> None:
    """Print on which interfaces a training job listens."""
    if folder is None:
        return
    backend = train.backend
    if train.device == HOST:
        backend = "gloo" if backend == AUTO else backend
    else:
        from stretto.engine.device import backend_for, device_kind

        backend = backend_for(device_kind(train.device), backend).split(":")[-1]
    environment = {**os.environ} if under_torchrun() else {**os.environ, **local_environment(os.environ)}
    print(describe(environment, backend), file=sys.stderr if quiet else sys.stdout, flush=True)


def _device_count(config: RanksConfig, world: int | None) -> int | None:
    """Return the number of accelerators of all machines, which bounds that of ranks, or None on CPUs."""
    train = config.train
    if train.device == HOST and train.backend == AUTO:
        return None
    from stretto.engine.device import backend_for, device_count, device_kind

    kind = device_kind(train.device)
    backend_for(kind, train.backend)
    if kind == HOST:
        return None
    machines = 1 if world is None else max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    return device_count(kind) * machines


def check_fresh(resume: str, run: RunConfig) -> None:
    """Raise StrettoError if a new run would mix its checkpoints with those of an earlier one.

    Args:
        resume: `checkpoint.resume`.
    """
    folder = run.folder / "checkpoints"
    if is_fresh_run(resume, run.folder) and checkpoints(folder):
        raise StrettoError(
            f"run {run.name!r} has checkpoints already in {folder}",
            hint="continue it with --resume auto, or give another run.name",
        )


def unused_run(resume: str, run: RunConfig) -> RunConfig:
    """Return the run, with a name whose folder has no checkpoints if it starts afresh: train, train-2,
    train-3, ...

    Args:
        resume: `checkpoint.resume`.
    """
    renamed, count = run, 1
    while is_fresh_run(resume, renamed.folder) and checkpoints(renamed.folder / "checkpoints"):
        count += 1
        renamed = replace(run, name=f"{run.name}-{count}")
    return renamed


def stopped_run(run: RunConfig, requested: str, steps: int) -> RunConfig | None:
    """Return the run before this one, which `unused_run` has renamed, if it has a checkpoint and steps left.

    Args:
        requested: the name in the config.
        steps: of the whole run.
    """
    if run.name == requested:
        return None
    before = int(run.name.removeprefix(f"{requested}-")) - 1
    former = replace(run, name=requested if before == 1 else f"{requested}-{before}")
    saved = checkpoints(former.folder / "checkpoints")
    return former if saved and (step_of(saved[0]) or 0) < steps else None


def exit_code(result: Result) -> int:
    """Return 0 when done, 130 after Ctrl-C, 75 when stopped otherwise: saved, to be continued."""
    if not result.stopped:
        return 0
    return 130 if result.signal == signal.SIGINT else SAVED
