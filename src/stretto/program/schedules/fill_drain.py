"""Schedules without backwards."""

from __future__ import annotations

from stretto.layout.placement import linear, loop
from stretto.program.action import Action, Kind
from stretto.program.program import Program
from stretto.program.schedules.registry import register


# 1f1b with idle ranks
@register("naive", "one microbatch at a time: forward through all ranks, then backward", planned=False)
def naive(ranks: int, microbatches: int) -> Program:
    """One rank works at any time; holds one microbatch."""
    orders = tuple(
        tuple(Action(rank, kind, i) for i in range(microbatches) for kind in (Kind.F, Kind.B))
        for rank in range(ranks)
    )
    return Program(
        name="naive",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=orders,
        parameters={"chunks": 1},
    )


@register("gpipe", "all forwards, then all backwards")
def gpipe(ranks: int, microbatches: int) -> Program:
    """Huang et al. 2019, "GPipe", section 2.3; backwards in ascending order. Holds every microbatch."""
    orders = tuple(
        tuple(Action(rank, kind, i) for kind in (Kind.F, Kind.B) for i in range(microbatches))
        for rank in range(ranks)
    )
    return Program(
        name="gpipe",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=orders,
        parameters={"chunks": 1},
    )


@register("bfs", "gpipe with several chunks a rank, one chunk after the other: weights gathered once a pass")
def bfs(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """Lamy-Poirier 2023, "Breadth-first pipeline parallelism". Holds every microbatch.

    Backwards go from the last chunk to the first, and in each from the last microbatch to the first.
    """
    orders = tuple(
        (
            *(Action(c * ranks + rank, Kind.F, i) for c in range(chunks) for i in range(microbatches)),
            *(
                Action(c * ranks + rank, Kind.B, i)
                for c in reversed(range(chunks))
                for i in reversed(range(microbatches))
            ),
        )
        for rank in range(ranks)
    )
    return Program(
        name="bfs",
        placement=loop(ranks, chunks),
        microbatches=microbatches,
        orders=orders,
        parameters={"chunks": chunks},
    )


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
