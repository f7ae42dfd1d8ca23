"""A training job from its config: checks, data, ranks, and how it ended."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.checkpoint.folder import checkpoints
from stretto.config.check import check
from stretto.config.schema import TrainConfig
from stretto.errors import StrettoError
from stretto.launch.local import RanksStopped, run_ranks
from stretto.train.prepare import prepare_data
from stretto.train.worker import train_rank

RANKS_PER_CORE = 16  # more local ranks than this on each core are a mistake, not a wish


@dataclass(frozen=True)
class Result:
    """How a job ended: `outcome` of its ranks, or None where a signal ended the launcher."""

    outcome: dict[str, Any] | None
    signal: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether it was stopped before its last step."""
        return self.signal is not None or bool(self.outcome and self.outcome["stopped"])


def under_torchrun() -> bool:
    """Whether this process is a rank that somebody else has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_job(config: TrainConfig, quiet: bool = False, port: int = 0) -> Result:
    """Run a job: as one rank under torchrun, else on local ranks that this process starts.

    Raises:
        StrettoError: bad input, before any process is started.
        RankFailed: a rank raised or died.
    """
    if under_torchrun():
        check(config, world=int(os.environ["WORLD_SIZE"]))
        _check_fresh(config)
        return Result(train_rank(config, quiet))
    check(config, devices=_devices(config))
    _check_fresh(config)
    ranks = config.layout.to_layout().world
    _check_ranks(config, ranks)
    _check_port(port)
    prepare_data(config, quiet=False)
    try:
        outcomes = run_ranks(
            ranks,
            train_rank,
            config,
            quiet,
            threads=config.train.threads,
            grace_s=int(config.train.timeout_s),
            port=port,
        )
    except RanksStopped as stopped:
        return Result(None, stopped.signal)
    return Result(outcomes[0])


def free_name(config: TrainConfig) -> TrainConfig:
    """The config with a run name that is not taken, for a run that starts afresh: train, train-2, train-3, ..."""
    if config.checkpoint.resume != "never" or not checkpoints(config.run.folder / "checkpoints"):
        return config
    number = 2
    while (Path(config.run.dir) / f"{config.run.name}-{number}").exists():
        number += 1
    return config.model_copy(
        update={"run": config.run.model_copy(update={"name": f"{config.run.name}-{number}"})}
    )


def exit_code(result: Result) -> int:
    """0 when done, 130 after Ctrl-C, 75 when stopped otherwise: saved, start it again to go on."""
    if not result.stopped:
        return 0
    return 130 if result.signal == signal.SIGINT else 75


def _check_fresh(config: TrainConfig) -> None:
    """A fresh run must not mix its checkpoints with an earlier run's."""
    folder = config.run.folder / "checkpoints"
    if config.checkpoint.resume == "never" and checkpoints(folder) and int(os.environ.get("RANK", 0)) == 0:
        raise StrettoError(
            f"run {config.run.name!r} has checkpoints already in {folder}",
            hint="go on with --resume auto, or give another run.name",
        )


def _check_ranks(config: TrainConfig, ranks: int) -> None:
    cores = os.cpu_count() or 1
    if config.train.device != "cuda" and not torch.cuda.is_available() and ranks > RANKS_PER_CORE * cores:
        raise StrettoError(
            f"layout needs {ranks} ranks, this machine has {cores} cores",
            hint=f"at most {RANKS_PER_CORE * cores} ranks start here; use a smaller layout or stretto launch slurm",
        )


def _check_port(port: int) -> None:
    """That the rendezvous can listen there."""
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StrettoError(
                f"port {port} cannot be used: {error.strerror}", hint="give another --port, or 0 for any free one"
            ) from None


def _devices(config: TrainConfig) -> int | None:
    """GPUs that bound the number of ranks; None on the CPU."""
    if config.train.device == "cpu":
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.train.device == "cuda" and count == 0:
        raise StrettoError("train.device is cuda, but there is no GPU here", hint="use train.device=auto or cpu")
    return count or None
