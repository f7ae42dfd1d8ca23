"""The checker accepts exactly the programs that a machine with real queues completes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from brute_force import completes
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.schedule import Action, Kind, Program, ScheduleError, check, lower, schedule
from stretto.schedule.text import parse_action


def program(placement: tuple[int, ...], microbatches: int, *orders: str, lowered: bool = False) -> Program:
    rows = tuple(tuple(map(parse_action, order.split())) for order in orders)
    return Program("test", placement, microbatches, rows, lowered=lowered)


def split(given: Program) -> Program:
    """Every B as I, with its W two actions later."""
    orders: list[tuple[Action, ...]] = []
    for order in given.orders:
        out: list[Action] = []
        late: list[Action] = []
        for action in order:
            if action.kind is Kind.B:
                out.append(action._replace(kind=Kind.I))
                late.append(action._replace(kind=Kind.W))
            else:
                out.append(action)
            if len(late) > 2:
                out.append(late.pop(0))
        orders.append((*out, *late))
    return replace(given, orders=tuple(orders))


PLAIN = [
    schedule("naive", 3, 2),
    schedule("gpipe", 3, 2),
    schedule("1f1b", 3, 3),
    schedule("1f1b", 1, 2),
    split(schedule("1f1b", 2, 3)),
    schedule("interleaved", 2, 3, chunks=2),
    program((0, 1, 1, 0), 1, "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"),
]
TIED = {3: ((0, 2), (1, 2)), 2: ((0, 1),), 4: ((0, 3), (1, 2, 3))}
LOWERED = [lower(p, TIED.get(p.stages, ())) for p in PLAIN] + [lower(p, lookahead=4) for p in PLAIN]
SEEDS = PLAIN + LOWERED


def mutate(given: Program, random: Random) -> Program:
    """One swap, drop, duplicate, move or shuffle."""
    orders = [list(order) for order in given.orders]
    row = random.choice([order for order in orders if len(order) > 1])
    at = random.randrange(len(row))
    match random.randrange(7):
        case 0:
            to = random.randrange(len(row))
            row[at], row[to] = row[to], row[at]
        case 1:
            to = min(at + 1, len(row) - 1)
            row[at], row[to] = row[to], row[at]
        case 2:
            del row[at]
        case 3:
            random.choice([row, random.choice(orders)]).insert(random.randrange(len(row)), row[at])
        case 4:
            to = max(0, at + random.randrange(-3, 4))
            row.insert(to, row.pop(at))
        case 5:
            part = row[at : at + 4]
            random.shuffle(part)
            row[at : at + 4] = part
        case _:
            stage, kind, i = row[at]
            if kind is Kind.B:
                row[at : at + 1] = [Action(stage, Kind.I, i), Action(stage, Kind.W, i)]
            else:
                row[at] = Action(stage, kind, None if i is None else random.randrange(given.microbatches))
    return replace(given, orders=tuple(map(tuple, orders)))


def accepts(given: Program) -> bool:
    try:
        check(given)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("given", SEEDS)
def test_what_schedules_and_lowering_give_is_accepted(given: Program):
    assert check(given).ranks == given.ranks
    assert completes(given)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SEEDS), st.integers(1, 3), st.randoms(use_true_random=False))
def test_mutated_programs(given: Program, mutations: int, random: Random):
    for _ in range(mutations):
        given = mutate(given, random)
    assert accepts(given) == completes(given, random.randrange(1000))


def test_thousands_of_mutated_programs():
    """A fixed campaign, so that both verdicts are known to be well covered."""
    random, verdicts = Random(7), Counter[bool]()
    for _ in range(4000):
        mutated = random.choice(SEEDS)
        for _ in range(random.choice([1, 1, 2, 3])):
            mutated = mutate(mutated, random)
        verdict = completes(mutated, random.randrange(1000))
        assert accepts(mutated) == verdict, [" ".join(map(str, order)) for order in mutated.orders]
        verdicts[verdict] += 1
    assert min(verdicts.values()) > 800


# --- what it says


def fault(given: Program) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(given)
    return caught.value.message


def test_a_deadlock_is_shown_as_the_circle_of_waits():
    given = program((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert fault(given) == (
        "deadlock: rank 0 waits at 0B0 for 1B0, which rank 1 reaches only after 1F1; "
        "rank 1 waits at 1F1 for 0F1, which rank 0 reaches only after 0B0"
    )
    assert "rank 0 waits at 0B0 for 1SEND_B0, which rank 1 reaches only after 1F1" in fault(lower(given))


def test_a_circle_does_not_name_ranks_that_only_wait_for_it():
    given = program((0, 1, 2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    said = fault(given)
    assert "rank 0" not in said
    assert "rank 1 waits at 1B0" in said
    assert "rank 2 waits at 2F1" in said


def test_reductions_of_tied_parameters_in_two_orders():
    good = lower(program((0, 1), 1, "0F0 0B0", "1F0 1B0"))
    first, second = good.orders
    ties = [Action(0, Kind.REDUCE_TIED)], [Action(1, Kind.REDUCE_TIED)]
    tied = replace(good, orders=((*first, *ties[0]), (*second, *ties[1])), tied=((0, 1),))
    check(tied)
    assert "1REDUCE_TIED 0 times, must be 1" in fault(replace(tied, orders=((*first, *ties[0]), second)))

    given = lower(schedule("interleaved", 2, 1, chunks=2), tied=((0, 1), (2, 3)))
    check(given)
    zero = (*given.orders[0][:-2], given.orders[0][-1], given.orders[0][-2])
    assert fault(replace(given, orders=(zero, given.orders[1]))) == (
        "deadlock: rank 0 waits at 2REDUCE_TIED for 3REDUCE_TIED, "
        "which rank 1 reaches only after 1REDUCE_TIED; "
        "rank 1 waits at 1REDUCE_TIED for 0REDUCE_TIED, which rank 0 reaches only after 2REDUCE_TIED"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (program((0, 1), 1, "0F0 0B0", "1F0"), "rank 1 never does 1B0"),
        (program((0, 1), 1, "0F0 0I0", "1F0 1B0"), "rank 0 never does 0W0"),
        (program((0, 1), 1, "0F0 0B0 1B0", "1F0"), "rank 0 action 2 is 1B0, but stage 1 is on rank 1"),
        (program((0,), 1, "0F0 0F0 0B0"), "rank 0 action 1 is 0F0, which is in the program twice"),
        (program((0,), 1, "0B0 0F0"), "rank 0 action 0 is 0B0, before 0F0 on the same rank"),
        (program((0,), 1, "0F0 0W0 0I0"), "rank 0 action 1 is 0W0, before 0I0 on the same rank"),
        (program((0,), 1, "0F0 0B0 0I0 0W0"), "rank 0 action 2 is 0I0, but 0B0 does that work already"),
        (program((0,), 1, "0F1 0B1"), "rank 0 action 0 is 0F1, but microbatches are 0 to 0"),
        (program((0,), 1, "1F0 1B0"), "rank 0 action 0 is 1F0, but stages are 0 to 0"),
        (program((2,), 1, "0F0 0B0"), "placement is (2,), must name ranks 0 to 0"),
        (
            program((0, 0), 1, "1F0 0F0 1B0 0B0"),
            "rank 0 waits at 1F0 for 0F0, which it reaches only after 1F0",
        ),
        (program((0, 1), 1, "0F0 0SEND_F0 0B0", "1F0 1B0"), "but the program is not lowered"),
        (
            program((0,), 1, "0F0 0B0", lowered=True),
            "rank 0 has 0REDUCE_GRAD 0 times, must have it once",
        ),
        (
            program((0,), 1, "0F0 0REDUCE_GRAD 0B0", lowered=True),
            "rank 0 has 0REDUCE_GRAD before 0B0",
        ),
        (
            program(
                (0, 1),
                1,
                "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
                "1F0 1RECV_F0 1B0 1SEND_B0 1REDUCE_GRAD",
                lowered=True,
            ),
            "rank 1 waits at 1F0 for 1RECV_F0, which it reaches only after 1F0",
        ),
        (
            program(
                (0, 1),
                1,
                "0F0 0RECV_B0 0B0 0REDUCE_GRAD",
                "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
                lowered=True,
            ),
            "rank 1 posts 1RECV_F0, but rank 0 has no 0SEND_F0",
        ),
        (
            program(
                (0, 1),
                1,
                "0F0 0SEND_F0 0SEND_B0 0RECV_B0 0B0 0REDUCE_GRAD",
                "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
                lowered=True,
            ),
            "rank 0 action 2 is 0SEND_B0, but there is no stage -1",
        ),
    ],
)
def test_faults_name_rank_and_action(given: Program, says: str):
    assert says in fault(given)


def test_receives_out_of_the_order_of_the_sends():
    given = lower(schedule("gpipe", 2, 2))
    first = [str(a) for a in given.orders[1]]
    a, b = first.index("1RECV_F0"), first.index("1RECV_F1")
    order = list(given.orders[1])
    order[a], order[b] = order[b], order[a]
    assert fault(replace(given, orders=(given.orders[0], tuple(order)))) == (
        "message 0 in direction F from rank 0 to rank 1 is 0SEND_F0, but the receive for it is 1RECV_F1"
    )


def test_the_report_counts():
    report = check(schedule("interleaved", 2, 4, chunks=2))
    assert (report.ranks, report.stages, report.actions, report.transfers) == (2, 4, 32, 24)
    assert report.peak_held == (5, 3)
    assert report.peak_activations == (2.5, 1.5)
    assert check(split(schedule("1f1b", 2, 3))).peak_held == (3, 3)
