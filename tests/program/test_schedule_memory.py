"""Live activations of each rank, against a slow count by the definition."""

from __future__ import annotations

import pytest
from mutations import program, seeds

from stretto.program import ActionKind, Program, check, lower, schedule
from stretto.program.memory import holdings, peak_activations, peak_held, peak_inputs
from stretto.program.transforms.activations import offload, recompute

PLAIN, LOWERED = seeds()


def by_definition(program: Program, rank: int) -> list[tuple[int, int]]:
    """For every place in the order, look at every (stage, microbatch): is it held, and how much of it?"""
    order = [str(action) for action in program.orders[rank]]
    counts = []
    for at in range(1, len(order) + 1):
        done = set(order[:at])
        full = inputs = 0
        for s in program.stages_of(rank):
            for i in range(program.microbatches):
                over = f"{s}B{i}" in done or f"{s}W{i}" in done
                away = f"{s}OFFLOAD{i}" in done and f"{s}RELOAD{i}" not in done
                if f"{s}F{i}" not in done or over or away:
                    continue
                if f"{s}RECOMPUTE{i}" in order and f"{s}RECOMPUTE{i}" not in done:
                    inputs += 1
                else:
                    full += 1
        counts.append((full, inputs))
    return counts


@pytest.mark.parametrize("program", [p for p in PLAIN + LOWERED if p.trains], ids=lambda p: p.name)
def test_holdings_count_held_activations(program: Program):
    for rank in range(program.ranks):
        wanted = by_definition(program, rank)
        assert holdings(program, rank) == wanted
        assert peak_held(program)[rank] == max(full for full, _ in wanted)
        assert peak_inputs(program)[rank] == max(inputs for _, inputs in wanted)


def test_full_recomputation_of_gpipe_holds_all_inputs_and_one_microbatch():
    program = recompute(schedule("gpipe", 4, 8))
    report = check(lower(program))
    assert (report.peak_held, report.peak_inputs) == ((1,) * 4, (8,) * 4)
    report = check(recompute(schedule("1f1b", 4, 8)))
    # on the last rank each backward follows its own forward: nothing to gain there
    assert (report.peak_held, report.peak_inputs) == ((1, 1, 1, 1), (4, 3, 2, 0))


def test_offloading_leaves_activations_between_reload_and_use():
    program = schedule("gpipe", 2, 6)
    assert peak_held(program) == [6, 6]
    assert peak_held(offload(program)) == [2, 2]
    assert peak_held(offload(program, ahead=0)) == [1, 1]
    assert peak_held(offload(program, ahead=3)) == [4, 4]
    assert peak_held(offload(program, stages=[0])) == [2, 6]


def test_a_rank_unit_is_a_microbatch_through_all_its_stages():
    assert peak_activations(schedule("interleaved", 2, 4, chunks=2)) == [2.5, 1.5]
    assert peak_activations(schedule("forward-only", 2, 4)) == [1.0, 1.0]
    # of a rank's two stages, one of each copy, a microbatch goes through one
    assert peak_activations(schedule("dualpipe", 4, 8)) == [5.0] * 4
    assert peak_held(program((0, 1), 1, "0F0 0I0 0W0", "1F0 1B0")) == [1, 1]


def test_recomputation_is_counted_from_its_place_in_the_order():
    example = program((0,), 2, "0F0 0F1 0RECOMPUTE0 0I0 0RECOMPUTE1 0I1 0W0 0W1")
    assert holdings(example, 0) == [(0, 1), (0, 2), (1, 1), (1, 1), (2, 0), (2, 0), (1, 0), (0, 0)]
    assert example.orders[0][2].kind is ActionKind.RECOMPUTE
