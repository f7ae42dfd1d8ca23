"""Training a recommender from its config: checks, clicks and placement before the ranks start, and what each
rank builds. Imports torch only on the ranks.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.recommender.clicks.index import TRANSFORM, VOCABULARY
from stretto.recommender.config.check import check, check_tables
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements
from stretto.recommender.train.clicks import ClickData, check_held_out, prepare_clicks
from stretto.recommender.train.placement import file_text, from_json, place, to_json
from stretto.recommender.train.report import SAMPLES, banner
from stretto.recommender.train.resume import check_fits
from stretto.run.launch.stop import StopRequest
from stretto.run.train.launch import Elastic, JobType, check_fresh
from stretto.run.train.resume import checkpoint_to_resume

if TYPE_CHECKING:
    from contextlib import ExitStack

    import torch

    from stretto.run.train.task import Log, OpenedRun

PRELOAD = (
    "stretto.recommender.train.job",
    "stretto.recommender.train.task",
    "stretto.run.train.trainer",
    "stretto.recommender.train.registered",
    "torch._dynamo",
    "numpy.random",
    "stretto.cli.main",
)

PlacedClicks = tuple[ClickData, Placements]


def _prepare(config: RecommenderConfig, stop: StopRequest) -> PlacedClicks:
    """Return the clicks, which fit the model and the checkpoint that the run resumes from, and the placement
    of the tables.
    """
    data = prepare_clicks(config, stop)
    tables = data.tables
    for problem in check_tables(config, list(tables)):
        raise problem
    placements = place(config, data)
    check_held_out(data, evaluates=config.eval.every is not None)
    if (checkpoint := checkpoint_to_resume(config.checkpoint.resume, config.run.folder)) is not None:
        check_fits(checkpoint, config.shape(tables), tables, config.optim, data.identity)
    return data, placements


def train_recommender_rank(
    config: RecommenderConfig, data: PlacedClicks | None, stop: StopRequest, quiet: bool
) -> dict[str, Any]:
    """Train as one rank of the job that RANK and WORLD_SIZE describe.

    Args:
        data: the clicks and the placement; None to prepare them on one rank of each machine.

    Returns:
        `TrainResult.as_dict`.
    """
    from stretto.run.train.trainer import train_rank

    def open_data() -> PlacedClicks:
        """Prepare the clicks on one rank of each machine, and place the tables on rank 0. Collective."""
        from stretto.engine.parallel.control import gather_json, run_on_first

        if data is not None:
            return data
        clicks = prepare_clicks(config) if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
        gather_json(None)  # barrier: the clicks are prepared
        clicks = clicks or prepare_clicks(config, quiet=True)
        return clicks, from_json(run_on_first(lambda: to_json(place(config, clicks))))

    def open_run(data: PlacedClicks, device: torch.device, cleanup: ExitStack, log: Log) -> OpenedRun:
        """Build this rank's model, and fill it from the checkpoint that the run resumes from. Collective."""
        from stretto.recommender.train.engine import Recommender
        from stretto.recommender.train.task import ClickProgress, ClickRun
        from stretto.run.train.checkpointing import find_checkpoint
        from stretto.run.train.task import OpenedRun
        from stretto.run.train.trainer import Trainer

        clicks, placements = data
        tables = clicks.tables
        checkpoint = find_checkpoint(config.checkpoint.resume, config.run.folder, log)
        if checkpoint is not None:
            check_fits(checkpoint, config.shape(tables), tables, config.optim, clicks.identity)
        folder = table_folder(config.tables.folder, config.run.folder, cleanup)
        recommender = Recommender(config, tables, placements, device, fresh=checkpoint is None, folder=folder)
        cleanup.callback(recommender.close)
        task, progress = ClickRun(recommender, clicks, placements, device), ClickProgress()
        cleanup.callback(task.close)
        if checkpoint is not None:
            task.log = log
            progress = task.restore(checkpoint)
        placement = file_text(config.layout, placements)
        return OpenedRun(
            task=task,
            progress=progress,
            checkpoint=checkpoint,
            write_files=lambda run: _write_transform(run, placement, clicks.path),
            log_format=SAMPLES,
            trainer=Trainer,
        )

    keep_freed_memory()
    return train_rank(config, layout=None, open_data=open_data, open_run=open_run, stop=stop, quiet=quiet)


def _write_transform(run: Path, placement: str, clicks: Path | None) -> None:
    """Write what scoring needs besides checkpoints: the placement, and the log's transform if it exists."""
    (run / "placement.yaml").write_text(placement, encoding="utf-8")
    for name in (TRANSFORM, VOCABULARY) if clicks is not None else ():
        if clicks is not None and (clicks / name).is_file():
            written = run / f"{name}.new"
            shutil.copyfile(clicks / name, written)
            written.replace(run / name)


def table_folder(configured: str | None, run: Path, cleanup: ExitStack) -> Path:
    """Return the folder for tables on disk, in which each rank makes its own files; removed at the end if it
    is empty and not named in the config.

    Args:
        configured: `tables.folder`.
        run: the run's folder.
    """
    if configured:
        return Path(configured).expanduser()
    folder = run / "tables"

    def remove_empty() -> None:
        with suppress(OSError):
            folder.rmdir()

    cleanup.callback(remove_empty)
    return folder


RECOMMENDER = JobType[RecommenderConfig, PlacedClicks](
    preload=PRELOAD,
    ranks=lambda config: config.layout.ranks,
    check=lambda config, world, devices: check(config, world=world, devices=devices),
    prepare=_prepare,
    print_start=lambda config, data, quiet: print(
        banner(config, *data), file=sys.stderr if quiet else sys.stdout, flush=True
    ),
    run_rank=train_recommender_rank,
    folder=lambda config: config.run.folder,
    check_fresh=lambda config: check_fresh(config.checkpoint.resume, config.run),
    elastic=Elastic(
        choices=lambda config: config.rank_choices,
        for_ranks=lambda config, ranks, _: config.for_ranks(ranks),
    ),
)


# of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 1 << 25


def keep_freed_memory() -> bool:
    """Make this process keep freed memory instead of returning pages and faulting them in at every step.

    Blocks of 32 MiB and more are still returned. The process stays at its peak size.

    Returns:
        True if the system supports it: glibc on Linux.
    """
    if sys.platform != "linux":
        return False
    try:
        set_ = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(set_(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)) and bool(set_(_TRIM_THRESHOLD, 2**31 - 1))
