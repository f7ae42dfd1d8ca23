"""When a failed job is started again, how soon, and when no more; ranks are played by functions."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.run.launch import restart
from stretto.run.launch.failure import Failure
from stretto.run.launch.local import RankFailed
from stretto.run.launch.restart import JobProgress, Restart, supervise
from stretto.run.launch.stop import Stopped, StopRequest


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each wait would have been."""
    seconds_waited = list[float]()

    def wait(seconds: float, stop: StopRequest) -> None:
        seconds_waited.append(seconds)
        stop.check()

    monkeypatch.setattr(restart, "_wait", wait)
    return seconds_waited


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
    begun: bool = True,
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
        progress=lambda: JobProgress(steps=steps(len(numbers)), saved=saved(len(numbers)), begun=begun),
        prepare=told.append,
        **options,
    )
    assert numbers == list(range(len(ends)))
    return result, told


def test_a_job_goes_on_until_it_succeeds() -> None:
    result, told = job(died(), raised(0, "step 3: NaN"), "done", saved=lambda number: 2 * (number - 1))
    assert result == "done"
    assert [(restart.number, restart.step, restart.saved) for restart in told] == [(1, 2, 0), (2, 3, 2)]
    assert told[0].text == (
        "restart 1 of 9: rank 1 was killed by SIGKILL in step 2; continuing from the start in 0.5 s"
    )
    assert told[1].text.startswith("restart 2 of 9: step 3: NaN in step 3; continuing from the checkpoint of")
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
    with pytest.raises(RankFailed, match="the second time in a row in step 5") as caught:
        job(first, second, "done", steps=lambda _: 4)
    message = caught.value.failure.message
    assert message.endswith("so that starting again would not help")
    assert first.failure.message in message  # if they differ in numbers, or in what ranks did, both are shown
    assert second.failure.message in message


@pytest.mark.parametrize(
    "second", [died(2), raised(1, "another"), died(message="ended with exit code 3 without a report")]
)
def test_another_failure_in_the_same_step_does_not(second: RankFailed) -> None:
    result, told = job(died(), second, "done", steps=lambda _: 4)
    assert result == "done"
    assert "(the time before: rank 1 was killed by SIGKILL)" in told[1].text
    assert "before" not in told[0].text


def test_only_failures_in_a_row_count() -> None:
    assert job(died(), died(2), died(), "done", steps=lambda _: 4)[0] == "done"
    elsewhere = [4, 4, 6, 4]
    assert job(died(), died(), died(), "done", steps=lambda number: elsewhere[number])[0] == "done"


def test_a_checkpoint_in_between_is_progress() -> None:
    assert job(died(), died(), "done", steps=lambda _: 4, saved=lambda number: number)[0] == "done"


def test_a_rank_that_is_lost_while_the_job_starts_is_no_sign_of_a_cause() -> None:
    result, told = job(
        *[died()] * 5, hung("importing"), hung("importing"), "done", steps=lambda _: 0, begun=False
    )
    assert result == "done"
    assert "rank 1 was killed by SIGKILL while the job started; continuing from the start" in told[0].text
    assert [restart.step for restart in told] == [None] * 7
    with pytest.raises(RankFailed, match="the second time in a row while the job started"):
        job(raised(0, "no such file"), raised(1, "no such file"), "done", begun=False)
    with pytest.raises(RankFailed, match="while the job started, after 2 restarts"):
        job(died(), died(), died(), "done", begun=False, limit=2)


@dataclass(frozen=True)
class End:
    """How an attempt of a simulated job ends."""

    rank: int
    kind: str
    text: str
    steps: int
    saved: int
    begun: bool


ENDS = st.builds(
    End,
    rank=st.integers(0, 1),
    kind=st.sampled_from(["died", "error", "silent"]),
    text=st.sampled_from(["a 1", "a 2", "b"]),
    steps=st.integers(0, 2),
    saved=st.integers(0, 1),
    begun=st.booleans(),
)


def attempts_until_given_up(ends: list[End], limit: int) -> int:
    """How many attempts there are of a job that fails in these ways, one after another."""
    for number, now in enumerate(ends):
        if number == limit:
            return number + 1
        if number == 0:
            continue
        before = ends[number - 1]
        if (
            now.begun != before.begun
            or now.saved != before.saved
            or (now.begun and now.steps != before.steps)
        ):
            continue  # it was elsewhere
        if now.kind != before.kind or now.text[0] != before.text[0]:
            continue  # something else
        if now.kind == "error" or (now.begun and now.rank == before.rank):
            return number + 1
    return len(ends) + 1


@given(st.lists(ENDS, max_size=8), st.integers(1, 9))
def test_a_job_is_given_up_when_and_only_when_it_failed_alike_twice_in_a_row(
    ends: list[End], limit: int
) -> None:
    attempts = list[int]()

    def attempt(number: int) -> None:
        attempts.append(number)
        if number < len(ends):
            end = ends[number]
            failure = Failure(rank=end.rank, kind=end.kind, name="", message=end.text)  # type: ignore[arg-type]
            raise RankFailed(failure)

    def progress() -> JobProgress:
        if not attempts:
            return JobProgress(steps=0, saved=0)
        end = ends[attempts[-1]]
        return JobProgress(steps=end.steps, saved=end.saved, begun=end.begun)

    expected = attempts_until_given_up(ends, limit)
    try:
        supervise(attempt, limit=limit, stop=StopRequest(), progress=progress, prepare=lambda _: None)
        assert expected == len(ends) + 1
    except RankFailed:
        assert expected <= len(ends)
    assert len(attempts) == expected


def is_given_up(seed: int) -> bool:
    """Whether a job of two ranks, 40 steps of 0.3 s and 4 s to start, with a checkpoint every 4 steps and 20
    kills of a random rank at random moments, ends before its last step.
    """
    draw, saved, steps, kills, begun = random.Random(seed), 0, 0, 0, True

    def attempt(_: int) -> None:
        nonlocal saved, steps, kills, begun
        seconds = draw.expovariate(1 / 8) - 4 if kills < 20 else 1e9
        kills, begun = kills + 1, seconds > 0
        steps = min(40, saved + max(0, int(seconds / 0.3)))
        saved = steps - steps % 4
        if steps < 40:
            raise died(draw.randrange(2))

    def progress() -> JobProgress:
        return JobProgress(steps=steps, saved=saved, begun=begun)

    try:
        supervise(attempt, limit=20, stop=StopRequest(), progress=progress, prepare=lambda _: None)
    except RankFailed:
        return True
    return False


def test_jobs_whose_ranks_are_killed_at_random_are_not_given_up() -> None:
    assert sum(is_given_up(seed) for seed in range(300)) <= 6


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
