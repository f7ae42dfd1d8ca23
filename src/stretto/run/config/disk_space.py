"""Whether what is kept in files has a place, and room there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from stretto.errors import Problem
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import lasting_bytes
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig


def scratch(config: TrainConfig) -> Iterator[Problem]:
    """The folder of `dp.path`, where something goes to; of a job that is legal in all else."""
    dp = config.dp
    if dp.path is None or "nvme" not in (dp.offload, dp.offload_parameters):
        return
    folder = Path(dp.path).expanduser()
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        yield Problem("dp.path", dp.path, f"{there} is a file", "name another folder")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Problem("dp.path", dp.path, f"{there} cannot be written to", "name another folder")
    elif (free := shutil.disk_usage(there).free) < (needed := _needed(config)):
        required, left = f"{needed / 2**30:.3g} GiB", f"{free / 2**30:.3g} GiB"
        yield Problem(
            "dp.path",
            dp.path,
            f"the ranks of this machine keep {required} there, and {left} are free",
            "a folder on another disk, or dp.offload=cpu",
        )


def _needed(config: TrainConfig) -> int:
    """Bytes that the ranks of this machine keep in files: those that torchrun started here, else all."""
    job = memory_of(job_of(config))
    world = config.layout.to_layout().world
    each = [lasting_bytes(job, rank).disk for rank in range(job.program.ranks)]
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or world)
    return sum(each) * here // len(each)
