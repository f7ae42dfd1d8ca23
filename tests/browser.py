"""Pages opened in a real headless Chromium, and scripts of tests run in them.

The browser is spoken to over a pipe, in its DevTools protocol: messages of JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
SECONDS = 60.0

# helpers for the test's script: what a reader's pointer and keys would do, sent to what they would hit
_HELPERS = """
const canvas = (panel) => document.querySelectorAll('canvas[tabindex]')[panel ?? 0];
const at = (x, y, panel) => {
  const box = canvas(panel).getBoundingClientRect();
  return {clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true};
};
const pointer = (kind, x, y, panel) =>
  canvas(panel).dispatchEvent(new PointerEvent(kind, {...at(x, y, panel), pointerId: 1}));
const wheel = (x, y, deltaY, more) =>
  canvas().dispatchEvent(new WheelEvent('wheel', {...at(x, y), deltaY, ...more}));
const key = (name, more) => canvas().dispatchEvent(new KeyboardEvent('keydown', {key: name, ...more}));
const pixel = (x, y, which) => {
  const seen = which ?? canvas(), ratio = window.devicePixelRatio || 1;
  return [...seen.getContext('2d').getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data];
};
const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
const shown = (panel) => ({...canvas(panel).parentElement.dataset});
const tip_ = document.getElementById('tip');
const tipText = () => (tip_.hidden ? null : tip_.innerText);
"""


class Browser:
    """One Chromium; pages are opened one after another. Skips the test where there is none."""

    def __init__(self) -> None:
        executable = next((path for name in NAMES if (path := shutil.which(name))), None)
        if executable is None:
            pytest.skip(f"no browser on PATH: one of {', '.join(NAMES)}")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self._out = os.pipe()
        self._in, writes = os.pipe()
        # the browser reads its file 3 and writes its file 4
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10) for number in (reads, writes)]
        quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        places = [(os.POSIX_SPAWN_DUP2, number, place) for number, place in zip(high, (3, 4), strict=True)]
        command = [executable, *FLAGS, f"--user-data-dir={self.folder.name}", "--window-size=1300,900"]
        self.process = os.posix_spawn(executable, command, os.environ, file_actions=[*quiet, *places])
        for number in (reads, writes, *high):
            os.close(number)
        self._rest = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError, RuntimeError):
            self.ask("Browser.close")
        until = time.monotonic() + 10
        while os.waitpid(self.process, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(self.process, signal.SIGKILL)
            time.sleep(0.01)
        os.close(self._in)
        os.close(self._out)
        self.folder.cleanup()

    def opened(self, page: str, script: str, picture: Path | None = None) -> Any:
        """Open the page, run `script` (the body of an async function) in it, give what it returns."""
        path = Path(self.folder.name) / "page.html"
        path.write_text(page, encoding="utf-8")
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable", session)
        self.ask("Log.enable", session)
        self.ask("Page.navigate", session, url=path.as_uri())
        self._wait("Page.loadEventFired", session)
        evaluated = self.ask(
            "Runtime.evaluate",
            session,
            expression=f"(async () => {{ {_HELPERS} {script} }})()",
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in evaluated, evaluated["exceptionDetails"]
        logged = [e for e in self.events if e["method"] == "Log.entryAdded" and e.get("sessionId") == session]
        errors = [e for e in logged if e["params"]["entry"]["level"] == "error"]
        assert not errors, errors
        if picture is not None:
            data = self.ask("Page.captureScreenshot", session)["data"]
            picture.write_bytes(base64.b64decode(data))
        self.ask("Target.closeTarget", targetId=target)
        return evaluated["result"].get("value")

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._out, content) :]
        until = time.monotonic() + SECONDS
        while True:
            answer = self._next(until)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _wait(self, method: str, session: str) -> None:
        until = time.monotonic() + SECONDS
        while not any(e["method"] == method and e.get("sessionId") == session for e in self.events):
            self._next(until)

    def _next(self, until: float) -> dict[str, Any]:
        """The next message; events are kept."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            content = os.read(self._in, 1 << 16) if ready else b""
            if not content:
                raise RuntimeError("the browser has left" if ready else "the browser does not answer")
            self._rest += content
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message
