"""When a failed job is started again, how soon, and when no more; ranks are played by functions."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.run.launch import restart
from stretto.run.launch.failure import Failure
from stretto.run.launch.local import RankFailed
from stretto.run.launch.restart import Progress, Restart, supervise
from stretto.run.launch.stop import Stopped, StopRequest


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait would have been."""
    made = list[float]()

    def wait(seconds: float, stop: StopRequest) -> None:
        made.append(seconds)
        stop.check()

    monkeypatch.setattr(restart, "_wait", wait)
    return made


def died(rank: int = 1, message: str = "was killed by SIGKILL") -> RankFailed:
    return RankFailed(Failure(rank=rank, kind="died", name="", message=message))


def hung(doing: str) -> RankFailed:
    return RankFailed(Failure(rank=1, kind="hung", name="", message=f"hangs on host a: {doing}"))


def raised(rank: int, message: str, name: str = "TrainingFailed") -> RankFailed:
    return RankFailed(Failure(rank=rank, kind="error", name=name, message=message))


def job(
    *ends: Exception | str,
    limit: int = 9,
    steps: Callable[[int], int] = lambda number: number,
    saved: Callable[[int], int] = lambda _: 0,
    **options: Any,
) -> tuple[str, list[Restart]]:
    """A job whose attempts end like this, after so many steps each."""
    told, numbers, coming = list[Restart](), list[int](), iter(ends)

    def attempt(number: int) -> str:
        numbers.append(number)
        end = next(coming)
        if isinstance(end, Exception):
            raise end
        return end

    result = supervise(
        attempt,
        limit=limit,
        stop=options.pop("stop", StopRequest()),
        progress=lambda: Progress(steps=steps(len(numbers)), saved=saved(len(numbers))),
        prepare=told.append,
        **options,
    )
    assert numbers == list(range(len(ends)))
    return result, told


def test_a_job_goes_on_until_it_succeeds() -> None:
    result, told = job(died(), raised(0, "step 3: NaN"), "done", saved=lambda number: 2 * (number - 1))
    assert result == "done"
    assert [(one.number, one.step, one.saved) for one in told] == [(1, 2, 0), (2, 3, 2)]
    assert told[0].text == (
        "restart 1 of 9: rank 1 was killed by SIGKILL in step 2; going on from the start in 0.5 s"
    )
    assert told[1].text.startswith("restart 2 of 9: step 3: NaN in step 3; going on from the checkpoint of")
    assert "rank 1 hangs on host a: loading data in step 2" in job(hung("loading data"), "done")[1][0].text


def test_bad_input_is_never_tried_again() -> None:
    with pytest.raises(StrettoError, match="wrong"):
        job(StrettoError("wrong"), "done")


def test_waits_double_while_nothing_new_is_saved_and_are_bounded(waits: list[float]) -> None:
    job(*[died()] * 10, "done", limit=10, saved=lambda number: 5 if number > 8 else 0)
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 0.5, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (died(), died()),
        (hung("loading data"), hung("reducing gradients")),
        (raised(0, "step 7: loss 3.25"), raised(2, "step 7: loss 19")),  # whichever rank says it first
        (died(message="ended with exit code 3"), died(message="ended with exit code 4")),
    ],
)
def test_the_same_failure_twice_in_a_step_ends_the_job(first: RankFailed, second: RankFailed) -> None:
    with pytest.raises(RankFailed, match="the second time in step 5, so that starting again would not help"):
        job(first, second, "done", steps=lambda _: 4)


@pytest.mark.parametrize(
    "second", [died(2), raised(1, "another"), died(message="ended with exit code 3 without a report")]
)
def test_another_failure_in_the_same_step_does_not(second: RankFailed) -> None:
    assert job(died(), second, "done", steps=lambda _: 4)[0] == "done"


def test_a_failure_that_comes_back_after_another_one_is_known_again() -> None:
    with pytest.raises(RankFailed, match="second time in step 5"):
        job(died(), died(2), died(), "done", steps=lambda _: 4)


def test_the_limit_is_kept() -> None:
    with pytest.raises(RankFailed, match="SIGKILL, in step 4, after 2 restarts"):
        job(died(), died(), died(), "done", limit=2)
    with pytest.raises(RankFailed, match=r"SIGKILL\s*$"):
        job(died(), "done", limit=0)


def test_a_job_that_was_asked_to_stop_is_not_started_again() -> None:
    with pytest.raises(RankFailed):
        job(RankFailed(died().failure, signal.SIGTERM), "done")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_between_two_attempts_ends_the_waiting(number: int, monkeypatch: Any) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(restart, "FIRST_DELAY_S", 60.0)
    monkeypatch.setattr("time.sleep", lambda _: os.kill(os.getpid(), number))
    with StopRequest() as stop, pytest.raises(Stopped):
        job(died(), "done", stop=stop)
    assert stop.signal == number


def test_a_rank_that_dies_again_is_done_without_where_that_is_possible() -> None:
    fewer: Iterator[bool] = iter([True, False])
    with pytest.raises(RankFailed, match="second time"):
        job(died(), died(), died(), "done", steps=lambda _: 4, shrink=lambda: next(fewer))
    assert job(hung("a"), hung("b"), "done", steps=lambda _: 4, shrink=lambda: True)[0] == "done"
    with pytest.raises(RankFailed, match="second time"):
        job(raised(0, "NaN"), raised(0, "NaN"), "done", steps=lambda _: 4, shrink=lambda: True)
