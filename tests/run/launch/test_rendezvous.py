"""The start of an attempt: who is missing is named, a rank that is started twice is refused, and a new
attempt finds nothing that dead ranks have left.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from stretto.errors import StrettoError
from stretto.run.launch import registration, rendezvous
from stretto.run.launch.failure import RanksMissing
from stretto.run.launch.local import RankFailed, _listen, run_ranks
from stretto.run.launch.registration import RankProcess, WaitTimer
from stretto.run.launch.stop import Stopped

LONG_S, SHORT_S = 60.0, 1.0


def register(store: Any, rank: int, world: int, start_s: float = LONG_S, messages: Any = None) -> str:
    say: Callable[[str], None] = (lambda _: None) if messages is None else messages.append
    return registration.register(
        store, RankProcess.current(rank, world), WaitTimer(start_s, say, lambda: None)
    )


def outcomes(store: Any, ranks: list[int], world: int, start_s: float = LONG_S) -> list[str | StrettoError]:
    """What came of each, all of them at once: the name of the attempt, or an error."""
    by_place = dict[int, str | StrettoError]()

    def join(at: int, rank: int) -> None:
        try:
            by_place[at] = register(store, rank, world, start_s)
        except StrettoError as error:
            by_place[at] = error

    threads = [Thread(target=join, args=place_and_rank) for place_and_rank in enumerate(ranks)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    return [by_place[at] for at in range(len(ranks))]


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead are known to be dead soon."""
    monkeypatch.setattr(registration, "_ANSWER_S", 0.6)
    monkeypatch.setattr(registration, "_GRACE_S", 0.0)
    monkeypatch.setattr(registration, "_BEYOND_S", 0.0)


def test_each_attempt_has_a_store_of_its_own(quickly: None) -> None:
    store = HashStore()
    first, second, third = (outcomes(store, list(range(world)), world) for world in (3, 3, 4))
    assert all(isinstance(name, str) for name in (*first, *second, *third))
    assert len(set(first)) == len(set(second)) == len(set(third)) == 1
    assert len({first[0], second[0], third[0]}) == 3
    PrefixStore(first[0], store).set("address", "of a dead rank")
    assert not PrefixStore(second[0], store).check(["address"])


def test_an_attempt_that_was_given_up_is_not_joined_again(quickly: None) -> None:
    store = HashStore()
    errors = outcomes(store, [0, 1], 3, SHORT_S)
    assert all(isinstance(error, RanksMissing) for error in errors)
    assert len(set(outcomes(store, [0, 1, 2], 3))) == 1


def test_missing_ranks_are_named_on_all_ranks(quickly: None) -> None:
    for error in outcomes(HashStore(), [0, 4, 1], 6, SHORT_S):
        assert isinstance(error, RanksMissing)
        assert error.message.startswith("ranks 2-3, 5 of 6 have not come within 1 s (train.start_s); here: ")


def test_a_rank_that_dies_while_it_registers_hides_no_other(quickly: None) -> None:
    store, results = HashStore(), list[Any]()
    rank_0 = Thread(target=lambda: results.extend(outcomes(store, [0], 3, SHORT_S)))
    rank_0.start()
    first = RankProcess.read(store.get(registration.RANK_0))
    store.add(registration._registered(first.nonce), 1)  # all that rank 1 does
    results += outcomes(store, [2], 3, SHORT_S)
    rank_0.join()
    assert [str(result)[:24] for result in results] == ["rank 1 of 3 has not come"] * 2


def test_a_missing_rank_0_is_named(quickly: None) -> None:
    (error,) = outcomes(HashStore(), [1], 2, SHORT_S)
    assert isinstance(error, RanksMissing)
    assert error.message.startswith("rank 0 of 2 has not come within 1 s")


def test_who_is_waited_for_is_said_meanwhile(quickly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "NOTE_S", 0.1)
    messages = list[str]()
    with pytest.raises(RanksMissing):
        register(HashStore(), 0, 3, SHORT_S, messages)
    assert messages[0].startswith("waiting for ranks 1-2 of 3; here: 0 on ")


@pytest.mark.parametrize("ranks", [[0, 1, 1], [0, 0, 1], [1, 0, 1, 0]])
def test_of_two_processes_with_one_rank_one_is_refused(ranks: list[int], quickly: None) -> None:
    store, ended = HashStore(), threading.Event()
    names, errors = set[str](), list[StrettoError]()
    for result in outcomes(store, ranks, 2):
        names.add(result) if isinstance(result, str) else errors.append(result)
    assert len(names) == 1, "the others train"
    assert len(errors) == len(ranks) - 2
    assert all("was started twice: it runs already on host" in error.message for error in errors)
    ended.set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_started_beside_a_running_job_is_refused(rank: int) -> None:
    store, ended = HashStore(), threading.Event()
    name, _ = outcomes(store, [0, 1], 2)
    assert isinstance(name, str)
    registration.answer_late(store, name, ended)
    try:
        with pytest.raises(StrettoError, match=rf"^rank {rank} was started twice"):
            register(store, rank, 2)
    finally:
        ended.set()


def test_ranks_with_another_number_of_ranks_are_refused(quickly: None) -> None:
    store, ended = HashStore(), threading.Event()
    name, _ = outcomes(store, [0, 1], 2)
    assert isinstance(name, str)
    registration.answer_late(store, name, ended)
    try:
        with pytest.raises(StrettoError, match=r"^rank 3 .* WORLD_SIZE=4, and rank 0 on .* with 2"):
            register(store, 3, 4)
    finally:
        ended.set()


def test_what_another_program_wrote_is_refused() -> None:
    store = HashStore()
    for text in ("", "{}", "[1]", '{"rank": "x"}', "[" * 100000):
        store.set(registration.RANK_0, text)
        with pytest.raises(StrettoError, match="no rank of Stretto has written"):
            register(store, 1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "2"}, "RANK is '2', and must be a whole number from 0 to 1"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999', and must be a whole number from 1 to 65535"),
    ],
)
def test_an_environment_that_describes_no_job_is_refused(changes: dict[str, str], message: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(StrettoError, match=message):
        rendezvous.RendezvousInfo.of(environment | changes)


def attempt(rank: int, store: Any) -> rendezvous.Attempt:
    return rendezvous.Attempt(store=store, rank=rank, world=2, ended=threading.Event())


@pytest.mark.parametrize(
    "error", [StrettoError("no such file", hint="give another"), Stopped("by a signal"), None]
)
def test_ranks_wait_until_rank_0_has_prepared_the_job(error: Exception | None) -> None:
    store, ends = HashStore(), list[Exception | None]()

    def wait() -> None:
        try:
            rendezvous.await_start(attempt(1, store), LONG_S, lambda: None)
            ends.append(None)
        except (StrettoError, Stopped) as end:
            ends.append(end)

    other = Thread(target=wait)
    other.start()
    with nullcontext() if error is None else pytest.raises(type(error)):  # noqa: SIM117
        with rendezvous.reported_start(attempt(0, store)):
            assert not ends
            if error is not None:
                raise error
    other.join()
    assert [type(end) for end in ends] == [type(error)]
    if isinstance(error, StrettoError):
        assert str(ends[0]) == "no such file\nhint: give another"


def test_a_rank_0_that_prepares_for_too_long_or_is_gone_is_named() -> None:
    with pytest.raises(RanksMissing, match="rank 0 has not prepared the job within"):
        rendezvous.await_start(attempt(1, HashStore()), 0.1, lambda: None)
    timeout = timedelta(seconds=5)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, timeout=timeout, wait_for_workers=False)
    del server
    with pytest.raises(RanksMissing, match="rank 0 has ended before the job began"):
        rendezvous.await_start(attempt(1, client), LONG_S, lambda: None)


# ---------------------------------------------------------------------- without torchrun, on real processes


def free_port() -> int:
    listener = _listen(0)
    port = listener.getsockname()[1]
    listener.close()
    return port


def join_without_torchrun(ranks: list[int], world: int, port: int, start_s: float, folder: str) -> str:
    """What comes of one process, of which RANK is an entry of `ranks`; none ends before all have come to
    their ends, as rank 0's process has the store."""
    at = int(os.environ["RANK"])
    os.environ |= {"RANK": str(ranks[at]), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    registration.NOTE_S = 0.5
    attempt, timeout = None, timedelta(seconds=LONG_S)
    try:
        attempt = rendezvous.attempt_store(start_s, timeout)
        result = "started"
    except StrettoError as error:
        result = error.message
    (Path(folder) / str(at)).write_text(result)
    end = threading.Event()
    while len(list(Path(folder).iterdir())) < len(ranks):
        end.wait(0.02)
    if attempt is not None:
        attempt.ended.set()
    return result


def test_a_rank_that_never_comes_is_named_without_torchrun(tmp_path: Path) -> None:
    arguments = ([0, 1], 3, free_port(), 2.0, str(tmp_path))
    for result in run_ranks(2, join_without_torchrun, *arguments):
        assert result.startswith("rank 2 of 3 has not come within 2 s (train.start_s); here: 0-1 on ")


def test_a_store_that_is_never_opened_is_named(tmp_path: Path) -> None:
    port = free_port()
    (result,) = run_ranks(1, join_without_torchrun, [1], 2, port, 1.0, str(tmp_path))
    assert result.startswith("rank 0 of 2 has not come within 1 s")
    assert result.endswith(f"cannot reach 127.0.0.1:{port}: Connection refused")


@pytest.mark.parametrize("ranks", [[0, 1, 1], [0, 1, 0]])
def test_a_rank_is_started_twice_without_torchrun(ranks: list[int], tmp_path: Path) -> None:
    arguments = (ranks, 2, free_port(), LONG_S, str(tmp_path))
    results = sorted(run_ranks(3, join_without_torchrun, *arguments))
    assert results[1:] == ["started", "started"]
    assert results[0].startswith(f"rank {ranks[2]} was started twice: it runs already on host ")


def test_a_port_of_another_program_is_named(tmp_path: Path) -> None:
    listener = _listen(0)
    port = listener.getsockname()[1]
    try:
        (result,) = run_ranks(1, join_without_torchrun, [0], 2, port, 1.0, str(tmp_path))
    finally:
        listener.close()
    assert result.endswith(f"another program has port {port}")


def leave_late(_: Any) -> None:
    """One of the local ranks never comes."""
    if os.environ["RANK"] == "1":
        threading.Event().wait()
    rendezvous.attempt_store(1.0, timedelta(seconds=LONG_S))


def test_a_local_rank_that_never_comes_is_named() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, leave_late, None)
    failure = caught.value.failure
    assert (failure.rank, failure.kind) == (1, "silent")
    assert "rank 1 of 2 has not come within 1 s" in failure.message
