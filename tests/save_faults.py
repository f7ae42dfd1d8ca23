"""Faults for saves: a process that dies in a file operation, writes that fail, threads that write late."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stretto.engine.checkpoint.files import CheckedWriter
from stretto.engine.parallel.control import CollectiveError
from stretto.errors import StrettoError

OPERATIONS = ("open", "fsync", "rename", "mkdir", "unlink", "rmdir")


def die_at(count: int) -> None:
    """End this process at its `count`-th file operation from now; half-way through when it is a write."""
    left = [count]

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return operation(*arguments, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    write = CheckedWriter._write_once

    def torn(self: CheckedWriter, block: memoryview) -> int:
        left[0] -= 1
        if left[0] == 0:
            write(self, block[: len(block) // 2])
            os._exit(9)
        return write(self, block)

    CheckedWriter._write_once = torn


def in_child(work: Callable[[], object]) -> int:
    """Exit code of a forked process that does the work."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def failing(which: int, error: OSError) -> Callable[[CheckedWriter, memoryview], int]:
    write, left = CheckedWriter._write_once, [which]

    def fail(self: CheckedWriter, block: memoryview) -> int:
        left[0] -= 1
        if left[0] == 0:
            error.filename = str(self._path)
            raise error
        return write(self, block)

    return fail


def attempt(work: Callable[[], object]) -> str:
    """Kind and message of what it raises."""
    try:
        work()
    except (StrettoError, CollectiveError) as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return "done"


@contextmanager
def paused_writes(*, after: int = 0) -> Iterator[threading.Event]:
    """Threads other than this one write only once the event is set, but for so many blocks."""
    go, write, main = threading.Event(), CheckedWriter._write_once, threading.current_thread()
    left = [after]

    def wait(self: CheckedWriter, block: memoryview) -> int:
        if threading.current_thread() is not main:
            left[0] -= 1
            if left[0] < 0:
                assert go.wait(60)
        return write(self, block)

    CheckedWriter._write_once = wait
    try:
        yield go
    finally:
        go.set()
        CheckedWriter._write_once = write
