"""What every rank of a training job runs."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.engine.parallel.mesh import Mesh
from stretto.errors import StrettoError
from stretto.run.config import dump
from stretto.run.config.schema import JobConfig, TrainConfig
from stretto.run.data.token_folder import TokenFolder
from stretto.run.train.assemble import assemble
from stretto.run.train.metrics import Metrics
from stretto.run.train.position import Position, find_checkpoint, go_on
from stretto.run.train.prepare import prepare_data
from stretto.run.train.resume import check_fits
from stretto.run.train.session import Session
from stretto.run.train.stop import StopRequest


def train_rank(
    config: TrainConfig, stop: StopRequest, quiet: bool = False, tokens: Path | None = None
) -> dict[str, Any]:
    """Train as one rank of the job that RANK and WORLD_SIZE describe; returns the `Outcome` as a mapping.

    Args:
        stop: says when somebody asks to stop.
        quiet: write nothing to stdout (`--json`); the progress goes to stderr.
        tokens: the token folder, where it is known to be there; otherwise one rank of each machine builds it.
    """
    torch.set_num_threads(config.train.threads)
    device, timeout = pick_device(config), timedelta(seconds=config.train.timeout_s)
    with ExitStack() as cleanup:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
        cleanup.callback(dist.destroy_process_group)
        folder = TokenFolder(tokens) if tokens is not None else _open_data(config)
        mesh = Mesh(config.layout.to_layout(), device, timeout)
        notes = list[str]()
        found = find_checkpoint(config, notes.append)
        shape = config.shape(folder.index.vocab)
        if found is not None:
            check_fits(found, config, shape, folder)
        replica = assemble(config, shape, mesh, fresh=found is None)
        cleanup.callback(replica.close)
        position = Position()
        if found is not None:
            position = go_on(config, replica, folder, found, notes.append)
        metrics = _start_run(config, folder, position, quiet, cleanup) if mesh.rank == 0 else None
        if metrics is not None:
            for note in notes:
                metrics.note(note)
        outcome = Session(
            config=config, replica=replica, folder=folder, position=position, saved=found, metrics=metrics
        ).run(stop)
        dist.barrier()
        return asdict(outcome)


def pick_device(config: JobConfig) -> torch.device:
    """The device of this rank."""
    wanted = config.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def _open_data(config: TrainConfig) -> TokenFolder:
    """One rank of each machine makes sure that the tokens are there; then all open them."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        prepare_data(config)
    dist.barrier()
    return prepare_data(config)


def _start_run(
    config: TrainConfig, folder: TokenFolder, position: Position, quiet: bool, cleanup: ExitStack
) -> Metrics:
    """The run's folder with the config as resolved, the tokenizer, and where the numbers go."""
    run = config.run.folder
    try:
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").write_text(dump(config), encoding="utf-8")
        _keep_tokenizer(folder.path / "tokenizer.json", run / "tokenizer.json")
        metrics = Metrics(
            run,
            steps=config.train.steps,
            start=position.step,
            every=config.metrics.every,
            tensorboard=config.metrics.tensorboard,
            out=sys.stderr if quiet else None,
        )
    except OSError as error:
        raise StrettoError(
            f"run folder {run} cannot be written to: {error.strerror or error}", hint="give another run.dir"
        ) from None
    return cleanup.enter_context(metrics)


def _keep_tokenizer(source: Path, target: Path) -> None:
    """Beside its place first: a run that is stopped here leaves the old one or the new one."""
    beside = target.with_name(target.name + ".new")
    shutil.copyfile(source, beside)
    beside.replace(target)
