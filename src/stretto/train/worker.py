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

from stretto.config import dump
from stretto.config.schema import TrainConfig
from stretto.data.indexed import TokenFolder
from stretto.parallel.mesh import Mesh
from stretto.train.assemble import assemble, describe_stages
from stretto.train.faults import cause_first
from stretto.train.metrics import Metrics
from stretto.train.prepare import prepare_data
from stretto.train.session import Session
from stretto.train.stop import StopRequest


def train_rank(config: TrainConfig, quiet: bool = False) -> dict[str, Any]:
    """Train as one rank of the job that RANK and WORLD_SIZE describe; returns how it ended.

    Args:
        quiet: write nothing to stdout (`--json`); the progress goes to stderr.
    """
    torch.set_num_threads(config.train.threads)
    device = pick_device(config)
    with StopRequest() as stop, ExitStack() as cleanup, cause_first(stop):
        timeout = timedelta(seconds=config.train.timeout_s)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timeout,
        )
        cleanup.callback(dist.destroy_process_group)
        folder = _open_data(config)
        mesh = Mesh(config.layout.to_layout(), device, timeout)
        shape = config.shape(folder.index.vocab)
        replica = assemble(config, shape, mesh)
        cleanup.callback(replica.close)
        session = Session(config, replica, folder, config.run.folder, None)
        found = session.find_checkpoint()
        if mesh.rank == 0:
            _start_run(config, folder)
            session.metrics = _metrics(config, found, quiet, cleanup)
            session.metrics.note(describe_stages(replica))
        if found is not None:
            session.resume(found)
        outcome = session.run(stop)
        dist.barrier()
        return asdict(outcome)


def pick_device(config: TrainConfig) -> torch.device:
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


def _start_run(config: TrainConfig, folder: TokenFolder) -> None:
    """The run's folder with the config as resolved and the tokenizer."""
    run = config.run.folder
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(dump(config), encoding="utf-8")
    shutil.copyfile(folder.path / "tokenizer.json", run / "tokenizer.json")


def _metrics(config: TrainConfig, found: Path | None, quiet: bool, cleanup: ExitStack) -> Metrics:
    start = int(found.name.rpartition("-")[2]) if found is not None else 0
    return cleanup.enter_context(
        Metrics(
            config.run.folder,
            steps=config.train.steps,
            start=start,
            every=config.metrics.every,
            tensorboard=config.metrics.tensorboard,
            out=sys.stderr if quiet else None,
        )
    )
