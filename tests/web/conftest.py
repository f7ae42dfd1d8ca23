"""The page in a real browser: one server and one Chromium for all tests of a process.

The server speaks the studio's protocol without its token, so that a test of a view needs no studio.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import as_file
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from published_files import FOLDER
from stretto.view.page import FRONT, studio_page
from stretto.web.answers import QUESTIONS_ALONE, reply_lines


@pytest.fixture(scope="session")
def page_address() -> Iterator[str]:
    """The address of the page, answered by this process."""
    with as_file(FRONT) as front:

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(front))

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def reply(self, content: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                if self.path.partition("?")[0] == "/":
                    self.reply(studio_page().encode(), "text/html")
                else:
                    super().do_GET()

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["content-length"])).decode()
                answers = {"questions": lambda _: {"questions": QUESTIONS_ALONE}}
                lines = reply_lines(text, answers) if text == '{"ask":"questions"}' else reply_lines(text)
                self.send_response(200)
                self.end_headers()
                for line in lines:
                    self.wfile.write(line.encode() + b"\n")
                    self.wfile.flush()

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def accessible() -> Callable[[Page], None]:
    """A function that asserts that axe finds nothing in a page, and that it is as wide as its window."""
    path = FOLDER / "axe" / "axe.min.js"
    if not path.is_file():
        pytest.skip("make published fetches axe")

    def check(page: Page) -> None:
        expect(page.locator("[aria-busy=true]")).to_have_count(0, timeout=30_000)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.evaluate(path.read_text(encoding="utf-8"))
        violations = page.evaluate("axe.run().then((result) => result.violations)")
        assert not [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in violations]

    return check
