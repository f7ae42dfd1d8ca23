"""A training job from its config: checks, data, ranks, and how it ended."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.checkpoint.folder import checkpoints
from stretto.config.check import check
from stretto.config.schema import TrainConfig
from stretto.errors import StrettoError
from stretto.launch.local import RanksStopped, check_port, check_ranks, prepare, run_ranks
from stretto.launch.slurm import SAVED
from stretto.train.banner import banner
from stretto.train.prediction import first_line
from stretto.train.prepare import check_samples, prepare_data
from stretto.train.resume import check_resume, starts_afresh
from stretto.train.stop import Stopped, StopRequest

if TYPE_CHECKING:
    from stretto.data.indexed import TokenFolder

# what every rank needs anyway: imported once by the server that ranks are forked from. The optimisers import
# torch._dynamo.
PRELOAD = ("stretto.train.worker", "torch._dynamo", "numpy.random", "stretto.cli.main")


@dataclass(frozen=True)
class Result:
    """How a job ended: `outcome` of its ranks, or None where it was stopped before they had one."""

    outcome: dict[str, Any] | None
    signal: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether it was stopped before its last step."""
        return self.outcome is None or bool(self.outcome["stopped"])


def under_torchrun() -> bool:
    """Whether this process is a rank that somebody else has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_job(config: TrainConfig, quiet: bool = False, port: int = 0) -> Result:
    """Run a job: as one rank under torchrun, else on local ranks that this process starts.

    Raises:
        StrettoError: bad input; what can be known without ranks, before any is started.
        RankFailed: a rank failed.
    """
    return _join(config, quiet) if under_torchrun() else _launch(config, quiet, port)


def free_name(config: TrainConfig) -> TrainConfig:
    """The config with a run name that is not taken, for a run that starts afresh: train, train-2, train-3,
    ..."""
    run, number = config.run, 1
    while starts_afresh(config) and checkpoints(config.run.folder / "checkpoints"):
        number += 1
        config = config.model_copy(update={"run": run.model_copy(update={"name": f"{run.name}-{number}"})})
    return config


def exit_code(result: Result) -> int:
    """0 when done, 130 after Ctrl-C, 75 when stopped otherwise: saved, start it again to go on."""
    if not result.stopped:
        return 0
    return 130 if result.signal == signal.SIGINT else SAVED


def _join(config: TrainConfig, quiet: bool) -> Result:
    """As one rank of torchrun's."""
    world = int(os.environ["WORLD_SIZE"])
    check(config, world=world, devices=_devices(config, world))
    _check_fresh(config)
    from stretto.train.faults import cause_first
    from stretto.train.worker import train_rank

    with StopRequest() as stop, cause_first(stop):
        try:
            if os.environ["RANK"] == "0":
                _say_first(config, prepare_data(config, stop), quiet)
            return Result(train_rank(config, stop, quiet), stop.signal)
        except Stopped:
            return Result(None, stop.signal)


def _launch(config: TrainConfig, quiet: bool, port: int) -> Result:
    """On ranks of this machine."""
    check(config)
    ranks = config.layout.to_layout().world
    check_port(port)
    prepare(PRELOAD)  # it imports torch while this process looks at the text
    _check_ranks(config, ranks)
    with StopRequest() as stop:
        try:
            folder = prepare_data(config, stop)
            check_resume(config, config.shape(folder.index.vocab), folder)
            check_samples(config, folder)
            stop.check()
            _say_first(config, folder, quiet)
            threads = config.train.threads
            given = (local_rank, config, quiet, folder.path)
            outcomes = run_ranks(
                ranks, *given, threads=threads, port=port, stoppable=True, heard=lambda: stop.signal
            )
        except Stopped:
            return Result(None, stop.signal)
        except RanksStopped as stopped:
            return Result(stopped.results[0] if stopped.results else None, stopped.signal)
    return Result(outcomes[0])


def local_rank(config: TrainConfig, quiet: bool, tokens: Path) -> dict[str, Any]:
    """One rank of this machine; here, so that this process need not import what only ranks need."""
    from stretto.train.worker import train_rank

    with StopRequest() as stop:
        return train_rank(config, stop, quiet, tokens)


def _say_first(config: TrainConfig, folder: TokenFolder, quiet: bool) -> None:
    told = f"{banner(config, folder)}\n{first_line(config)}"
    print(told, file=sys.stderr if quiet else sys.stdout, flush=True)


def _check_fresh(config: TrainConfig) -> None:
    """A fresh run must not mix its checkpoints with an earlier run's."""
    folder = config.run.folder / "checkpoints"
    if starts_afresh(config) and checkpoints(folder):
        raise StrettoError(
            f"run {config.run.name!r} has checkpoints already in {folder}",
            hint="go on with --resume auto, or give another run.name",
        )


def _check_ranks(config: TrainConfig, ranks: int) -> None:
    """That this machine has the devices, or enough cores."""
    devices = _devices(config, None)
    check(config, devices=devices)
    if devices is None:
        check_ranks(ranks)


def _devices(config: TrainConfig, world: int | None) -> int | None:
    """GPUs of all machines, which bound the number of ranks; None on the CPU."""
    if config.train.device == "cpu":
        return None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.train.device == "cuda" and count == 0:
        raise StrettoError(
            "train.device is cuda, but there is no GPU here", hint="use train.device=auto or cpu"
        )
    machines = 1 if world is None else max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    return count * machines or None
