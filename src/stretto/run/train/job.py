"""A training job from its config: checks, data, ranks, and how it ended."""

from __future__ import annotations

import os
import signal
import sys
from abc import ABC, abstractmethod
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from stretto.engine.checkpoint.folder import checkpoints
from stretto.errors import Problem, StrettoError
from stretto.run.config.check import check
from stretto.run.config.device_checks import no_graphs
from stretto.run.config.for_ranks import rank_choices
from stretto.run.config.job import job_of
from stretto.run.config.required import check_required
from stretto.run.config.schema import JobConfig, LoopConfig, TrainConfig
from stretto.run.data.prepare import check_samples, check_vocabulary, describe_samples, prepare_data
from stretto.run.data.sentinels import vocabulary
from stretto.run.launch.lease import STALE_S, lease
from stretto.run.launch.local import RanksStopped, check_port, check_ranks, prepare, run_ranks
from stretto.run.launch.network import check_interfaces, describe, local_environment, stay_inside
from stretto.run.launch.rendezvous import Meeting, await_start, join_early, reported_start
from stretto.run.launch.restart import Progress, supervise
from stretto.run.launch.slurm import SAVED
from stretto.run.launch.stop import Stopped, StopRequest
from stretto.run.train.prediction import first_line
from stretto.run.train.replan import Note, for_ranks
from stretto.run.train.restarts import Restarts
from stretto.run.train.resume import check_resume, starts_afresh
from stretto.run.watch.local import watching
from stretto.spec.devices import AUTO, HOST

if TYPE_CHECKING:
    from stretto.run.data.token_source import TokenData


class RanksConfig(Protocol):
    """What starting ranks needs of a config."""

    @property
    def train(self) -> LoopConfig: ...

    @property
    def required(self) -> tuple[str, ...]: ...


C = TypeVar("C", bound=RanksConfig)
J = TypeVar("J", bound=JobConfig)

# what every rank needs anyway: imported once by the server that ranks are forked from. The optimisers import
# torch._dynamo.
PRELOAD = ("stretto.run.train.worker", "torch._dynamo", "numpy.random", "stretto.cli.main")


@dataclass(frozen=True)
class Result:
    """How a job ended: `outcome` of its ranks, or None where it was stopped before they had one; and how
    often it was started again.
    """

    outcome: dict[str, Any] | None
    signal: int | None = None
    restarts: int = 0

    @property
    def stopped(self) -> bool:
        """Whether it was stopped before its last step."""
        return self.outcome is None or bool(self.outcome["stopped"])


def under_torchrun() -> bool:
    """Whether this process is a rank of torchrun's, or of another launcher that sets RANK and WORLD_SIZE."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Kind(ABC, Generic[C]):
    """The steps of a job that depend on the kind of model: before its ranks start, and on them."""

    preload: tuple[str, ...]  # what every rank imports
    orderly = True  # its ranks agree on where to stop; else a signal ends them at once

    def writes_to(self, config: C) -> Path | None:
        """The folder of the run that the job trains, which no other may write to; None: it trains none."""

    def check_fresh(self, config: C) -> None:
        """Raise StrettoError where a fresh run would mix its checkpoints with an earlier run's. For ranks of
        torchrun: a local launcher has found a free name (`free_name`) or asked before.
        """

    @abstractmethod
    def ranks(self, config: C) -> int:
        """Processes of the job."""

    def rank_choices(self, config: C) -> list[int]:
        """The numbers of ranks that the job can have, the largest first."""
        return [self.ranks(config)]

    def for_ranks(self, config: C, ranks: int, note: Note) -> C:
        """The job on another of these numbers; `note` is told what was chosen for it.

        Raises:
            StrettoError: it cannot have so many.
        """
        raise NotImplementedError

    @abstractmethod
    def check(self, config: C, world: int | None, devices: int | None) -> None:
        """Raise StrettoError for a job that is known to fail."""

    @abstractmethod
    def prepare(self, config: C, stop: StopRequest) -> Any:
        """Make sure that the data is on disk; the returned value goes to `agree` and `say`."""

    @abstractmethod
    def agree(self, config: C, data: Any) -> None:
        """Raise StrettoError where the data and the place to resume from do not fit."""

    @abstractmethod
    def say(self, config: C, data: Any, quiet: bool) -> None:
        """Print what will be trained; with `quiet` to stderr."""

    @abstractmethod
    def local(self, config: C, data: Any, quiet: bool) -> tuple[Any, ...]:
        """What a local rank runs: a function that can be pickled, and its arguments."""

    @abstractmethod
    def join(self, config: C, stop: StopRequest, quiet: bool) -> dict[str, Any]:
        """Train as a rank that torchrun has started."""


def run_job(config: TrainConfig, quiet: bool = False, port: int = 0) -> Result:
    """Run a job: as one rank under torchrun, else on local ranks that this process starts.

    Raises:
        StrettoError: bad input; what can be known without ranks, before any is started.
        RankFailed: a rank failed.
    """
    return run_kind(_Language(), config, quiet, port)


def run_kind(kind: Kind[C], config: C, quiet: bool = False, port: int = 0) -> Result:
    """As `run_job`, of any kind."""
    check_required(config)
    return _join(kind, config, quiet) if under_torchrun() else _launch(kind, config, quiet, port)


def free_name(config: J) -> J:
    """The config with a run name that is not taken, for a run that starts afresh: train, train-2, train-3,
    ..."""
    run, number = config.run, 1
    while starts_afresh(config) and checkpoints(config.run.folder / "checkpoints"):
        number += 1
        config = replace(config, run=replace(run, name=f"{run.name}-{number}"))
    return config


def exit_code(result: Result) -> int:
    """0 when done, 130 after Ctrl-C, 75 when stopped otherwise: saved, start it again to go on."""
    if not result.stopped:
        return 0
    return 130 if result.signal == signal.SIGINT else SAVED


def _join(kind: Kind[C], config: C, quiet: bool) -> Result:
    """As one rank of torchrun's."""
    meeting = Meeting.of(os.environ)
    world, first = meeting.world, meeting.rank == 0
    stay_inside(os.environ)
    check_interfaces()
    kind.check(config, world, _devices(config, world))
    kind.check_fresh(config)
    from stretto.run.launch.failure import cause_first

    stopping = StopRequest() if kind.orderly else nullcontext(StopRequest())
    with stopping as stop, cause_first(stop):
        try:
            train = config.train
            attempt = join_early(train.start_s, timedelta(seconds=train.timeout_s), stop.check)
            with ExitStack() as cleanup:
                if not first:
                    await_start(attempt, train.timeout_s + STALE_S, stop.check)
                else:
                    with reported_start(attempt):
                        cleanup.enter_context(lease(kind.writes_to(config)))
                        kind.say(config, kind.prepare(config, stop), quiet)
                        _say_network(kind, config, quiet)
                return Result(kind.join(config, stop, quiet), stop.signal)
        except Stopped:
            return Result(None, stop.signal)


def _launch(kind: Kind[C], config: C, quiet: bool, port: int) -> Result:
    """On ranks of this machine."""
    check_interfaces()
    kind.check(config, None, None)
    ranks = kind.ranks(config)
    check_port(port)
    with lease(kind.writes_to(config)):
        prepare(kind.preload)  # it imports torch while this process looks at the data
        devices = _devices(config, None)
        kind.check(config, None, devices)
        if devices is None:
            check_ranks(ranks)
        restarts = Restarts(kind.writes_to(config), quiet)
        with StopRequest() as stop:
            try:
                data = kind.prepare(config, stop)
                kind.agree(config, data)
                stop.check()
                kind.say(config, data, quiet)
                _say_network(kind, config, quiet)
                attempts = _Attempts(kind=kind, config=config, data=data, stop=stop, quiet=quiet, port=port)

                def progress() -> Progress:
                    return replace(restarts.progress(), begun=attempts.begun)

                outcomes = supervise(
                    attempts.run,
                    limit=config.train.restarts if restarts.folder is not None else 0,
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


@dataclass(kw_only=True)
class _Attempts(Generic[C]):
    """The attempts of a job on this machine, each on ranks of its own."""

    kind: Kind[C]
    config: C
    data: Any
    stop: StopRequest
    quiet: bool
    port: int
    begun: bool = False  # a rank of the last attempt has begun a step

    def run(self, number: int) -> list[Any]:
        """The results of all ranks of one attempt; `number` is how many came before."""
        if number:
            self._fit_devices()
        kind, config = self.kind, self.config
        ranks = kind.ranks(config)
        with watching(ranks, kind.writes_to(config), config.train.hang_s) as (watched, look, has_begun):
            try:
                return run_ranks(
                    ranks,
                    *watched,
                    *kind.local(config, self.data, self.quiet),
                    threads=config.train.threads,
                    port=self.port,
                    stoppable=kind.orderly,
                    earlier_signal=lambda: self.stop.signal,
                    look=look,
                    restarts=number,
                    grace_s=config.train.grace_s,
                )
            finally:
                self.begun = has_begun()

    def shrink(self) -> bool:
        """Let further attempts have the next smaller number of ranks; whether there is one."""
        return self._take_fewer(self.kind.ranks(self.config) - 1, "one was lost twice in a row")

    def _fit_devices(self) -> None:
        """Go on with as many ranks as have a device, where some devices are gone.

        Raises:
            StrettoError: the job has no layout for so few.
        """
        devices, ranks = _devices(self.config, None), self.kind.ranks(self.config)
        if devices is None or devices >= ranks:
            return
        if not self._take_fewer(devices, f"this machine has {devices} devices now"):
            raise StrettoError(
                f"this machine has {devices} devices now, and there is no layout of so few ranks",
                hint=f"repair it, or list layouts of at most {devices} ranks in the section elastic",
            )

    def _take_fewer(self, most: int, why: str) -> bool:
        """Take the largest number of ranks up to `most` that the job can have; whether there is one."""
        before = self.kind.ranks(self.config)
        for ranks in self.kind.rank_choices(self.config):
            if ranks > most:
                continue
            try:
                config = self.kind.for_ranks(self.config, ranks, self._note)
            except StrettoError:  # the planner knows no layout of so many
                continue
            self.config, self.data = config, self.kind.prepare(config, self.stop)
            self._note(f"going on with {ranks} of {before} ranks, for {why}")
            return True
        return False

    def _note(self, text: str) -> None:
        print(text, file=sys.stderr if self.quiet else sys.stdout, flush=True)


def _say_network(kind: Kind[C], config: C, quiet: bool) -> None:
    """Say on which interfaces a training job listens."""
    if kind.writes_to(config) is None:
        return
    device, backend = config.train.device, config.train.backend
    if device == HOST:
        backend = "gloo" if backend == AUTO else backend
    else:
        from stretto.engine.device import backend_for, device_kind

        backend = backend_for(device_kind(device), backend).split(":")[-1]
    environment = {**os.environ} if under_torchrun() else {**os.environ, **local_environment(os.environ)}
    print(describe(environment, backend), file=sys.stderr if quiet else sys.stdout, flush=True)


class _Language(Kind[TrainConfig]):
    preload = PRELOAD

    def ranks(self, config: TrainConfig) -> int:
        return config.layout.to_layout().world

    def rank_choices(self, config: TrainConfig) -> list[int]:
        return rank_choices(config)

    def for_ranks(self, config: TrainConfig, ranks: int, note: Note) -> TrainConfig:
        return for_ranks(config, ranks, note)

    def check(self, config: TrainConfig, world: int | None, devices: int | None) -> None:
        check(config, world=world, devices=devices)
        check_vocabulary(config)
        _check_graphs(config)

    def writes_to(self, config: TrainConfig) -> Path | None:
        return config.run.folder

    def check_fresh(self, config: TrainConfig) -> None:
        check_fresh(config)

    def prepare(self, config: TrainConfig, stop: StopRequest) -> TokenData:
        return prepare_data(config, stop)

    def agree(self, config: TrainConfig, data: TokenData) -> None:
        check_vocabulary(config, data)
        check_attention(config, config.train.device)
        check_resume(config, config.shape(vocabulary(data, config)), data)
        check_samples(config, data)

    def say(self, config: TrainConfig, data: TokenData, quiet: bool) -> None:
        _say_first(config, data, quiet)

    def local(self, config: TrainConfig, data: TokenData, quiet: bool) -> tuple[Any, ...]:
        return local_rank, config, quiet, data

    def join(self, config: TrainConfig, stop: StopRequest, quiet: bool) -> dict[str, Any]:
        from stretto.run.train.worker import train_rank

        return train_rank(config, stop, quiet)


def local_rank(config: TrainConfig, quiet: bool, source: TokenData) -> dict[str, Any]:
    """One rank of this machine; here, so that this process need not import what only ranks need."""
    from stretto.run.train.worker import train_rank

    with StopRequest() as stop:
        return train_rank(config, stop, quiet, source)


def _say_first(config: TrainConfig, source: TokenData, quiet: bool) -> None:
    from stretto.run.train.banner import banner

    job = job_of(config, vocab=vocabulary(source, config))
    lines = [banner(config, job, source), *describe_samples(config, source), first_line(job, config.train)]
    print("\n".join(lines), file=sys.stderr if quiet else sys.stdout, flush=True)


def check_fresh(config: JobConfig) -> None:
    """Raise StrettoError where a fresh run would mix its checkpoints with an earlier run's."""
    folder = config.run.folder / "checkpoints"
    if starts_afresh(config) and checkpoints(folder):
        raise StrettoError(
            f"run {config.run.name!r} has checkpoints already in {folder}",
            hint="go on with --resume auto, or give another run.name",
        )


def check_attention(config: TrainConfig, device: str) -> None:
    """Raise StrettoError where FlexAttention is asked for on CPUs, and torch has no backward of it there."""
    if config.train.attention == "flex":
        from stretto.engine.device import device_kind
        from stretto.engine.flex import check_trains_on_host

        if device_kind(device) == HOST:
            check_trains_on_host()


def _check_graphs(config: TrainConfig) -> None:
    """Raise for graphs of devices that have none, once it is known which devices these are."""
    if config.train.graphs == "off":
        return
    from stretto.engine.device import device_kind, has_graphs

    if not has_graphs(kind := device_kind(config.train.device)):
        raise Problem("train.graphs", config.train.graphs, no_graphs(kind), "train.graphs=off")


def _devices(config: RanksConfig, world: int | None) -> int | None:
    """Accelerators of all machines, which bound the number of ranks; None on the CPU."""
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
