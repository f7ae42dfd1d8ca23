"""Save checkpoints while training continues: tensors are copied to host memory, and threads write them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from stretto.engine.checkpoint.folder import Retention
from stretto.engine.checkpoint.host_copy import HostCopy
from stretto.engine.checkpoint.save import Planned, WritePlan, Written, plan
from stretto.engine.checkpoint.shards import Saved
from stretto.engine.parallel.control import gather_json, run_on_all, run_on_first, this_rank

T = TypeVar("T")
_PATIENCE_S = 30.0  # that a failed process waits for its thread before it exits


class BackgroundSave:
    """Saves one checkpoint at a time in the background, with the guarantees of `save`.

    `start` copies this rank's tensors to host memory. A thread on each rank then writes them without any
    collective, which could interleave with those of a step. The ranks exchange in each step whether all have
    `written`, or one has `failed`; then all call `advance`, which makes rank 0 commit the checkpoint in its
    thread, and, called again after that, ends the save.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = HostCopy(device)
        self._write_plan: WritePlan | None = None
        self._planned: Planned | None = None
        self._stop = threading.Event()
        self._writing: _Task[Written] | None = None
        self._commit: _Task[tuple[str, list[str]]] | None = None
        self._committing = False  # True on all ranks while rank 0 commits

    @property
    def busy(self) -> bool:
        """True until the checkpoint is committed; the same on all ranks."""
        return self._planned is not None

    @property
    def written(self) -> bool:
        """True if this rank has finished its current work: its files, or on rank 0 the commit."""
        return self.busy and (self._task is None or self._task.ended)

    @property
    def failed(self) -> bool:
        """True if this rank has failed."""
        return self._task is not None and self._task.failed

    @property
    def _task(self) -> _Task[Any] | None:
        return self._commit if self._committing else self._writing

    def start(
        self,
        folder: str | Path,
        step: int,
        tensors: Saved,
        meta: Mapping[str, Any],
        per_rank: Mapping[str, Tensor] | None = None,
        keep: Retention | None = None,
        before_commit: Callable[[], object] | None = None,
    ) -> Path:
        """Start a checkpoint; the tensors may change as soon as this returns. Collective.

        Offloaded tensors that are in files are written before this returns: a copy may not fit in memory.

        Args:
            As for `save`.

        Returns:
            The path of the checkpoint once it is committed.

        Raises:
            StrettoError, CollectiveError: as for `save`.
        """
        assert not self.busy, "the last checkpoint is not committed yet"
        planned = plan(
            folder=folder,
            step=step,
            tensors=tensors,
            meta=meta,
            per_rank=per_rank,
            keep=keep,
            before_commit=before_commit,
            before=self._write_plan,
        )
        self._stop = threading.Event()

        def prepare() -> Callable[[], Written]:
            """Copy tensors that are in memory, and write those in files; return the remaining work."""
            planned.check_visible()
            files = planned.sources()
            away = {file.name for file in planned.write_plan.files if file.away}
            written = planned.write({name: sources for name, sources in files.items() if name in away})
            copies = self._memory.copy(
                {name: sources for name, sources in files.items() if name not in away}, self._stop
            )
            return lambda: written | planned.write(copies)

        with planned.discarded_on_error():
            work = run_on_all(prepare)
        self._planned, self._write_plan = planned, planned.write_plan
        self._writing, self._committing = _Task(work), False
        return planned.final

    def advance(self) -> Path | None:
        """Start the commit, or end the save, once all ranks have `written` or one has `failed`. Collective.

        Returns:
            The checkpoint's path if it is committed; None if rank 0 has just started the commit.

        Raises:
            CollectiveError, StrettoError: writing failed on any rank, as for `save`.
        """
        planned = self._planned
        assert planned is not None, "nothing is being saved"
        self._planned = None  # after an error `close` has nothing left to do
        with planned.discarded_on_error():
            if not self._committing:
                written = gather_json(run_on_all(self._written))
                self._planned, self._committing = planned, True
                if this_rank() == 0:
                    self._commit = _Task(lambda: planned.commit(written))
                return None
            final, troubles = run_on_first(self._committed)
        self._writing = self._commit = None
        if this_rank() == 0:
            for trouble in troubles:
                warnings.warn(trouble, stacklevel=2)
        return Path(final)

    def _written(self) -> Written:
        """Return the files that this rank has written; empty if another rank failed first."""
        assert self._writing is not None
        if interrupted := not self._writing.ended:
            self._stop.set()
        try:
            return self._writing.result()
        except Exception:
            if interrupted:  # the first error is another rank's
                return {}
            raise

    def _committed(self) -> tuple[str, list[str]]:
        assert self._commit is not None, "rank 0 commits"
        return self._commit.result()

    def finish(self) -> Path:
        """Wait until the checkpoint is committed, and return its path. Collective.

        Raises:
            CollectiveError, StrettoError: as for `advance`.
        """
        while True:
            if self._task is not None:
                self._task.wait()
            path = self.advance()
            if path is not None:
                return path

    def close(self) -> None:
        """Stop the save, without starting a commit, on a rank that exits after an error; not collective."""
        planned, task = self._planned, self._task
        if planned is None:
            return
        self._planned = None
        self._stop.set()
        if task is None or task.wait(_PATIENCE_S):
            planned.discard()  # does nothing after a commit


class _Task(Generic[T]):
    """Work in a daemon thread, which does not keep the process from exiting."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stretto-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as error:
            self._error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return self.ended and self._error is not None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds`; return whether the work has ended."""
        self._thread.join(seconds)
        return self.ended

    def result(self) -> T:
        """Wait for the work, and return its value or raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value[0]
