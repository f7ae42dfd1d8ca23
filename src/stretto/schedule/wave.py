"""Waves: the model goes down and up the ranks several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.layout.placement import zigzag
from stretto.schedule.action import Action, Kind
from stretto.schedule.listing import Played, greedy, replay, tighten
from stretto.schedule.memory import peak_held
from stretto.schedule.program import Program
from stretto.schedule.registry import register
from stretto.schedule.wave_block import one_wave, several_waves


@register("hanayo", "1f1b over a zigzag of waves: smaller bubble with each wave, p microbatches held")
def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Program:
    """Liu et al. 2023, "Hanayo: harnessing wave-like pipeline parallelism", section 3: 2 waves chunks a rank.

    Two orders are made, both of which hold p microbatches at most, and the shorter is used when a backward
    lasts two forwards: ranks take the oldest backward that is ready, or else the oldest forward,
    which is best for about p microbatches; or they repeat a block without gaps, which is best for many, as
    its bubble does not grow.
    """
    chunks = 2 * waves
    placement = zigzag(ranks, chunks)
    limits = [chunks * ranks] * ranks
    program = Program("hanayo", placement, microbatches, (), {"chunks": chunks, "waves": waves})
    found: list[Played] = []
    if microbatches > ranks:
        orders = one_wave(ranks, microbatches) if waves == 1 else several_waves(ranks, microbatches, waves)
        block = replace(program, orders=orders)
        if max(peak_held(block)) <= limits[0]:  # that of several waves may hold more for p <= 2
            found.append(tighten(placement, block.orders, limits))
    # with so many microbatches the block is the shorter one, as all of 2 <= p <= 16, waves <= 4 have it
    if not found or microbatches < 4 * waves * ranks:
        # with equal times waves meet without gaps, with unequal ones they shift against each other
        even = greedy(placement, _wishes(placement, microbatches), ranks, backward=1).orders
        found += (replay(placement, even), tighten(placement, even, limits))
    return replace(program, orders=min(found, key=lambda played: played.makespan).orders)


def _wishes(placement: Sequence[int], microbatches: int) -> list[list[Action]]:
    """Per rank, backwards before forwards, the oldest microbatch first, the end of the model first."""
    held = [[s for s, rank in enumerate(placement) if rank == r] for r in range(max(placement) + 1)]
    return [
        [
            Action(stage, kind, i)
            for kind in (Kind.B, Kind.F)
            for i in range(microbatches)
            for stage in reversed(stages)
        ]
        for stages in held
    ]
