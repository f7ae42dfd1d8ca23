"""Wave schedules: the model goes down and back up the ranks several times (Hanayo)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from operator import itemgetter

from stretto.layout.placement import zigzag
from stretto.program.action import Action, ActionKind, actions
from stretto.program.memory import peak_held
from stretto.program.program import Program
from stretto.program.replay import Costs, simulate
from stretto.program.schedules.list_scheduling import greedy, tighten
from stretto.program.schedules.registry import register

_UNITS = 6  # slots of a rank's work on one microbatch: F (1 slot) and B (2) of two stages


def one_wave(ranks: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return orders that repeat a block of one microbatch without gaps; they hold less than p microbatches.

    A microbatch's actions, in the order of their dependencies, each take the first free slot of their rank. A
    backward takes two slots, the first an even one; in order not to split such pairs, the second forward of a
    rank takes the slot next to the first.
    """
    placement = zigzag(ranks, 2)
    stages = range(len(placement))
    free = [[True] * _UNITS for _ in range(ranks)]
    timed: list[list[tuple[int, int, ActionKind]]] = [[] for _ in range(ranks)]
    at = 0
    for stage, kind in [(s, ActionKind.F) for s in stages] + [(s, ActionKind.B) for s in reversed(stages)]:
        rank = placement[stage]
        while not _fits(free[rank], at % _UNITS, kind):
            at += 1
        timed[rank].append((at, stage, kind))
        for _ in range(1 if kind is ActionKind.F else 2):
            free[rank][at % _UNITS] = False
            at += 1
    orders: list[tuple[Action, ...]] = []
    for slots in timed:
        times = [range(at, at + _UNITS * microbatches, _UNITS) for at, _, _ in slots]
        orders.append(_in_time(times, [actions(stage, kind, microbatches) for _, stage, kind in slots]))
    return tuple(orders)


def _in_time(times: Iterable[Iterable[int]], rows: Iterable[Iterable[Action]]) -> tuple[Action, ...]:
    """Return the actions of all rows, each with its time in its row of `times`, in the order of times."""
    timed = sorted(zip(chain.from_iterable(times), chain.from_iterable(rows), strict=True))
    return tuple(action for _, action in timed)


def _fits(free: list[bool], slot: int, kind: ActionKind) -> bool:
    """True if an action may start in a slot of its rank's block."""
    if kind is ActionKind.B:
        return slot % 2 == 0 and free[slot] and free[slot + 1]
    half_full = [at for at in range(_UNITS) if free[at] and not free[at ^ 1]]
    return slot in half_full if half_full else free[slot]


def several_waves(ranks: int, microbatches: int, waves: int) -> tuple[tuple[Action, ...], ...]:
    """Return orders that repeat a block of two microbatches without gaps, for two waves or more.

    Time is in slots of two forwards or one backward, so the block has 6 * waves slots. Passes down the ranks
    (F of even chunks, B of odd ones) reach rank r in slots of r's parity, passes up the ranks in the others,
    so the two never claim the same slot. Passes in the same direction collide only if they start in the same
    slot of the block; so each leg, the pass of one chunk through its ranks, starts at the first slot that no
    other leg has.
    """
    starts = _legs(ranks, waves)
    orders: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        times: list[range] = []  # in units of one forward, of the even or the odd microbatches
        rows: list[list[Action]] = []
        for chunk in range(2 * waves):
            along = rank if chunk % 2 == 0 else ranks - 1 - rank
            for odd in (0, 1):
                forward = 2 * (starts[chunk, ActionKind.F, 0] + along) + odd
                backward = 2 * (starts[chunk, ActionKind.B, odd] + ranks - 1 - along)
                for kind, at in ((ActionKind.F, forward), (ActionKind.B, backward)):
                    rows.append(actions(chunk * ranks + along, kind, microbatches)[odd::2])
                    times.append(range(at, at + 12 * waves * len(rows[-1]), 12 * waves))
        orders.append(_in_time(times, rows))
    return tuple(orders)


def _legs(ranks: int, waves: int) -> dict[tuple[int, ActionKind, int], int]:
    """Return the start slot of each leg: (chunk, F, 0) for both microbatches, (chunk, B, 0 or 1) for each."""
    used: set[tuple[bool, int]] = set()

    def start(earliest: int, down: bool) -> int:
        at = earliest
        while (at - (0 if down else ranks)) % 2 or (down, at % (6 * waves)) in used:
            at += 1
        used.add((down, at % (6 * waves)))
        return at

    starts: dict[tuple[int, ActionKind, int], int] = {}
    at = 0
    for chunk in range(2 * waves):
        starts[chunk, ActionKind.F, 0] = start(at, chunk % 2 == 0)
        at = starts[chunk, ActionKind.F, 0] + ranks
    ends = [at, at]
    for chunk in reversed(range(2 * waves)):
        for odd in (0, 1):
            starts[chunk, ActionKind.B, odd] = start(ends[odd], chunk % 2 == 1)
            ends[odd] = starts[chunk, ActionKind.B, odd] + ranks
    return starts


@register("hanayo", "1f1b over a zigzag of waves: smaller bubble with each wave, p microbatches held")
def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Program:
    """Liu et al. 2023, "Hanayo: harnessing wave-like pipeline parallelism", section 3.

    The bubble shrinks with every wave, as with more copies of the weights in Chimera but with one copy; the
    number of messages grows with the waves. Two orders are built, both of which hold at most p microbatches,
    and the shorter one is used, with a backward as long as two forwards: either ranks take the oldest
    backward that is ready, or else the oldest forward, which is best for about p microbatches; or they repeat
    a block without gaps, which is best for many, since its bubble does not grow.

    Args:
        waves: number of passes of the model down and up the ranks, which hold 2 * waves chunks.
    """
    chunks = 2 * waves
    placement = zigzag(ranks, chunks)
    limits = [chunks * ranks] * ranks
    program = Program(
        name="hanayo",
        placement=placement,
        microbatches=microbatches,
        orders=(),
        parameters={"chunks": chunks, "waves": waves},
    )
    candidates: list[tuple[float, tuple[tuple[Action, ...], ...]]] = []
    if microbatches > ranks:
        orders = one_wave(ranks, microbatches) if waves == 1 else several_waves(ranks, microbatches, waves)
        block = replace(program, orders=orders)
        if max(peak_held(block)) <= limits[0]:  # the block of several waves may hold more for p <= 2
            tight = tighten(placement, block.orders, limits)
            candidates.append((tight.makespan, tight.orders))
    # with more microbatches the block is the shorter one: checked for all 2 <= p <= 16, waves <= 4
    if not candidates or microbatches < 4 * waves * ranks:
        # with equal times of F and B waves interlock without gaps; with unequal ones they drift apart
        # per rank, backwards before forwards, the oldest microbatch first, the end of the model first
        preferences: list[list[Action]] = []
        for rank in range(ranks):
            stages = program.stages_of(rank)[::-1]
            for_kinds = (
                zip(*(actions(stage, kind, microbatches) for stage in stages), strict=True)
                for kind in (ActionKind.B, ActionKind.F)
            )
            preferences.append([action for rows in for_kinds for row in rows for action in row])
        even = greedy(placement, preferences, ranks, backward=1).orders
        equal = Costs(per_stage=[(1.0, 1.0, 1.0)] * program.stages)
        candidates.append((simulate(replace(program, orders=even), equal).makespan, even))
        tight = tighten(placement, even, limits)
        candidates.append((tight.makespan, tight.orders))
    return replace(program, orders=min(candidates, key=itemgetter(0))[1])
