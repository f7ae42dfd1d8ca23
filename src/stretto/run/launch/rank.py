"""A local rank: the process that `local.run_ranks` starts."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from stretto.run.launch.failure import Failure

BYE = "bye"  # what the launcher answers to a result: it has been read
ABANDONED = 70  # exit code when the launcher is gone (EX_SOFTWARE)


class Link:
    """This rank's connection to the launcher.

    Args:
        on_loss: called, on a thread, when the launcher has gone.
    """

    def __init__(self, connection: Connection, on_loss: Callable[[], None]) -> None:
        self._connection, self._on_loss = connection, on_loss
        self._read = threading.Event()
        threading.Thread(target=self._listen, name="launcher", daemon=True).start()

    def _listen(self) -> None:
        try:
            self._connection.recv()
        except (EOFError, OSError):
            self._read.set()
            self._on_loss()
        self._read.set()

    def finish(self, value: Any) -> None:
        """Hand over the result, and wait until it has been read: tensors in it are shared, not copied."""
        self._connection.send(value)
        self._read.wait()

    def tell(self, failure: Failure) -> None:
        """Say how this rank failed; without a launcher there is nobody to say it to."""
        with contextlib.suppress(OSError):
            self._connection.send(failure)


def enter(
    rank: int,
    connection: Connection,
    environment: Mapping[str, str],
    folder: str,
    stoppable: bool,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Run `function(*arguments)` as rank `rank`; its result or its failure goes through `connection`.

    The process starts with SIGINT and SIGTERM blocked, as its server has them: what the terminal sends to
    all is the launcher's to handle. A function that is `stoppable` takes them over when it is ready
    (`train.stop`).
    """
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    link = Link(connection, _stop_orderly if stoppable else _leave)
    try:
        result = ("done", function(*arguments))
    except BaseException as error:
        link.tell(Failure.of(rank, error))
        sys.exit(1)
    try:
        link.finish(result)
    except (BrokenPipeError, ConnectionError):
        sys.exit(ABANDONED)
    except Exception as error:  # a result that cannot be sent
        link.tell(Failure.of(rank, error))
        sys.exit(1)


def _leave() -> None:
    os._exit(ABANDONED)


def _stop_orderly() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
