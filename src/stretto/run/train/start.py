"""Joining the other ranks, and creating the run's folder."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stretto.engine.device import backend_for, rank_device
from stretto.errors import StrettoError
from stretto.run.config.schema import LoopConfig, RunConfig
from stretto.run.launch.lease import check_folder
from stretto.run.launch.rendezvous import attempt_store


@contextmanager
def process_group(train: LoopConfig) -> Generator[torch.device]:
    """Join the ranks of the job that RANK and WORLD_SIZE describe; yields this rank's device."""
    torch.set_num_threads(train.threads)
    device = rank_device(train.device)
    timeout = timedelta(seconds=train.timeout_s)
    attempt = attempt_store(train.start_s, timeout)
    try:
        dist.init_process_group(
            backend_for(device.type, train.backend),
            store=attempt.store,
            rank=attempt.rank,
            world_size=attempt.world,
            timeout=timeout,
        )
        try:
            yield device
        finally:
            dist.destroy_process_group()
    finally:
        attempt.ended.set()


@contextmanager
def aborted_on_error(device: torch.device) -> Generator[None]:
    """Abort this rank's communication if the block raises.

    Destroying a group of NCCL first completes all that is queued on its communicators. After an error that
    may be a message that never comes, and the error would be reported only after the others' timeout.
    Aborted groups are destroyed at once. Gloo's calls do not outlive their connections.
    """
    try:
        yield
    except Exception:
        if dist.get_backend() != "gloo":
            library: Any = dist.distributed_c10d._get_default_group()._get_backend(device)
            grouped = hasattr(library, "_group_start")  # else aborts of several communicators may deadlock
            if grouped:
                library._group_start()
            for group in tuple(dist.distributed_c10d._world.pg_names):
                with suppress(RuntimeError):  # a library without it
                    group.abort()
            if grouped:
                library._group_end()
        raise


@contextmanager
def new_run_folder(run: RunConfig, config_text: str) -> Generator[None]:
    """Create the run's folder, with the config as resolved; the block writes the other files to it.

    Raises:
        StrettoError: the folder cannot be written to.
    """
    folder = run.folder
    check_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if run.private:
            folder.chmod(0o700)
        (folder / "config.yaml").write_text(config_text, encoding="utf-8")
        yield
    except OSError as error:
        raise StrettoError(
            f"run folder {folder} cannot be written to: {error.strerror or error}",
            hint="give another run.dir",
        ) from None
