"""Schedules that alternate forwards and backwards after a warm-up of forwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from stretto.errors import StrettoError
from stretto.layout.placement import linear, loop
from stretto.program.action import Action, ActionKind, actions
from stretto.program.program import Program
from stretto.program.schedules.list_scheduling import tighten
from stretto.program.schedules.registry import register

_T = TypeVar("_T")


@register("1f1b", "one forward, one backward: holds at most p - rank microbatches", common=True, early=True)
def one_f_one_b(ranks: int, microbatches: int) -> Program:
    """PipeDream-flush: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.2.

    The bubble of GPipe, but rank r holds at most p - r microbatches: after p - 1 - r forwards, the time that
    the first gradient takes to arrive, each forward follows a backward that frees the same memory.
    """
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards = actions(rank, ActionKind.F, microbatches)
        backwards = actions(rank, ActionKind.B, microbatches)
        orders.append(alternate(forwards, backwards, warmup=ranks - 1 - rank))
    return Program(
        name="1f1b",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 1},
    )


@register(
    "interleaved",
    "1f1b with several chunks a rank, group microbatches through each chunk in turn",
    common=True,
    early=True,
    groups=(2,),  # a message may then take as long as a group's forwards
)
def interleaved(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Program:
    """Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.

    Divides the bubble of 1F1B by the number of chunks, but multiplies the messages by it and holds more
    activations. Microbatches are cut into groups of `group` (the last may be short); a group goes through
    chunk 0, then chunk 1, ...; backwards take the same order with the chunks reversed.

    Warm-up is 2 (p-1-rank) + (chunks-1) group forwards. The second term takes the first group to the last
    chunk. The first is a round trip: p-1-rank forwards until the last rank has the group's first microbatch,
    and as many until its gradient is back. The warm-up bounds the activations held. With one chunk this is
    1F1B with twice the warm-up.

    A last group shorter than p breaks the textbook order: the next chunk's first forward is due before its
    input can have arrived, and for p >= 4 some such programs deadlock (p=4, m=5, 3 chunks). The order is then
    written as if the last group were full, and the missing microbatches are left out; ranks run later actions
    instead of waiting, within the same bound of activations.

    Args:
        chunks: stages per rank, placed in a loop.
        group: microbatches that go through a chunk before the next chunk; by default p, the smallest number
            for which a group's first output is back at rank 0 when the group has left it. Larger groups hold
            more activations.

    Raises:
        StrettoError: `group` is outside [p, m] ([m, p] when there are fewer microbatches than ranks).
    """
    size = group_size(ranks, microbatches, group)
    short = 0 < microbatches % size < ranks
    padded = -(-microbatches // size) * size if short else microbatches
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        stages = range(rank, chunks * ranks, ranks)
        forwards = in_groups(stages, ActionKind.F, microbatches, size, padded)
        backwards = in_groups(stages[::-1], ActionKind.B, microbatches, size, padded)
        warmup = 2 * (ranks - 1 - rank) + (chunks - 1) * size
        orders.append(tuple(filter(None, alternate(forwards, backwards, warmup))))
    placement = loop(ranks, chunks)
    if short:
        limits = [(chunks - 1) * size + 2 * (ranks - 1 - r) + 1 for r in range(ranks)]
        orders[:] = tighten(placement, orders, limits).orders
    return Program(
        name="interleaved",
        placement=placement,
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": chunks, "group": size},
    )


@register("1f1b-eager", "1f1b with twice the warm-up: transfers are hidden, at most 2 (p-rank) - 1 held")
def one_f_one_b_eager(ranks: int, microbatches: int) -> Program:
    """Zhuang et al. 2023, "On optimizing the communication of model parallelism" (eager 1F1B).

    1F1B with a warm-up of 2 (p-1-rank) forwards: a result has a whole action's time to reach its neighbour,
    so transfers overlap with compute. It trades up to twice the activations for that.
    """
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards = actions(rank, ActionKind.F, microbatches)
        backwards = actions(rank, ActionKind.B, microbatches)
        orders.append(alternate(forwards, backwards, warmup=2 * (ranks - 1 - rank)))
    return Program(
        name="1f1b-eager",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 1},
    )


def in_groups(
    stages: Sequence[int], kind: ActionKind, microbatches: int, size: int, padded: int
) -> list[Action | None]:
    """Return actions of a kind, `size` microbatches of each stage in turn, with None for microbatches beyond
    the last.
    """
    rows = [[*actions(stage, kind, microbatches), *[None] * (padded - microbatches)] for stage in stages]
    return [
        action for start in range(0, padded, size) for row in rows for action in row[start : start + size]
    ]


def alternate(forwards: Sequence[_T], backwards: Sequence[_T], warmup: int) -> tuple[_T, ...]:
    """Return `warmup` forwards, then forwards and backwards alternately, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def group_size(ranks: int, microbatches: int, group: int | None) -> int:
    """Return the size of a group: as given, by default p, at most the number of microbatches."""
    low, high = sorted((ranks, microbatches))
    if group is not None and not low <= group <= high:
        raise StrettoError(
            f"group is {group}, must be {low} to {high} with {ranks} ranks and {microbatches} microbatches",
            hint=f"nearest is group={min(max(group, low), high)}",
        )
    return min(ranks if group is None else group, microbatches)
