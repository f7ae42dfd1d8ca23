"""A rank's side of the watch: it shares its marks, shows that it lives, writes its record when asked."""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from stretto.engine.progress import PROGRESS
from stretto.run.watch.board import STACKS, Board

BEAT_S = 0.25


def watched(board: Board, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(*arguments)` as a local rank whose launcher watches the board."""
    from stretto.run.watch.waits import counted_waits

    rank, process = int(os.environ["RANK"]), os.getpid()
    PROGRESS.attach(board.memory(rank), process, socket.gethostname())
    if STACKS:  # in C, so that it works whatever holds the interpreter's lock
        faulthandler.register(STACKS, file=board.stacks, all_threads=True)
        faulthandler.enable(file=board.stacks)  # of a crash; the launcher shows it with the failure
    beats = threading.Thread(target=_beat, args=(board, rank, process), name="watch", daemon=True)
    beats.start()
    with counted_waits():
        return function(*arguments)


def _beat(board: Board, rank: int, process: int) -> None:
    from stretto.run.watch.record import write_now

    answered = board.requests
    while True:
        PROGRESS.alive(process)
        if (requests := board.requests) != answered:
            answered = requests
            write_now(board.folder, rank)
        time.sleep(BEAT_S)
