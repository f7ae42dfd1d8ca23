"""Schedules that alternate forwards and backwards after a warm-up of forwards."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import StrettoError
from stretto.layout.placement import linear, loop
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program
from stretto.program.schedules.list_scheduling import tighten
from stretto.program.schedules.registry import register


@register("1f1b", "one forward, one backward: holds at most p - rank microbatches", common=True, early=True)
def one_f_one_b(ranks: int, microbatches: int) -> Program:
    """PipeDream-flush: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.2.

    The bubble of GPipe, but rank r holds at most p - r microbatches: after p - 1 - r forwards, the time that
    the first gradient takes to arrive, each forward follows a backward that frees the same memory.
    """
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards = [Action(rank, ActionKind.F, i) for i in range(microbatches)]
        backwards = [Action(rank, ActionKind.B, i) for i in range(microbatches)]
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
    table = [
        (chunk, i)
        for start in range(0, padded, size)
        for chunk in range(chunks)
        for i in range(start, min(start + size, padded))
    ]
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards = [Action(c * ranks + rank, ActionKind.F, i) for c, i in table]
        backwards = [Action((chunks - 1 - c) * ranks + rank, ActionKind.B, i) for c, i in table]
        warmup = 2 * (ranks - 1 - rank) + (chunks - 1) * size
        order = alternate(forwards, backwards, warmup)
        orders.append(tuple(a for a in order if a.microbatch is not None and a.microbatch < microbatches))
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
        forwards = [Action(rank, ActionKind.F, i) for i in range(microbatches)]
        backwards = [Action(rank, ActionKind.B, i) for i in range(microbatches)]
        orders.append(alternate(forwards, backwards, warmup=2 * (ranks - 1 - rank)))
    return Program(
        name="1f1b-eager",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters={"chunks": 1},
    )


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """Return `warmup` forwards, then forwards and backwards alternately, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
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
