"""The checker's errors for wrong programs, and its report of right ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mutations import pair, pipedream, program, split, two_ways

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, ScheduleError, check, lower, schedule


def fault(program: Program, transport: str = "rendezvous") -> str:
    with pytest.raises(ScheduleError) as caught:
        check(program, transport)
    return caught.value.message


def test_a_deadlock_is_shown_as_the_circle_of_waits():
    example = program((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    assert fault(example) == (
        "deadlock: rank 0 waits at 0B0 for 1B0, which rank 1 reaches only after 1F1; "
        "rank 1 waits at 1F1 for 0F1, which rank 0 reaches only after 0B0"
    )
    assert "rank 0 waits at 0B0 for 1SEND_B0, which rank 1 reaches only after 1F1" in fault(lower(example))


def test_a_circle_does_not_name_ranks_that_only_wait_for_it():
    example = program((0, 1, 2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    message = fault(example)
    assert "rank 0" not in message
    assert "rank 1 waits at 1B0" in message
    assert "rank 2 waits at 2F1" in message


def test_reductions_of_tied_parameters_in_two_orders():
    good = lower(program((0, 1), 1, "0F0 0B0", "1F0 1B0"))
    first, second = good.orders
    ties = [Action(0, ActionKind.REDUCE_TIED)], [Action(1, ActionKind.REDUCE_TIED)]
    tied = replace(good, orders=((*first, *ties[0]), (*second, *ties[1])), tied=((0, 1),))
    check(tied)
    assert "1REDUCE_TIED 0 times, must be 1" in fault(replace(tied, orders=((*first, *ties[0]), second)))

    example = lower(schedule("interleaved", 2, 1, chunks=2), tied=((0, 1), (2, 3)))
    check(example)
    zero = (*example.orders[0][:-2], example.orders[0][-1], example.orders[0][-2])
    assert fault(replace(example, orders=(zero, example.orders[1]))) == (
        "deadlock: rank 0 waits at 2REDUCE_TIED for 3REDUCE_TIED, "
        "which rank 1 reaches only after 1REDUCE_TIED; "
        "rank 1 waits at 1REDUCE_TIED for 0REDUCE_TIED, which rank 0 reaches only after 2REDUCE_TIED"
    )


@pytest.mark.parametrize(
    ("faulty", "says"),
    [
        (program((0, 1), 1, "0F0 0B0", "1F0"), "rank 1 never does 1B0"),
        (program((0, 1), 1, "0F0 0I0", "1F0 1B0"), "rank 0 never does 0W0"),
        (program((0, 1), 1, "0F0 0B0 1B0", "1F0"), "rank 0 action 2 is 1B0, but stage 1 is on rank 1"),
        (program((0,), 1, "0F0 0F0 0B0"), "rank 0 action 1 is 0F0, which is in the program twice"),
        (program((0,), 1, "0B0 0F0"), "rank 0 action 0 is 0B0, before 0F0 on the same rank"),
        (program((0,), 1, "0F0 0W0 0I0"), "rank 0 action 1 is 0W0, before 0I0 on the same rank"),
        (program((0,), 1, "0F0 0B0 0I0 0W0"), "rank 0 action 2 is 0I0, but 0B0 does that work already"),
        (program((0,), 1, "0F0 0I0 0W0 0B0"), "rank 0 action 3 is 0B0, but 0I0 does that work already"),
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
def test_faults_name_rank_and_action(faulty: Program, says: str):
    assert says in fault(faulty)


def test_receives_out_of_the_order_of_the_sends():
    program = lower(schedule("gpipe", 2, 2))
    first = [str(a) for a in program.orders[1]]
    a, b = first.index("1RECV_F0"), first.index("1RECV_F1")
    order = list(program.orders[1])
    order[a], order[b] = order[b], order[a]
    assert fault(replace(program, orders=(program.orders[0], tuple(order)))) == (
        "message 0 in direction F from rank 0 to rank 1 is 0SEND_F0, but the receive for it is 1RECV_F1"
    )


def test_the_report_counts():
    report = check(schedule("interleaved", 2, 4, chunks=2))
    assert (report.ranks, report.stages, report.actions, report.transfers) == (2, 4, 32, 24)
    assert report.peak_held == (5, 3)
    assert report.peak_activations == (2.5, 1.5)
    assert check(split(schedule("1f1b", 2, 3))).peak_held == (3, 3)


# --- copies


def test_copies_of_the_weights():
    program = two_ways(4)
    assert check(program).transfers == 8
    assert check(lower(program, ((0, 1),))).stages == 4
    assert check(lower(two_ways(1))).transfers == 2  # the second copy has no work, and joins the sums


def test_a_microbatch_that_changes_copies():
    text = ("0F0 3F1 3B1 0B0", "2F1 1F0 1B0 2B1")
    check(program((0, 1, 1, 0), 2, *text, copies=2))
    assert fault(program((0, 1, 1, 0), 2, text[0], "2F1 1F1 1B1 2B1", copies=2)) == (
        "rank 1 action 1 is 1F1, but microbatch 1 goes through copy 1 of the weights"
    )
    assert "rank 0 never does 0F0" in fault(program((0, 1, 1, 0), 2, "3F1 3B1", "2F1 2B1", copies=2))


def test_copies_are_summed():
    program = lower(two_ways())
    assert (
        fault(replace(program, tied=program.tied[:1]))
        == "copies (1, 3) of stage 1 are no tied set: their gradients differ"
    )


# --- pairs

PAIRED = program(
    (0, 1),
    3,
    "0F0 0F1 0F2 0B0 0B1 0B2",
    "1F0 1F1 1B0 1F2 1B1 1B2",
    pairs=frozenset({pair("0F2 0B0"), pair("1F2 1B1")}),
)


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (("0F0 0B0",), "the pair of 0F0 and 0B0 cannot be: the backward needs the forward"),
        (("0F0 0B1",), "the pair of 0F0 and 0B1 is not in the program: on no rank does one follow the other"),
        (("0F1 1B0",), "the pair of 0F1 and 1B0 is not in the program"),
        (("0F1 0F2",), "the pair of 0F1 and 0F2 is not a forward and a backward"),
        (("0F7 0B0",), "the pair of 0F7 and 0B0 is not in the program"),
        (("0F2 0B0", "0F2 0B1"), "the pair of 0F2 and 0B1 has an action of another pair"),
    ],
)
def test_invalid_pairs(pairs: tuple[str, ...], says: str):
    check(PAIRED)
    check(lower(PAIRED))
    assert says in fault(replace(PAIRED, pairs=frozenset(map(pair, pairs))))


def test_only_transfers_and_offloads_stand_within_a_pair():
    program = lower(PAIRED, lookahead=0)
    assert "0F2 0SEND_F2 0RECV_B0 0B0" in " ".join(map(str, program.orders[0]))
    at = program.orders[0].index(Action(0, ActionKind.B, 0))
    tied = (*program.orders[0][:at], Action(0, ActionKind.UNSHARD), *program.orders[0][at:])
    assert "0UNSHARD, but" not in fault(replace(program, orders=(tied, program.orders[1])))
    reduce = (*program.orders[0][:at], Action(0, ActionKind.REDUCE_GRAD), *program.orders[0][at:-1])
    assert fault(replace(program, orders=(reduce, program.orders[1]))) == (
        "rank 0 has 0REDUCE_GRAD within the pair of 0F2 and 0B0"
    )


def test_a_pair_that_waits_for_itself_as_a_block():
    example = program((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    check(example)
    assert fault(replace(example, pairs=frozenset({pair("0F1 0B0")}))) == (
        "with each pair as one block: deadlock: rank 0 waits at 0F1 for 1B0, "
        "which rank 1 reaches only after 1F1; "
        "rank 1 waits at 1F1 for 0F1, which rank 0 reaches only after 0F1"
    )


# --- weight versions


def test_pipedream_has_p_minus_rank_versions_and_delays_of_one_less():
    for ranks in (1, 2, 3, 5):
        report = check(pipedream(ranks, 12))
        assert report.weight_versions == tuple(ranks - r for r in range(ranks))
        for r, row in enumerate(report.weight_delays):
            assert row == tuple(min(i, ranks - 1 - r) for i in range(12))
        assert check(lower(pipedream(ranks, 12))).weight_delays == report.weight_delays
    assert check(pipedream(4, 2)).weight_versions == (2, 2, 2, 1)


def test_versions_and_delays_of_the_asynchronous_schedules():
    for name, options, versions, delays in [
        ("pipedream", {}, (4, 3, 2, 1), [3, 2, 1, 0]),
        ("pipedream", {"vertical_sync": True}, (4, 4, 4, 4), [3, 3, 3, 3]),
        ("pipedream-2bw", {}, (2, 2, 2, 2), [1, 1, 1, 1]),
    ]:
        report = check(lower(schedule(name, 4, 16, **options)))
        assert report.weight_versions == versions
        assert (
            [row[-1] for row in report.weight_delays] == delays == [max(row) for row in report.weight_delays]
        )


def test_synchronous_programs_have_one_version_and_no_delay():
    report = check(schedule("1f1b", 2, 3))
    assert report.weight_versions == (1, 1)
    assert report.weight_delays == ((0, 0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    ("faulty", "says"),
    [
        (program((0,), 1, "0F0 0B0 0U0"), "rank 0 action 2 is 0U0, but the program has no weight versions"),
        (program((0,), 1, "0F0 0B0", versions=((0,),)), "rank 0 has no U of stage 0 after the gradient of 0"),
        (program((0,), 1, "0F0 0U0 0B0 0U0", versions=((0,),)), "rank 0: 0U0 has no gradient to apply"),
        (program((0,), 1, "0F0 0B0 0U0 0U0", versions=((0,),)), "rank 0: 0U0 has no gradient to apply"),
        (program((0,), 1, "0F0 0B0 0U1", versions=((0,),)), "0U1 names microbatch 1, but the last gradient"),
        (
            program((0,), 2, "0F0 0F1 0B0 0U0 0B1 0U1", versions=((0, 1),)),
            "rank 0: 0F1 uses version 1 of the weights, but there are 0 to 0",
        ),
        (
            program((0,), 3, "0F0 0B0 0U0 0F1 0F2 0B1 0B2 0U2", versions=((0, 1, 0),)),
            "rank 0: 0F2 uses version 0 of the weights after a forward that used 1",
        ),
        (
            program((0,), 1, "0F0 0B0 0U0", versions=((0, 0),)),
            "versions has rows of lengths [2], must have 1",
        ),
        (
            program((0,), 1, "0F0 0B0 0U0", versions=((0,),), lowered=True),
            "rank 0 has no 0REDUCE_GRAD right before 0U0",
        ),
        (
            program((0,), 1, "0F0 0REDUCE_GRAD 0B0 0REDUCE_GRAD 0U0", versions=((0,),), lowered=True),
            "rank 0 has 0REDUCE_GRAD, but no U of stage 0 right after it",
        ),
        (
            replace(lower(pipedream(2, 2)), tied=((0, 1),)),
            "the program has tied set (0, 1) and weights that change within the step",
        ),
    ],
)
def test_versions_that_are_not_there(faulty: Program, says: str):
    assert says in fault(faulty)


# --- kept activations, gathered parameters


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("0RECOMPUTE0 0F0 0B0 0F1 0B1", "rank 0 has 0RECOMPUTE0 before 0F0"),
        ("0F0 0F1 0RECOMPUTE0 0B1 0B0", "rank 0 has 0B1 between 0RECOMPUTE0 and the backward it is for"),
        ("0F0 0B0 0RECOMPUTE0 0F1 0B1", "rank 0 has 0RECOMPUTE0 after the backward that it is for"),
        ("0F0 0F1 0RECOMPUTE0 0RECOMPUTE1 0B0 0B1", "0RECOMPUTE1 between 0RECOMPUTE0 and the backward"),
        ("0F0 0RECOMPUTE0 0B0 0F1 0RECOMPUTE0 0B1", "0RECOMPUTE0, which is in the program twice"),
        ("0F0 0F1 0RECOMPUTE0 0I0 0RECOMPUTE0 0W0 0B1", "which is in the program twice"),
        ("0F0 0F1 0OFFLOAD0 0B0 0B1", "rank 0 has 0OFFLOAD0, but no 0RELOAD0"),
        ("0F0 0F1 0RELOAD0 0B0 0B1", "rank 0 has 0RELOAD0, but no 0OFFLOAD0"),
        ("0OFFLOAD0 0F0 0F1 0RELOAD0 0B0 0B1", "rank 0 has 0OFFLOAD0 before 0F0"),
        ("0F0 0RELOAD0 0F1 0OFFLOAD0 0B0 0B1", "rank 0 has 0RELOAD0 before 0OFFLOAD0"),
        ("0F0 0F1 0OFFLOAD0 0I0 0RELOAD0 0W0 0B1", "rank 0 has 0I0 before 0RELOAD0"),
        ("0F0 0F1 0OFFLOAD0 0RECOMPUTE0 0RELOAD0 0B0 0B1", "rank 0 has 0RECOMPUTE0 before 0RELOAD0"),
        ("0F0 0UNSHARD 0F1 0B0 0B1 0RESHARD", "action 0 is 0F0, but the parameters of stage 0 are released"),
        ("0UNSHARD 0F0 0RESHARD 0F1 0UNSHARD 0B0 0B1 0RESHARD", "is 0F1, but the parameters of stage 0 are"),
        (
            "0UNSHARD 0F0 0UNSHARD 0F1 0B0 0B1 0RESHARD",
            "action 2 is 0UNSHARD, but the parameters of stage 0 are gathered",
        ),
        (
            "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD 0RESHARD",
            "action 6 is 0RESHARD, but the parameters of stage 0 are released",
        ),
        ("0UNSHARD 0F0 0F1 0B0 0B1", "rank 0 has no 0RESHARD after its last 0UNSHARD"),
        (
            "0UNSHARD 0F0 0F1 0RESHARD 0RECOMPUTE0 0UNSHARD 0B0 0B1 0RESHARD",
            "0RECOMPUTE0, but the parameters",
        ),
        ("0F0 0F1 0OFFLOAD 0B0 0B1", "rank 0 action 2 is 0OFFLOAD, but microbatches are 0 to 1"),
    ],
)
def test_activations_and_parameters_that_are_not_there(order: str, says: str):
    rows = tuple(
        Action(0, ActionKind.OFFLOAD) if text == "0OFFLOAD" else program((0,), 2, text).orders[0][0]
        for text in order.split()
    )
    assert says in fault(Program(name="test", placement=(0,), microbatches=2, orders=(rows,)))


def test_versions_are_not_sharded():
    program = pipedream(1, 1)
    order = (Action(0, ActionKind.UNSHARD), *program.orders[0], Action(0, ActionKind.RESHARD))
    assert "parameters with versions are not sharded" in fault(replace(program, orders=(order,)))


# --- transports


def test_a_deadlock_of_blocking_transfers():
    program = lower(schedule("1f1b", 2, 2))
    check(program)
    check(program, "buffered")
    assert "rank 0 waits at 0RECV_B0 for 1SEND_B0, which rank 1 reaches only after 1RECV_F" in fault(
        program, "blocking"
    )


def test_a_deadlock_of_transfers_that_share_a_communicator():
    program = lower(schedule("gpipe", 2, 2))
    assert fault(program, "paired") == (
        "deadlock: rank 0's transfers with rank 1 wait at 0RECV_B0 for 1SEND_B0, "
        "which rank 1's transfers with rank 0 reach only after 1RECV_F1; "
        "rank 1's transfers with rank 0 wait at 1RECV_F1 for 0SEND_F1, "
        "which rank 0's transfers with rank 1 reach only after 0RECV_B0"
    )
    assert "rank 0's transfers wait at 0RECV_B0 for 1SEND_B0" in fault(program, "batched")
    for transport in ("paired", "batched"):
        check(lower(schedule("gpipe", 2, 2), lookahead=0), transport)


def test_messages_of_both_directions_share_a_sequence():
    # rank 0 sends an activation and a gradient to rank 1, which takes them the other way round
    example = program(
        (0, 1, 0, 1),
        2,
        "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 0F1 0SEND_F1 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0 "
        "2RECV_F1 2F1 2SEND_F1 2RECV_B1 2B1 2SEND_B1 0RECV_B1 0B1 0REDUCE_GRAD 2REDUCE_GRAD",
        "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 1RECV_F1 1B0 1SEND_B0 1F1 1SEND_F1 "
        "3RECV_F1 3F1 3B1 3SEND_B1 1RECV_B1 1B1 1SEND_B1 1REDUCE_GRAD 3REDUCE_GRAD",
        lowered=True,
    )
    check(example)
    assert fault(example, "paired") == (
        "message 2 from rank 0 to rank 1 is 0SEND_F1, but the receive for it is 1RECV_B0"
    )


def test_unknown_transports():
    with pytest.raises(StrettoError, match=r"transport is 'bufered'.*\n.*'buffered'"):
        check(schedule("gpipe", 2, 2), "bufered")
    with pytest.raises(StrettoError, match="has no transfers yet"):
        check(schedule("gpipe", 2, 2), "paired")


def test_a_number_of_microbatches_that_would_fill_the_memory():
    assert "but there are 4 actions in all" in fault(replace(schedule("gpipe", 1, 2), microbatches=10**15))
