"""Layouts of a few ranks and their measured steps, which `plan_here.py` compares with predictions.

Each layout is assembled on persistent ranks, trained for a few steps on random tokens, and closed again.
Rounds over all layouts interleave, so that drift of the machine is not attributed to a layout.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import barrier, on_ranks

from stretto.run.calibrate.host import random_step_done, replica_of
from stretto.run.config.check import find_problems
from stretto.run.config.job import job_of
from stretto.run.config.load import load
from stretto.run.config.schema import TrainConfig
from stretto.run.train.rank_model import RankModel

RANKS = 4
# (tp, cp, dp, pp) with this product
_EACH = (4, 2, 1)
SIZES = [s for s in product(_EACH, _EACH, _EACH, _EACH) if prod(s) == RANKS]


@dataclass(frozen=True)
class Laid:
    """One layout: its name and the config fields that define it."""

    name: str
    fields: tuple[str, ...]

    def config(self, path: Path) -> TrainConfig:
        """The benchmark's config with this layout."""
        return load(str(path), [*self.fields, "train.device=cpu", "train.threads=1"])


def layouts(path: Path) -> list[Laid]:
    """The legal candidates: all sizes of axes, each with several microbatches; then schedules,
    modes of data parallelism, ways of context and sequence parallelism, recomputation.
    """
    return [layout for layout in _looked_at() if not find_problems(layout.config(path))]


def _looked_at() -> list[Laid]:
    layouts = list[Laid]()
    for size in SIZES:
        layouts += [_laid(size, micro) for micro in (1, 4, 8)]
    for size in ((1, 1, 1, 4), (1, 1, 2, 2), (2, 1, 1, 2)):
        layouts.append(_laid(size, 4, "gpipe", schedule="gpipe"))
        layouts.append(_laid(size, 4, "zb-h1", schedule="zb-h1"))
    layouts.append(_laid((1, 1, 2, 2), 4, "interleaved", schedule="interleaved", chunks=2))
    for mode in ("zero1", "zero2", "zero3"):
        layouts.append(_laid((1, 1, 4, 1), 4, mode, dp=mode))
        layouts.append(_laid((1, 1, 2, 2), 4, mode, dp=mode))
    for size in ((4, 1, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)):
        layouts.append(_laid(size, 4, "sp", sp=True))
    layouts.append(_laid((1, 4, 1, 1), 4, "ulysses", context="ulysses"))
    layouts.append(_laid((1, 1, 4, 1), 4, "full", recompute="full"))
    layouts.append(_laid((1, 1, 2, 2), 4, "full", recompute="full"))
    return layouts


def _laid(size: tuple[int, int, int, int], micro: int, word: str = "", **more: Any) -> Laid:
    axes = dict(zip(("tp", "cp", "dp", "pp"), size, strict=True))
    fields = [*(f"layout.{axis}={n}" for axis, n in axes.items()), f"batch.micro_size={micro}"]
    named = {
        "schedule": "schedule.name",
        "chunks": "schedule.chunks",
        "dp": "dp.mode",
        "context": "layout.context",
        "recompute": "recompute.mode",
        "sp": "layout.sequence_parallel",
    }
    fields += [f"{named[key]}={str(value).lower()}" for key, value in more.items()]
    sizes = " ".join(f"{axis}{n}" for axis, n in axes.items() if n > 1)
    return Laid(" ".join(filter(None, (sizes, f"mb{micro}", word))), tuple(fields))


# ------------------------------------------------------------------ measuring


def measured(
    layouts: Sequence[Laid], path: Path, out: Path, rounds: int, steps: int, limit: float
) -> dict[str, list[dict[str, float]]]:
    """Seconds per step of each layout in each round; layouts already in `out` are not measured again.

    Args:
        out: JSON lines of layout, round, seconds, cpu seconds of all ranks.
        limit: seconds after which no further layout is begun.
    """
    done = {(row["layout"], row["round"]) for row in _rows(out)}
    todo = [
        (at, layout.name, layout.config(path))
        for at in range(rounds)
        for layout in layouts
        if (layout.name, at) not in done
    ]
    if todo:
        on_ranks(RANKS, _measure, todo, steps, out, limit)
    by_layout = defaultdict[str, list[dict[str, float]]](list)
    for row in _rows(out):
        by_layout[row["layout"]].append(row)
    return dict(by_layout)


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def _measure(todo: Sequence[tuple[int, str, TrainConfig]], steps: int, out: Path, limit: float) -> None:
    """The main function of each rank."""
    begun = time.monotonic()
    for at, name, config in todo:
        late = torch.tensor([time.monotonic() - begun > limit])
        dist.broadcast(late, 0)
        if late:
            return
        with replica_of(job_of(config)) as replica:
            timed = _timed(replica, steps)
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({"layout": name, "round": at, **timed}) + "\n")


def _timed(replica: RankModel, steps: int) -> Mapping[str, float]:
    walls, cpus = list[float](), list[float]()
    for step in range(steps + 1):
        barrier()
        cpu, start = time.process_time(), time.perf_counter()
        random_step_done(replica, step)
        barrier()
        walls.append(time.perf_counter() - start)
        spent = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
        dist.all_reduce(spent)
        cpus.append(float(spent))
    return {"seconds": median(walls[1:]), "best": min(walls[1:]), "cpu": median(cpus[1:])}
