"""Starting ranks on this machine: results, failures, signals; and which of several failures is the cause."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.errors import StrettoError
from stretto.run.launch.failure import Failure, first_cause, peer_failure
from stretto.run.launch.local import (
    RankFailed,
    RanksStopped,
    _SignalHandlers,
    check_port,
    check_ranks,
    run_ranks,
)


def summed(scale: float) -> tuple[int, torch.Tensor, dict[str, str | None], str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensor = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PLANTED")
    return rank, tensor, {name: os.environ.get(name) for name in names}, os.getcwd()


def test_results_come_in_rank_order_from_this_place_and_environment(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLANTED", "here")
    results = run_ranks(3, summed, 2.0)
    assert [rank for rank, *_ in results] == [0, 1, 2]
    for rank, tensor, environment, folder in results:
        assert tensor.tolist() == [12.0] * 3
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "PLANTED": "here",
        }
        assert folder == str(tmp_path)
    assert "RANK" not in os.environ
    assert multiprocessing.active_children() == []


def behave(how: str) -> Any:
    if os.environ["RANK"] != "1":
        time.sleep(0.05)
        return None
    match how:
        case "input":
            raise StrettoError("planted", hint="dig it up")
        case "unsendable":
            return lambda: None
        case "leave":
            os._exit(3)
        case "exit":
            raise SystemExit("enough")
        case _:
            return os.kill(os.getpid(), signal.SIGSEGV)


def test_errors_of_input_come_back_unchanged() -> None:
    with pytest.raises(StrettoError) as caught:
        run_ranks(2, behave, "input")
    assert (caught.value.message, caught.value.hint) == ("planted", "dig it up")


@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("unsendable", "error", "pickle"),
        ("leave", "died", "ended with exit code 3 without a report"),
        ("exit", "error", "enough"),
        ("crash", "died", "was killed by SIGSEGV"),
    ],
)
def test_every_other_end_is_a_failure_of_that_rank(how: str, kind: str, says: str) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, behave, how)
    assert (caught.value.rank, caught.value.failure.kind) == (1, kind)
    assert says in caught.value.failure.message
    assert multiprocessing.active_children() == []


def sleep() -> None:
    time.sleep(3600)


def test_ranks_that_cannot_be_stopped_in_order_are_ended_at_once() -> None:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(RanksStopped) as caught:
        run_ranks(2, sleep)
    assert (caught.value.signal, caught.value.results) == (signal.SIGTERM, None)
    assert multiprocessing.active_children() == []


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with _SignalHandlers(lambda _: None) as heard:
            os.kill(os.getpid(), signal.SIGHUP)
            assert heard.first is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard.first == signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_too_many_ranks_and_ports_that_cannot_be() -> None:
    check_ranks(1)
    check_port(0)
    with pytest.raises(StrettoError, match="are too many for the"):
        check_ranks(10**6)
    with pytest.raises(StrettoError, match="port 70000 cannot be used"):
        check_port(70000)


# ---------------------------------------------------------------------- causes

GONE = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1000ms for recv operation to complete"


def raised(*errors: BaseException) -> BaseException:
    """The last of the errors, each raised while the one before was handled."""
    for before, after in pairwise(errors):
        after.__context__ = before
    return errors[-1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(GONE), "gone"),
        (RuntimeError(LATE), "silent"),
        (dist.DistNetworkError("the server has closed the connection"), "gone"),
        (dist.DistStoreError("wait timeout after 1000ms, keys: /x"), "silent"),
        (BrokenPipeError("nobody reads"), None),
        (ValueError("mine"), None),
        (raised(RuntimeError(GONE), ValueError("in the handling")), "gone"),
        (raised(ValueError("mine"), RuntimeError(GONE)), None),  # the peers left because of it
    ],
)
def test_consequences_of_another_ranks_failure_are_told_apart(error: BaseException, kind: str | None) -> None:
    assert peer_failure(error) == kind


def failure(rank: int, kind: Any, message: str = "x") -> tuple[int, Failure]:
    return rank, Failure(rank=rank, kind=kind, name="Error", message=message)


def test_the_first_cause_follows_from_no_other_rank() -> None:
    heard = dict([failure(0, "gone"), failure(3, "silent"), failure(2, "died"), failure(1, "error")])
    assert first_cause(heard, range(4)).rank == 2
    assert first_cause(dict([failure(0, "gone"), failure(3, "gone")]), range(4)).rank == 0


def test_when_all_wait_the_silent_rank_is_the_cause() -> None:
    heard = dict([failure(0, "gone"), failure(3, "silent", "recv"), failure(1, "silent", "send")])
    cause = first_cause(heard, range(4))
    assert (cause.rank, cause.kind) == (2, "silent")
    assert cause.message == "rank 2 does not answer (rank 3: recv; rank 1: send)"
    both = first_cause(dict([failure(3, "silent", "recv")]), range(4))
    assert both.message.startswith("ranks 0, 1, 2 do not answer")
    everyone = dict([failure(0, "silent", "recv"), failure(1, "silent", "send")])
    assert first_cause(everyone, range(2)).rank == 0


def test_a_failure_shows_its_notes_and_not_gloos_source_lines() -> None:
    error = RuntimeError(LATE)
    error.add_note("in step 3")
    failure = Failure.of(1, error)
    assert failure.message == "Timed out waiting 1000ms for recv operation to complete, in step 3"
    assert failure.name == "RuntimeError"
