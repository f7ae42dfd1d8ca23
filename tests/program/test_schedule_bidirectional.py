"""dualpipe-v, dualpipe and chimera: orders, pairs, memory, bubbles, torch's order."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch_orders import multi

from stretto.program import Action, ActionKind, check, lower, schedule
from stretto.program.replay import Costs, simulate


def flat(order: list[Any]) -> list[str]:
    """torch's order with its overlapped blocks laid out."""
    return [str(part) for action in order if action is not None for part in action.sub_actions or (action,)]


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 7), (4, 8), (4, 13), (3, 9)])
def test_dualpipe_v_is_torchs(p: int, m: int):
    torch_schedule = multi(ScheduleDualPipeV, p, 2, m).pipeline_order
    program = schedule("dualpipe-v", p, m)
    assert [list(map(str, order)) for order in program.orders] == [flat(torch_schedule[r]) for r in range(p)]
    blocks = {tuple(map(str, a.sub_actions)) for r in range(p) for a in torch_schedule[r] if a.sub_actions}
    assert {(str(f), str(b)) for f, b in program.pairs} == blocks


@pytest.mark.parametrize(
    ("p", "m", "v", "two"), [(4, 8, 25.5, 25), (8, 16, 51.5, 51), (8, 24, 75.5, 75), (8, 32, 99.5, 99)]
)
def test_makespans_when_pairs_run_one_after_the_other(p: int, m: int, v: float, two: float):
    assert simulate(schedule("dualpipe-v", p, m)).makespan == v
    assert simulate(schedule("dualpipe", p, m), whole_stages(p)).makespan == two


def whole_stages(p: int, f: float = 1, i: float = 1, w: float = 1) -> Costs:
    """Every stage is a rank's whole share of its copy."""
    return Costs(per_stage=[(f, i, w)] * (2 * p))


def test_memory_is_the_formula():
    for p in range(1, 9):
        for m in sorted({1, 2, p - 1 or 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p + 1}):
            peak = max(check(schedule("dualpipe-v", p, m)).peak_held)
            assert peak == min(2 * m, 2 * p + 1)
            if p % 2 == 0:
                peak = max(check(schedule("dualpipe", p, m)).peak_held)
                assert peak <= min(m, p + 1)
                if m >= 2 * p:
                    assert peak == p + 1


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_two_copies_run_against_each_other(name: str):
    program = schedule(name, 4, 9)
    assert program.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert (program.copies, program.depth) == (2, 4)
    assert program.copy_of == (0, 1) * 4 + (0,)
    ends = {program.placement[s] for s in range(8) if program.is_first(s)}
    assert ends == {0, 3}
    # the copies of every stage sum their gradients
    assert lower(program).tied == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_dualpipe_is_one_order_seen_from_both_ends():
    """Rank p-1-r does for the other copy what rank r does for its own; microbatches 2j and 2j+1 swap."""
    program = schedule("dualpipe", 6, 20)
    for rank in range(3):
        seen = [
            Action((a.stage + 6) % 12, a.kind, a.microbatch ^ 1)
            for a in program.orders[rank]
            if a.microbatch is not None
        ]
        assert seen == list(program.orders[5 - rank])


def test_few_microbatches_split_the_backwards_that_lost_their_pair():
    for name, p in (("dualpipe-v", 4), ("dualpipe", 4)):
        program = schedule(name, p, 5)
        paired = {b for _, b in program.pairs}
        assert {a for order in program.orders for a in order if a.kind is ActionKind.B} == paired
        alone = schedule(name, p, 1)
        assert not alone.pairs
        # F, I through the ranks and the last W: nothing waits that need not
        costs = whole_stages(p) if name == "dualpipe" else Costs()
        assert simulate(alone, costs).makespan == 2 * p + 1


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_chimera_has_the_papers_bubble_and_memory(p: int):
    """Rate (p-2) / (2m+p-2) if a backward takes as long as a forward, for any number of units of p."""
    for m in (p, 2 * p, 3 * p, 5 * p):
        program = schedule("chimera", p, m)
        assert simulate(program, whole_stages(p, 1, 0.5, 0.5)).makespan == 2 * m + p - 2
        peaks = check(program).peak_held
        assert peaks == tuple(p // 2 + 1 + min(r, p - 1 - r) for r in range(p)) if p > 2 else (2, 2)
    assert simulate(schedule("chimera", p, p), whole_stages(p)).makespan == 3 * p + 2 * (p - 2)
