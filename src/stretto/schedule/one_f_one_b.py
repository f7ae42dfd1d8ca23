"""Schedules that alternate forwards and backwards after a warm-up of forwards."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import StrettoError
from stretto.layout.placement import linear, loop
from stretto.schedule.action import Action, Kind
from stretto.schedule.listing import list_schedule
from stretto.schedule.program import Program
from stretto.schedule.registry import register


@register("1f1b", "one forward, one backward: holds at most p - rank microbatches")
def one_f_one_b(ranks: int, microbatches: int) -> Program:
    """PipeDream-flush: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training"."""
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards = [Action(rank, Kind.F, i) for i in range(microbatches)]
        backwards = [Action(rank, Kind.B, i) for i in range(microbatches)]
        orders.append(alternate(forwards, backwards, warmup=ranks - 1 - rank))
    return Program("1f1b", linear(ranks), microbatches, tuple(orders), {"chunks": 1})


@register("interleaved", "1f1b with several chunks a rank, group microbatches through each chunk in turn")
def interleaved(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Program:
    """Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2.

    Microbatches are cut into groups of `group` (default p, the last may be short); a group goes through chunk
    0, then chunk 1, ...; backwards take the same order with the chunks reversed. Warm-up is 2 (p-1-rank) +
    (chunks-1) group forwards, which bounds the activations held. With one chunk this is 1F1B with twice the
    warm-up.

    A last group shorter than p breaks the textbook order: the next chunk's first forward is wanted before its
    input can be there, and for p >= 4 some such programs never end (p=4, m=5, 3 chunks). There the same
    forward and backward sequences, under the same bound, are merged by list scheduling instead.

    Raises:
        StrettoError: `group` is outside [p, m] ([m, p] when there are fewer microbatches than ranks).
    """
    size = _group_size(ranks, microbatches, group)
    table = [
        (chunk, i)
        for start in range(0, microbatches, size)
        for chunk in range(chunks)
        for i in range(start, min(start + size, microbatches))
    ]
    forwards = [[Action(c * ranks + r, Kind.F, i) for c, i in table] for r in range(ranks)]
    backwards = [[Action((chunks - 1 - c) * ranks + r, Kind.B, i) for c, i in table] for r in range(ranks)]
    warmups = [2 * (ranks - 1 - r) + (chunks - 1) * size for r in range(ranks)]
    placement = loop(ranks, chunks)
    if 0 < microbatches % size < ranks:
        orders = list_schedule(placement, forwards, backwards, [w + 1 for w in warmups])
    else:
        orders = [alternate(f, b, w) for f, b, w in zip(forwards, backwards, warmups, strict=True)]
    return Program("interleaved", placement, microbatches, tuple(orders), {"chunks": chunks, "group": size})


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def _group_size(ranks: int, microbatches: int, group: int | None) -> int:
    """The group in use: as given, p by default, never more than there are microbatches."""
    low, high = sorted((ranks, microbatches))
    if group is not None and not low <= group <= high:
        raise StrettoError(
            f"group is {group}, must be {low} to {high} with {ranks} ranks and {microbatches} microbatches",
            hint=f"nearest is group={min(max(group, low), high)}",
        )
    return min(ranks if group is None else group, microbatches)
