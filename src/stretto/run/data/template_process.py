"""Processes that render chat templates, each with limits that the kernel holds (`template_renderer.py`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stretto.run.data import template_renderer
from stretto.run.data.template_renderer import LENGTH, LONGEST_ANSWER, MEMORY, OUT_OF_MEMORY

SECONDS = 5
"""CPU time for one conversation of up to 100 messages."""
PATIENCE_S = 60.0
"""Longest wait for an answer, generous because the machine may be busy."""
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class ProcessDied(Exception):
    """The process ended instead of answering, with the reason."""


class TemplateProcess:
    """A child process that has compiled some templates; ends with this object or this process."""

    def __init__(self, opening: Mapping[str, Any]) -> None:
        """Start it.

        Args:
            opening: `sources` and `variables` of the templates, and `now`.

        Raises:
            ProcessDied: it does not start, or compiling exceeds the limits.
        """
        near, far = socket.socketpair()
        with far:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    str(template_renderer.__file__),
                    json.dumps([p for p in sys.path if isinstance(p, str)]),
                ],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True,  # an interrupt at the terminal is this process's to handle
            )
        near.settimeout(PATIENCE_S)
        self.owner = os.getpid()
        self._socket, self._answers = near, near.makefile("rb")
        self.stop = weakref.finalize(self, _stop, near, self._process, self.owner)
        """Ends the process."""
        self.opened: dict[str, Any] = next(self.ask([json.dumps({**opening, "seconds": SECONDS}).encode()]))

    def ask(self, requests: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        """The answer to each request, in order.

        Args:
            requests: a line of JSON each.

        Raises:
            ProcessDied: at one of those that are not answered.
        """
        batch = b"\n".join(requests)
        try:
            self._socket.sendall(LENGTH.pack(len(batch)) + batch)
            left = len(requests)
            while left:
                lines, _, texts = self._read().partition(b"\0")
                at = 0
                for line in lines.splitlines():
                    answer = json.loads(line)
                    for sample in answer["samples"]:
                        at, length = at + sample[0], sample[0]
                        sample[0] = texts[at - length : at].decode()
                    left -= 1
                    yield answer
        except (OSError, EOFError, ValueError) as error:
            self.stop()
            raise ProcessDied(self._cause(error)) from None

    def _read(self) -> bytes:
        head = self._answers.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise EOFError
        (length,) = LENGTH.unpack(head)
        if length > LONGEST_ANSWER + (1 << 24):
            raise ValueError("too long an answer")
        if len(body := self._answers.read(length)) < length:
            raise EOFError
        return body

    def _cause(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"it does not end within {PATIENCE_S:.0f} s"
        code = self._process.returncode
        if code == -signal.SIGXCPU:
            return f"it takes more than {SECONDS} s of the processor"
        if code == OUT_OF_MEMORY:
            return f"it takes more than {MEMORY >> 20:,} MiB of memory"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process that renders it ended with {how}"


def _stop(near: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    near.close()
    if os.getpid() == owner:  # not in a fork of it
        process.kill()
        process.wait()
