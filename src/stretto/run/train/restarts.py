"""What a run keeps of its restarts: a line for people, one in `restarts.jsonl`, and records without what is
trained again.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from stretto.engine.checkpoint.folder import checkpoints, step_of
from stretto.engine.checkpoint.manifest import quick_problems
from stretto.run.launch.lease import check_folder
from stretto.run.launch.restart import JobProgress, Restart
from stretto.run.train.metrics import cut_records, json_line, recorded_steps

RESTARTS = "restarts.jsonl"


class Restarts:
    """The restarts of a job that trains in `folder`; None: it has none.

    Args:
        quiet: tell people on stderr, not on stdout.
    """

    def __init__(self, folder: Path | None, quiet: bool) -> None:
        self.folder, self._quiet = folder, quiet
        self.count = 0

    def progress(self) -> JobProgress:
        """How far the job is, by its records and its newest whole checkpoint."""
        if self.folder is None:
            return JobProgress(steps=0, saved=0)
        newest = newest_checkpoint(self.folder)
        return JobProgress(
            steps=recorded_steps(self.folder), saved=0 if newest is None else step_of(newest) or 0
        )

    def begin(self, restart: Restart) -> None:
        """Print and record a restart; records of steps that are trained again are dropped at once, so that
        the next ones show where the new attempt is.
        """
        print(restart.text, file=sys.stderr if self._quiet else sys.stdout, flush=True)
        if self.folder is None:
            return
        check_folder(self.folder)
        self.count = restart.number
        cut_records(self.folder, restart.saved)
        record = {
            "restart": restart.number,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "step": restart.step,
            "from_step": restart.saved,
            "rank": restart.failure.rank,
            "kind": restart.failure.kind,
            "error": restart.failure.name,
            "message": restart.failure.message,
        }
        with (self.folder / RESTARTS).open("a", encoding="utf-8") as file:
            file.write(json_line(record) + "\n")


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest intact checkpoint in a run's folder, by its manifest, or None."""
    intact = (path for path in checkpoints(folder / "checkpoints") if not quick_problems(path))
    return next(intact, None)
