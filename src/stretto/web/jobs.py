"""Child processes of the studio: `stretto train` and `stretto verify`, with their output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from shlex import join, split
from typing import Any, Literal

from stretto.errors import StrettoError
from stretto.web.folder import StudioFolder

_STRETTO = (sys.executable, "-c", "from stretto.cli.main import main; main()")
MOST_LINES = 2_000  # of a job's output; earlier ones are forgotten
_LARGEST_RESULT = 64 << 20  # bytes
_FIELD = re.compile(r"[A-Za-z_][\w.-]*=.*", re.DOTALL)  # of a config, and no option

JobKind = Literal["train", "verify"]


class StudioJob:
    """A running or ended command.

    Args:
        arguments: the words after `stretto`. Of a proof, the object that --json prints becomes `result`.
    """

    def __init__(self, number: int, kind: JobKind, arguments: Sequence[str], folder: StudioFolder) -> None:
        self.number, self.kind = number, kind
        self.command = join(["stretto", *arguments])
        self.lines = deque[str](maxlen=MOST_LINES)
        self.count = 0  # of all lines
        self._result = tempfile.TemporaryFile() if kind == "verify" else None  # noqa: SIM115
        self.process = subprocess.Popen(
            [*_STRETTO, *arguments],
            cwd=folder.root,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"},
            stdin=subprocess.DEVNULL,
            stdout=self._result or subprocess.PIPE,
            stderr=subprocess.PIPE if self._result else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the studio's terminal is the studio's alone
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        output = self.process.stderr if self._result else self.process.stdout
        assert output is not None
        for line in output:
            self.lines.append(line.decode(errors="replace").rstrip("\r\n"))
            self.count += 1

    @property
    def code(self) -> int | None:
        """The exit code, or None while it runs or its output is being read."""
        code = self.process.poll()
        return None if self._reading.is_alive() else code

    def result(self) -> Mapping[str, Any] | None:
        """Return the object that an ended proof has printed, or None."""
        if self._result is None or self.code is None:
            return None
        self._result.seek(0)
        with suppress(ValueError):
            return json.loads(self._result.read(_LARGEST_RESULT))
        return None

    def stop(self) -> None:
        """Ask it to end: a training saves first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM if self.kind == "train" else signal.SIGINT)

    def record(self, lines: int) -> dict[str, Any]:
        """Return the job with the last lines of its output, for a page."""
        shown = [*self.lines][-lines:]
        state = {
            "command": self.command,
            "code": self.code,
            "lines": shown,
            "earlier": self.count - len(shown),
        }
        return {"job": self.number, "kind": self.kind, **state}


class StudioJobs:
    """All jobs of a studio, by number."""

    def __init__(self, folder: StudioFolder) -> None:
        self._folder = folder
        self._jobs = list[StudioJob]()

    def __iter__(self):
        return iter(self._jobs)

    def start(self, kind: JobKind, *arguments: str) -> StudioJob:
        """Start a command of this kind."""
        job = StudioJob(len(self._jobs), kind, [kind, *arguments], self._folder)
        self._jobs.append(job)
        return job

    def find(self, number: Any) -> StudioJob:
        """Return the job of this number.

        Raises:
            StrettoError: there is none.
        """
        if not isinstance(number, int) or not 0 <= number < len(self._jobs):
            raise StrettoError(f"this studio has no job {number!r}", hint="it was started again since")
        return self._jobs[number]

    def running(self) -> list[StudioJob]:
        return [job for job in self._jobs if job.process.poll() is None]


def config_arguments(folder: StudioFolder, config: Any, overrides: Any) -> list[str]:
    """Return a config of the folder and overrides, "a.b=c d=e", as arguments of a command.

    Raises:
        StrettoError: the config is not in the folder, or an override is not of the form a.b=c.
    """
    path = folder.path(config)
    if not path.is_file():
        raise StrettoError(f"there is no config {config!r}", hint="choose one of the folder")
    try:
        fields = split(str(overrides or ""))
    except ValueError as error:
        raise StrettoError(f"the overrides {overrides!r} have {error}", hint="close the quotation") from None
    for field in fields:
        if not _FIELD.fullmatch(field):
            raise StrettoError(f"{field!r} sets no field", hint="write a.b=c, as in optim.lr=3e-4")
    return [f"./{folder.name(path)}", *fields]
