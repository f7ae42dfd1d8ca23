"""forward-only: forwards alone, without idle time between a rank's first and last."""

from __future__ import annotations

import pytest

from stretto.program import ActionKind, check, lower, schedule
from stretto.program.replay import simulate


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_no_rank_waits_once_it_has_begun(chunks: int):
    for p in range(1, 9):
        for m in (1, 2, 3, 4, 5, 7, 8, 9, 11, 15, 16, 20):
            program = schedule("forward-only", p, m, chunks=chunks)
            assert not program.trains
            assert {a.kind for order in program.orders for a in order} == {ActionKind.F}
            assert check(lower(program)).transfers == ((chunks * p - 1) * m if p > 1 else 0)
            timeline = simulate(program)
            if m >= p:
                assert timeline.bubble.span == pytest.approx(0, abs=1e-9)
                assert timeline.makespan == pytest.approx(m + (p - 1) / chunks)
            else:  # one after the other through all chunks, the last m - 1 behind
                assert timeline.makespan == pytest.approx(p + (m - 1) / chunks)


def test_groups_go_through_the_chunks_in_turn():
    order = schedule("forward-only", 2, 5, chunks=2).orders[0]
    assert " ".join(map(str, order)) == "0F0 0F1 2F0 2F1 0F2 0F3 0F4 2F2 2F3 2F4"
