"""One pass over a log: every rank predicts its samples, and the first writes the probabilities in order."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stretto.engine.parallel.control import run_on_all
from stretto.recommender.serve.log import ClickLog
from stretto.recommender.serve.output import open_output
from stretto.recommender.train.clicks import rank_slice
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.evaluate import Quality
from stretto.run.evaluate.progress import PassBar
from stretto.run.launch.stop import Stopped, StopRequest


def score(
    recommender: Recommender,
    log: ClickLog,
    out: str | None,
    *,
    job: int,
    stop: StopRequest,
    bar: PassBar,
) -> dict[str, Any]:
    """Predict a whole log. Collective. Memory does not grow with the log, except for the distinct logits
    that AUC counts (see `Quality`).

    Args:
        out, job: as `open_output` takes them; only the first rank writes.

    Returns:
        Rows, malformed lines, ids and those unknown to training, seconds, and with labels what
        `QualityResult.as_dict` gives.

    Raises:
        Stopped: a rank was asked to stop; nothing is left of the output.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    quality = Quality() if log.labelled else None
    counts = np.zeros(4, np.int64)  # rows, malformed: of all ranks; ids, unknown ids: of this rank
    started = time.perf_counter()
    config = recommender.config
    dtype = "float64" if config.train.dtype == "float64" else "float32"
    output = run_on_all(lambda: open_output(out if rank == 0 else None, dtype, job))
    with output:
        for part in log.parts(config.batch.global_size, rank, world):
            check_stop(stop, recommender)
            rows = int(part.good.sum())
            probabilities = np.full(len(part.good), np.nan)
            if part.batch is not None:
                logits = recommender.predict(part.batch)
                if quality is not None:
                    quality.add(logits, part.batch.labels)
                probabilities[part.good] = _gathered(logits.sigmoid(), rows)
            output.add(probabilities)
            counts += (rows, len(part.good) - rows, part.ids, part.unknown)
            rate = counts[0] / (time.perf_counter() - started)
            bar.show(part.done, f"{counts[0]:,} rows, {rate:,.0f} rows/s")
    seconds = time.perf_counter() - started
    shared = torch.from_numpy(counts[2:].copy()).to(recommender.tables.device)
    if world > 1:
        dist.all_reduce(shared)
    ids, unknown = shared.tolist()
    result: dict[str, Any] = {
        "rows": int(counts[0]),
        "malformed": int(counts[1]),
        "ids": ids,
        "unknown_ids": unknown,
        "seconds": seconds,
        "rows_per_s": int(counts[0]) / seconds,
    }
    if quality is not None:
        measured = quality.result().as_dict()
        result |= {name: value for name, value in measured.items() if name != "samples"}
    return result


def check_stop(stop: StopRequest, recommender: Recommender) -> None:
    """Raise Stopped on all ranks if any was asked to stop. Collective."""
    flag = torch.tensor(int(stop.signal is not None), device=recommender.tables.device)
    if dist.get_world_size() > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if flag.item():
        raise Stopped("stopped by a signal")


def _gathered(values: Tensor, rows: int) -> NDArray[np.float64]:
    """Return the values [n] of all ranks, the `rank_slice`s of `rows` rows, on every rank: float64 [rows]."""
    world = dist.get_world_size()
    if world == 1:
        return values.double().cpu().numpy()
    sizes = [stop - start for start, stop in (rank_slice(rows, rank, world) for rank in range(world))]
    # float64 holds every float32, so nothing is rounded
    padded = values.new_zeros(max(sizes), dtype=torch.float64)
    padded[: len(values)] = values
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]).cpu().numpy()
