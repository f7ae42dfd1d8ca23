"""What a studio has beside the questions that need no files: the runs and proofs of a folder."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

from stretto.web.answers import Questions
from stretto.web.folder import StudioFolder
from stretto.web.jobs import StudioJobs
from stretto.web.proofs import Proofs
from stretto.web.runs import Runs


class Studio:
    """The questions about a folder. Used in a `with`, whose end ends the answers that watch files."""

    def __init__(self, root: Path) -> None:
        self.folder = StudioFolder(root)
        self.jobs = StudioJobs(self.folder)
        self.ended = Event()
        runs, proofs = Runs(self.folder, self.jobs, self.ended), Proofs(self.folder, self.jobs, self.ended)
        self.questions: Questions = {**runs.questions, **proofs.questions}

    def stop_jobs(self) -> None:
        """Ask all jobs to end, and wait for them."""
        for job in self.jobs.running():
            job.stop()
        for job in self.jobs:
            job.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
