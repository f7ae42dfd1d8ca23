"""Schedules that fill the pipeline and drain it: all forwards before the backwards, or forwards alone."""

from __future__ import annotations

from itertools import chain

from stretto.layout.placement import linear, loop
from stretto.program.action import Action, ActionKind, actions
from stretto.program.program import Program
from stretto.program.schedules.registry import register

_PASSES = ActionKind.F, ActionKind.B


# 1f1b with idle ranks
@register("naive", "one microbatch at a time: forward through all ranks, then backward", planned=False)
def naive(ranks: int, microbatches: int) -> Program:
    """Model parallelism without pipelining (Huang et al. 2019, "GPipe", figure 2b): one rank works at a time.

    The slowest schedule, with the smallest memory: one microbatch. A reference for the others.
    """
    orders = tuple(
        tuple(chain.from_iterable(zip(*(actions(rank, kind, microbatches) for kind in _PASSES), strict=True)))
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
    """Huang et al. 2019, "GPipe", section 2.3 and figure 2c.

    Bubble (p - 1) / (m + p - 1) of the step, as 1F1B, but every rank holds all m microbatches. Backwards come
    in ascending order, so that the first gradients reach the first rank as early as possible.
    """
    orders = tuple(
        tuple(chain.from_iterable(actions(rank, kind, microbatches) for kind in _PASSES))
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
    """Lamy-Poirier 2023, "Breadth-first pipeline parallelism".

    A chunk runs all its microbatches before the next chunk starts, so with sharded parameters (ZeRO-3) each
    stage is gathered once per pass, and its gradients are reduced while the next chunk works. The price is
    memory: every microbatch is held. Backwards go from the last chunk to the first, and within a chunk from
    the last microbatch, whose activations are the most recent, to the first.

    Args:
        chunks: stages per rank, placed in a loop.
    """
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards, backwards = (
            [action for c in range(chunks) for action in actions(c * ranks + rank, kind, microbatches)]
            for kind in _PASSES
        )
        orders.append((*forwards, *reversed(backwards)))
    return Program(
        name="bfs",
        placement=loop(ranks, chunks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": chunks},
    )


@register("forward-only", "forwards alone, for evaluation and generation")
def forward_only(ranks: int, microbatches: int, chunks: int = 1) -> Program:
    """The forward half of an interleaved schedule (Narayanan et al. 2021, section 2.2), for evaluation.

    Groups of p microbatches go through chunk 0, then chunk 1, ...; the last group has p to 2p - 1. A group of
    at least p returns to rank 0 just as that rank finishes the chunk before, so no rank waits between its
    first and its last forward, and the outputs of a chunk are kept for one group only.

    Args:
        chunks: stages per rank, placed in a loop.
    """
    starts = [ranks * group for group in range(max(1, microbatches // ranks))]
    ends = [*starts[1:], microbatches]
    orders = tuple(
        tuple(
            action
            for start, end in zip(starts, ends, strict=True)
            for chunk in range(chunks)
            for action in actions(chunk * ranks + rank, ActionKind.F, microbatches)[start:end]
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
