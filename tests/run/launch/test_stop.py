"""What asks a run to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest

from stretto.run.launch.stop import SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def hangup() -> Generator[None]:
    """As in a terminal, whatever started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_asks_to_stop_and_the_first_counts(number: int) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.signal == number
    assert signal.SIGHUP in SIGNALS


def test_a_closed_terminal_does_not_stop_what_nohup_has_started() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
    assert stop.signal is None
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
