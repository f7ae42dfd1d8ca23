"""What every rank of a recommender's job runs."""

from __future__ import annotations

import ctypes
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stretto.engine.parallel.control import gather_json, run_on_first
from stretto.recommender.clicks.index import TRANSFORM, VOCABULARY
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements
from stretto.recommender.train.clicks import ClickData, prepare_clicks
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.placement import file_text, from_json, place, to_json
from stretto.recommender.train.position import ClickPosition, resume_from
from stretto.recommender.train.report import SAMPLES
from stretto.recommender.train.resume import check_fits
from stretto.recommender.train.session import Session
from stretto.run.launch.stop import StopRequest
from stretto.run.train.loop import process_group, start_run
from stretto.run.train.position import find_checkpoint
from stretto.run.watch.joint import watched_together
from stretto.run.watch.record import HANG, hang_record, record_environment


def train_rank(
    config: RecommenderConfig,
    stop: StopRequest,
    quiet: bool = False,
    ready: tuple[ClickData, Placements] | None = None,
) -> dict[str, Any]:
    """Train as one rank of the job that RANK and WORLD_SIZE describe; returns the `Outcome` as a mapping.

    Args:
        stop: set by a request to stop.
        quiet: write nothing to stdout (`--json`); the progress goes to stderr.
        ready: the clicks and the placement, if they are known; otherwise one rank of each machine prepares
            the clicks, and rank 0 places the tables.
    """
    keep_freed_memory()
    with ExitStack() as cleanup:
        record_environment(config.run.folder / HANG)
        device = cleanup.enter_context(process_group(config.train))
        cleanup.enter_context(hang_record(config.run.folder / HANG, ()))
        cleanup.enter_context(watched_together(config.run.folder / HANG, config.train.hang_s))
        data, placements = ready if ready is not None else _make_ready(config)
        notes = list[str]()
        checkpoint = find_checkpoint(config, notes.append)
        if checkpoint is not None:
            check_fits(checkpoint, config, data.tables, data.same)
        folder = disk_folder(config)
        if config.tables.folder is None:
            cleanup.callback(remove_empty, folder)
        recommender = Recommender.build(
            config, data.tables, placements, device, fresh=checkpoint is None, folder=folder
        )
        cleanup.callback(recommender.close)
        position = ClickPosition()
        if checkpoint is not None:
            position = resume_from(config, recommender, data, checkpoint, notes.append)
        text = file_text(config, placements)
        metrics = start_run(
            config,
            position.step,
            lambda run: _keep(run, text, data),
            cleanup,
            notes=notes,
            quiet=quiet,
            words=SAMPLES,
        )
        session = Session(
            config=config,
            recommender=recommender,
            data=data,
            placements=placements,
            position=position,
            device=device,
            saved=checkpoint,
            metrics=metrics,
        )
        outcome = session.run(stop)
        dist.barrier()
        return asdict(outcome)


def _keep(run: Path, placement: str, data: ClickData) -> None:
    """Write what scoring needs beside checkpoints: the placement, and the log's transform if there is one."""
    (run / "placement.yaml").write_text(placement, encoding="utf-8")
    for name in (TRANSFORM, VOCABULARY) if data.path is not None else ():
        if data.path is not None and (data.path / name).is_file():
            beside = run / f"{name}.new"
            shutil.copyfile(data.path / name, beside)
            beside.replace(run / name)


def _make_ready(config: RecommenderConfig) -> tuple[ClickData, Placements]:
    """One rank of each machine prepares the clicks; rank 0 places the tables."""
    import os

    data = prepare_clicks(config) if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    gather_json(None)  # barrier: the clicks are prepared
    data = data or prepare_clicks(config, quiet=True)
    return data, from_json(run_on_first(lambda: to_json(place(config, data))))


def disk_folder(config: RecommenderConfig) -> Path:
    """The folder for tables on disk, in which each rank makes its own files."""
    named = config.tables.folder
    return Path(named).expanduser() if named else config.run.folder / "tables"


def remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


# of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 1 << 25  # the most that it takes for the second


def keep_freed_memory() -> bool:
    """Makes this process keep freed memory instead of returning pages and faulting them in at every step.

    Blocks of 32 MiB and more are still returned. The process stays at its peak size.

    Returns:
        Whether the system supports it: glibc on Linux.
    """
    if sys.platform != "linux":
        return False
    try:
        set_ = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(set_(_MMAP_THRESHOLD, _LARGEST)) and bool(set_(_TRIM_THRESHOLD, 2**31 - 1))
