"""A rank's side of the watch: share its marks, show that it is alive, count its waits for other ranks, and
write its record on request.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from stretto.engine.progress import PROGRESS
from stretto.run.watch.board import STACKS, StatusBoard

BEAT_S = 0.25


def watched(board: StatusBoard, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run `function(*arguments)` as a local rank whose launcher watches the board."""
    rank, process = int(os.environ["RANK"]), os.getpid()
    PROGRESS.attach(board.memory(rank), process, socket.gethostname())
    if STACKS:  # in C, so that it works whatever holds the interpreter's lock
        faulthandler.register(STACKS, file=board.stacks, all_threads=True)
        faulthandler.enable(file=board.stacks)  # of a crash; the launcher shows it with the failure
    beats = threading.Thread(target=_beat, args=(board, rank, process), name="watch", daemon=True)
    beats.start()
    with counted_waits():
        return function(*arguments)


def _beat(board: StatusBoard, rank: int, process: int) -> None:
    from stretto.run.watch.record import write_now

    answered = board.requests
    while True:
        PROGRESS.alive(process)
        if (requests := board.requests) != answered:
            answered = requests
            write_now(board.folder, rank)
        time.sleep(BEAT_S)


@contextmanager
def counted_waits() -> Generator[None]:
    """Count in `PROGRESS` the time that the main thread waits for other ranks, which it does in `Work.wait`
    alone. torch has no hook there, so the method is replaced. On an accelerator it returns at once, as the
    device waits and not the host.
    """
    from torch.distributed import Work

    wait, main = Work.wait, threading.main_thread().ident
    thread = threading.get_ident

    def counted(work: Work, *arguments: Any, **named: Any) -> Any:
        if thread() != main:
            return wait(work, *arguments, **named)
        began = PROGRESS.begin_wait()
        try:
            return wait(work, *arguments, **named)
        finally:
            PROGRESS.end_wait(began)

    Work.wait = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Work.wait = wait
