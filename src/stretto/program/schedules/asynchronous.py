"""Asynchronous schedules: weights are updated within the step, so gradients are of older weights.

A backward uses the weight version of its forward; `Program.versions` says which that is.
"""

from __future__ import annotations

from stretto.errors import StrettoError
from stretto.layout.placement import linear
from stretto.program.action import Action, Kind
from stretto.program.program import Program
from stretto.program.schedules.one_f_one_b import alternate
from stretto.program.schedules.registry import register


@register("pipedream", "asynchronous 1f1b: each rank updates after every backward, and stashes weights")
def pipedream(ranks: int, microbatches: int, vertical_sync: bool = False) -> Program:
    """Narayanan et al. 2019, "PipeDream", sections 3.2 and 3.3 (weight stashing, vertical sync).

    There is no bubble but start-up and drain, for stale gradients and stashed weights. A forward uses the
    newest weights of its rank, which lack the updates of the p-1-rank microbatches before it; rank r stashes
    p-r versions.

    Args:
        vertical_sync: a microbatch uses on every rank the version that was the newest on rank 0 when it
            entered: the updates of p-1 microbatches are missing everywhere, alike on all ranks.
    """
    if not isinstance(vertical_sync, bool):
        raise StrettoError(
            f"vertical_sync is {vertical_sync!r}, must be true or false",
            hint="nearest is vertical_sync=false",
        )
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        order = _one_f_one_b(rank, microbatches, warmup=ranks - 1 - rank)
        orders.append(_updating(order, ends=set(range(microbatches))))
    delays = [ranks - 1 if vertical_sync else ranks - 1 - rank for rank in range(ranks)]
    versions = tuple(tuple(max(0, i - delay) for i in range(microbatches)) for delay in delays)
    parameters = {"chunks": 1, "vertical_sync": int(vertical_sync)}
    return Program(
        name="pipedream",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters=parameters,
        versions=versions,
    )


@register("pipedream-2bw", "1f1b across batches, two versions of the weights: gradients one update late")
def pipedream_2bw(ranks: int, microbatches: int, group: int | None = None) -> Program:
    """Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.1 (2BW).

    PipeDream with two weight versions instead of p - rank. A batch is `group` microbatches (the last may be
    short); each rank updates after a batch's last backward. Batch t uses the weights after t - 1 updates, so
    every gradient is exactly one update late on all ranks. Those weights must exist when the batch's first
    forward starts: with fewer than p - 1 microbatches a batch, the warm-up is at most `group` forwards.

    Args:
        group: microbatches of a batch, that is between updates; default p.

    Raises:
        StrettoError: `group` is more than there are microbatches.
    """
    if group is not None and group > microbatches:
        raise StrettoError(
            f"group is {group}, must be 1 to {microbatches} with {microbatches} microbatches",
            hint=f"nearest is group={microbatches}",
        )
    size = min(ranks, microbatches) if group is None else group
    ends = {*range(size - 1, microbatches, size), microbatches - 1}
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        order = _one_f_one_b(rank, microbatches, warmup=min(ranks - 1 - rank, size))
        orders.append(_updating(order, ends))
    versions = (tuple(max(0, i // size - 1) for i in range(microbatches)),) * ranks
    parameters = {"chunks": 1, "group": size}
    return Program(
        name="pipedream-2bw",
        placement=linear(ranks),
        microbatches=microbatches,
        orders=tuple(orders),
        parameters=parameters,
        versions=versions,
    )


def _one_f_one_b(stage: int, microbatches: int, warmup: int) -> tuple[Action, ...]:
    forwards = [Action(stage, Kind.F, i) for i in range(microbatches)]
    backwards = [Action(stage, Kind.B, i) for i in range(microbatches)]
    return alternate(forwards, backwards, warmup)


def _updating(order: tuple[Action, ...], ends: set[int]) -> tuple[Action, ...]:
    """The order with an update after the backward of each microbatch in `ends`."""
    updated: list[Action] = []
    for action in order:
        updated.append(action)
        if action.kind is Kind.B and action.microbatch in ends:
            updated.append(Action(action.stage, Kind.UPDATE, action.microbatch))
    return tuple(updated)
