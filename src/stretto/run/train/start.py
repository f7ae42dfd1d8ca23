"""How a rank joins the others and opens the run's folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.engine.device import backend_for, rank_device
from stretto.errors import StrettoError
from stretto.run.config import dump
from stretto.run.config.run_checks import rate_notes
from stretto.run.config.schema import JobConfig, LoopConfig
from stretto.run.launch.lease import check_folder, share_folder
from stretto.run.launch.rendezvous import attempt_store
from stretto.run.train.metrics import LogFormat, Metrics


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


def open_metrics(
    config: JobConfig,
    step: int,
    write_files: Callable[[Path], object],
    cleanup: ExitStack,
    *,
    notes: Sequence[str],
    quiet: bool,
    log_format: LogFormat,
) -> Metrics | None:
    """Take part in the run's folder, and open it on rank 0, with the config as resolved.

    Args:
        step: the step that the run resumes from.
        write_files: writes into the folder what else belongs to the run.
        cleanup: closes the metrics at its end.
        notes: lines to print first.
        quiet: write nothing to stdout; progress goes to stderr.

    Returns:
        On rank 0 where the run's numbers go, None on others.

    Raises:
        StrettoError: the folder cannot be written to.
    """
    run = config.run.folder
    cleanup.enter_context(share_folder(run))
    if dist.get_rank() != 0:
        return None
    check_folder(run)
    try:
        run.mkdir(parents=True, exist_ok=True)
        if config.run.private:
            run.chmod(0o700)
        (run / "config.yaml").write_text(dump(config), encoding="utf-8")
        write_files(run)
        metrics = Metrics(
            run,
            steps=config.train.steps,
            start=step,
            every=config.metrics.every,
            board=config.metrics.board(run),
            out=sys.stderr if quiet else None,
            log_format=log_format,
            write_files=write_files,
        )
    except OSError as error:
        raise StrettoError(
            f"run folder {run} cannot be written to: {error.strerror or error}", hint="give another run.dir"
        ) from None
    cleanup.enter_context(metrics)
    for note in [*rate_notes(config.optim.rate, config.train.steps), *notes]:
        metrics.note(note)
    return metrics
