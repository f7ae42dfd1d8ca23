"""The time that a rank spends waiting for others: whatever it waits for, it does so in `Work.wait`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed import Work

from stretto.engine.progress import PROGRESS


@contextmanager
def counted_waits() -> Generator[None]:
    """Count the main thread's waits in `PROGRESS`. torch has no hook there, so the method is replaced; on an
    accelerator it returns at once, as the device waits and not the host.
    """
    import threading

    wait, main = Work.wait, threading.main_thread().ident
    here = threading.get_ident

    def counted(work: Work, *arguments: Any, **named: Any) -> Any:
        if here() != main:
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
