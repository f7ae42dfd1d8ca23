"""The orders of ranks as arrays, against the lowered program."""

from __future__ import annotations

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.job.program import complete
from stretto.program import Action, ActionKind, lower, names, options, schedule, send_releases
from stretto.program.action import TRANSFER
from stretto.program.rank_orders import EVENTS, GRADIENT_FREED, NUMBERS, OUTPUT_FREED, ProgramOrders
from stretto.program.schedules.traits import is_searched


@given(
    st.sampled_from([name for name in names() if not is_searched(name)]),
    st.integers(1, 8),
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(0, 6),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_actions_and_releases_are_those_of_the_lowered_program(
    name: str, ranks: int, microbatches: int, size: int, lookahead: int, gathered: bool
) -> None:
    sizes = {"chunks": size, "waves": size, "group": size * ranks}
    try:
        program = schedule(
            name, ranks, microbatches, **{key: sizes[key] for key in options(name) if key in sizes}
        )
    except StrettoError:
        return  # no such program
    program = complete(program, gathered=gathered)
    lowered, orders = lower(program, lookahead=lookahead), ProgramOrders(program, lookahead)
    numbers = NUMBERS | {ActionKind.SEND_F: OUTPUT_FREED, ActionKind.SEND_B: GRADIENT_FREED}
    for rank in range(ranks):
        order, stages = orders.of(rank), program.stages_of(rank)
        tied = ActionKind.REDUCE_TIED
        stays = [a for a in lowered.orders[rank] if a.kind not in TRANSFER and a.kind is not tied]
        assert list(order.actions) == stays
        freed = dict[Action, list[Action]]()
        for send, point in send_releases(lowered, rank).items():
            if point is not None:
                freed.setdefault(point, []).append(send)
        number = {
            a: EVENTS * stages.index(a.stage) + numbers[a.kind] for a in (*stays, *chain(*freed.values()))
        }
        expected = [(*sorted(map(number.__getitem__, freed.get(a, ()))), number[a]) for a in stays]
        assert list(order.events) == [*chain(*expected)]


def test_buffers_and_flights_of_1f1b_by_hand() -> None:
    """Rank 1 of 2 does F0 B0 F1 B1 F2 B2; all but the last receive are posted at the start."""
    last = ProgramOrders(schedule("1f1b", 2, 3)).of(1)
    assert last.receives == ((3, 0),)
    assert last.flights == (1,)
    assert last.actions[-1] == Action(1, ActionKind.REDUCE_GRAD)
    # with a look-ahead of one action a receive is posted when the one before has been consumed
    assert ProgramOrders(schedule("1f1b", 2, 3), 1).of(1).receives == ((2, 0),)
