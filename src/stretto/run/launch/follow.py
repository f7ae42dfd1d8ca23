"""Ends the server that ranks are forked from when its launcher ends; the server imports it first.

By itself the server would notice only once it has imported everything that ranks need, seconds later.
"""

from __future__ import annotations

import os
import signal
import sys

LAUNCHER = "STRETTO_LAUNCHER"  # process id of the launcher, for the server only
_ON_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


def signal_on_parents_death(number: int) -> None:
    """Send this process a signal when the thread that started it has ended; on Linux only."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_ON_DEATH_OF_PARENT, number)


if launcher := os.environ.pop(LAUNCHER, None):
    signal_on_parents_death(signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher had already ended
        sys.exit()
