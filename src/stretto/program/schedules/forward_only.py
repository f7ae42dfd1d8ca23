"""Schedules without backwards."""

from __future__ import annotations

from stretto.layout.placement import loop
from stretto.program.action import Action, Kind
from stretto.program.program import Program
from stretto.program.schedules.registry import register


@register("forward-only", "forwards alone, for evaluation and generation")
def forward_only(ranks: int, microbatches: int, chunks: int = 1) -> Program:
    """Groups of p microbatches go through chunk 0, then chunk 1, ...; p to 2p - 1 of them in the last group.

    A group of p or more comes back to rank 0 when that has just finished the chunk before, so that no rank
    waits between its first and its last forward, and outputs of a chunk are kept for one group only.
    """
    starts = [ranks * group for group in range(max(1, microbatches // ranks))]
    ends = [*starts[1:], microbatches]
    orders = tuple(
        tuple(
            Action(chunk * ranks + rank, Kind.F, i)
            for start, end in zip(starts, ends, strict=True)
            for chunk in range(chunks)
            for i in range(start, end)
        )
        for rank in range(ranks)
    )
    placement = loop(ranks, chunks)
    return Program(
        name="forward-only",
        placement=placement,
        microbatches=microbatches,
        orders=orders,
        parameters={"chunks": chunks},
        trains=False,
    )
