"""Slow ranks are found within 20 steps by their own work, and noise is no slow rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from stretto.engine.progress import PROGRESS
from stretto.run.watch.slow import BusyTime, SlowRanks, _Clocks, slow_rank_changes

ALIKE = [[0, 1, 2, 3]]
ALONE = [[0], [1], [2], [3]]
PAIRS = [[0, 1], [2, 3]]
MANY = [list(range(12))]


def steps(seed: int, ranks: int, noise: float, work: Callable[[int, int], float]) -> Iterator[list[float]]:
    """Busy times with noise that ranks share, noise of their own, and a long step now and then."""
    draw = random.Random(seed)
    step = 0
    while True:
        shared = draw.lognormvariate(0, noise)
        yield [
            work(step, rank) * shared * draw.lognormvariate(0, noise) * (4 if draw.random() < 0.02 else 1)
            for rank in range(ranks)
        ]
        step += 1


@pytest.mark.parametrize("groups", [ALIKE, ALONE, PAIRS, MANY], ids=["alike", "alone", "pairs", "many"])
@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_a_slow_rank_is_found_within_20_steps(groups: Sequence[Sequence[int]], factor: float) -> None:
    ranks = sum(map(len, groups))
    for rank in range(min(ranks, 4)):
        unequal = [1.0, 1.0, 3.0, 3.0] if groups in (ALONE, PAIRS) else [1.0] * ranks
        found, judge = None, SlowRanks(groups)
        times = steps(
            rank, ranks, 0.08, lambda s, r, u=unequal, k=rank: u[r] * (factor if r == k and s >= 60 else 1)
        )
        for step, busy in zip(range(200), times, strict=False):
            slow = judge.add(busy, 0.2)
            if step < 60:
                assert not slow
            elif slow and found is None:
                found = step
                assert slow.keys() == {rank}
                assert slow[rank] == pytest.approx(factor, rel=0.2)
        assert found is not None
        assert found < 60 + 20
        assert judge.slow.keys() == {rank}  # not even when it has been slow for long


@pytest.mark.parametrize("groups", [ALIKE, ALONE, PAIRS], ids=["alike", "alone", "pairs"])
def test_no_false_alarm_in_a_thousand_windows(groups: Sequence[Sequence[int]]) -> None:
    judge = SlowRanks(groups)
    for busy, _ in zip(steps(7, 4, 0.15, lambda *_: 1.0), range(4016), strict=False):
        assert not judge.add(busy, 0.2)


def test_short_steps_are_judged_over_two_seconds() -> None:
    judge, found = SlowRanks(ALIKE), list[int]()
    for step, busy in zip(
        range(120), steps(5, 4, 0.05, lambda s, r: 2 if r == 1 and s >= 20 else 1), strict=False
    ):
        if judge.add(busy, 0.05):
            found.append(step)
    assert 50 <= found[0] < 20 + 40 + 4


def test_a_rank_that_recovers_is_told_too() -> None:
    judge, told = SlowRanks(ALONE), list[str]()
    for busy, _ in zip(
        steps(3, 4, 0.05, lambda s, r: 2 if r == 1 and 60 <= s < 400 else 1), range(500), strict=False
    ):
        before = judge.slow
        told += slow_rank_changes(before, judge.add(busy, 0.2), ["a", "b", "c", "d"])
    assert len(told) == 2
    assert told[0].startswith("rank 1 on host b is slow: its own work takes ")
    assert told[1] == "rank 1 on host b is as fast as usual again"


def test_what_is_not_measured_is_not_judged() -> None:
    judge = SlowRanks(ALIKE)
    for _ in range(100):
        assert not judge.add([0.0] * 4, 0.2)
    assert not SlowRanks([[0]]).add([1.0], 0.2)


def test_busy_time_leaves_out_waits_and_what_is_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = BusyTime()
    clocks = iter(
        [
            _Clocks(wall=100.0, core=1.0, waited=0.0, queued=0.0),  # a step begins
            _Clocks(wall=110.0, core=2.0, waited=3.0, queued=4.0),  # its report
            _Clocks(wall=112.0, core=3.0, waited=3.0, queued=4.5),  # its end
            _Clocks(wall=500.0, core=90.0, waited=3.0, queued=4.5),  # after an evaluation, the next one
            _Clocks(
                wall=501.0, core=90.25, waited=4.0, queued=5.5
            ),  # waited for a core as it waited for a rank
        ]
    )
    monkeypatch.setattr(busy, "_now", lambda: next(clocks))
    busy.begin()
    assert busy.report() == 3.0
    busy.end()
    busy.begin()
    assert busy.report() == 1.5 + 0.25


def test_clocks_of_this_process_go_forward() -> None:
    busy = BusyTime()
    busy.begin()
    began = PROGRESS.begin_wait()
    PROGRESS.end_wait(began)
    assert sum(range(100_000))
    assert busy.report() > 0
