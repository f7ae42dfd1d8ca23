"""Orders of torch's own schedule classes, made without ranks."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


def stages(ranks: int, chunks: int, rank: int = 0) -> list[Any]:
    """Stand-ins for the stages of one rank, loop placement."""
    total = ranks * chunks
    return [
        SimpleNamespace(
            num_stages=total,
            group_size=ranks,
            group_rank=rank,
            stage_index=chunk * ranks + rank,
            submod=nn.Identity(),
            is_first=chunk * ranks + rank == 0,
            is_last=chunk * ranks + rank == total - 1,
        )
        for chunk in range(chunks)
    ]


def multi(kind: type[PipelineScheduleMulti], ranks: int, chunks: int, microbatches: int) -> Any:
    """torch's schedule object of a class with several stages a rank."""
    return kind(stages(ranks, chunks), microbatches)


def single(kind: type[PipelineScheduleSingle], ranks: int, microbatches: int) -> Any:
    """torch's schedule object of a class with one stage a rank."""
    return kind(stages(ranks, 1)[0], microbatches)


def dump(orders: dict[int, list[Any]]) -> str:
    """The CSV that torch's `_dump_csv` writes: idle slots are empty cells."""
    out = io.StringIO()
    csv.writer(out).writerows(orders[rank] for rank in sorted(orders))
    return out.getvalue()
