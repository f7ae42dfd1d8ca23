"""Asynchronous schedules: weights are updated within the step, so gradients are those of older weights.

A backward uses the weight version of its forward, which is in `Program.versions`. Nothing waits for the end
of a step, so a program is a window of `steps` steps: the pipeline fills at its start, drains at its end, and
is full in between. With k steps of m microbatches on p ranks its bubble is (p-1) / (km + p-1) if all ranks
take equally long.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from stretto.errors import StrettoError
from stretto.layout.placement import linear
from stretto.program.action import Action, ActionKind, actions
from stretto.program.program import Program
from stretto.program.schedules.registry import register


@register("pipedream", "asynchronous 1f1b: each rank updates after every backward, and stashes weights")
def pipedream(ranks: int, microbatches: int, vertical_sync: bool = False, steps: int = 1) -> Program:
    """Narayanan et al. 2019, "PipeDream", sections 3.2 and 3.3 (weight stashing, vertical sync).

    The only bubble is start-up and drain, at the price of stale gradients and stashed weights. A forward uses
    the newest weights of its rank, which lack the updates of the p-1-rank microbatches before it; rank r
    stashes p-r versions.

    Args:
        microbatches: microbatches of one training step.
        vertical_sync: on every rank a microbatch uses the version that was the newest on rank 0 when it
            entered, which lacks the updates of p-1 microbatches on all ranks alike.
        steps: training steps between filling and draining the pipeline.
    """
    if not isinstance(vertical_sync, bool):
        raise StrettoError(
            f"vertical_sync is {vertical_sync!r}, must be true or false",
            hint="nearest is vertical_sync=false",
        )
    total = steps * microbatches
    ends = set(range(total))
    orders = [
        _updating(rank, [max(0, i - (ranks - 1 - rank)) for i in range(total)], ends) for rank in range(ranks)
    ]
    delays = [ranks - 1 if vertical_sync else ranks - 1 - rank for rank in range(ranks)]
    return Program(
        name="pipedream",
        placement=linear(ranks),
        microbatches=total,
        orders=tuple(orders),
        parameters={"chunks": 1, "vertical_sync": int(vertical_sync)},
        versions=tuple(tuple(max(0, i - delay) for i in range(total)) for delay in delays),
        steps=steps,
    )


@register("pipedream-2bw", "1f1b across batches, two versions of the weights: gradients one update late")
def pipedream_2bw(ranks: int, microbatches: int, group: int | None = None, steps: int = 1) -> Program:
    """Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.1 (2BW).

    PipeDream with two weight versions instead of p - rank. A batch is `group` microbatches of a training step
    (the last of a step may be short); each rank updates after a batch's last backward. Batch t uses the
    weights after t - 1 updates, so every gradient is exactly one update late on all ranks.

    Those weights must exist when the batch's first forward starts, which needs at least p - 1 microbatches
    per batch (the paper has at least p). After a batch of s < p - 1, the next one's forwards wait for the
    previous update: all ranks are idle for the time of p - 1 - s microbatches, at the end of every step if
    only its last batch is short.

    Args:
        microbatches: microbatches of one training step.
        group: microbatches of a batch, that is, between updates; default p.
        steps: training steps between filling and draining the pipeline.

    Raises:
        StrettoError: `group` exceeds the number of microbatches.
    """
    if group is not None and group > microbatches:
        raise StrettoError(
            f"group is {group}, must be 1 to {microbatches} with {microbatches} microbatches",
            hint=f"nearest is group={microbatches}",
        )
    size = min(ranks, microbatches) if group is None else group
    total = steps * microbatches
    firsts = [step * microbatches + at for step in range(steps) for at in range(0, microbatches, size)]
    batch = [
        step * -(-microbatches // size) + i // size for step in range(steps) for i in range(microbatches)
    ]
    needed = [firsts[t - 1] if t else 0 for t in batch]  # backwards that the version of a forward contains
    ends = {first - 1 for first in firsts[1:]} | {total - 1}
    orders = [
        _updating(rank, [max(i - (ranks - 1 - rank), needed[i]) for i in range(total)], ends)
        for rank in range(ranks)
    ]
    return Program(
        name="pipedream-2bw",
        placement=linear(ranks),
        microbatches=total,
        orders=tuple(orders),
        parameters={"chunks": 1, "group": size},
        versions=(tuple(max(0, t - 1) for t in batch),) * ranks,
        steps=steps,
    )


def _updating(stage: int, before: Sequence[int], ends: Container[int]) -> tuple[Action, ...]:
    """Return the order of a stage: forward i comes right after `before[i]` backwards (non-decreasing), and an
    update follows the backward of each microbatch in `ends`.
    """
    order, done = list[Action](), 0
    f, b, u = (actions(stage, ActionKind(kind), len(before)) for kind in "FBU")
    for i, backwards in enumerate([*before, len(before)]):
        for mb in range(done, backwards):
            order.append(b[mb])
            if mb in ends:
                order.append(u[mb])
        done = max(done, backwards)
        order += f[i : i + 1]
    return tuple(order)
