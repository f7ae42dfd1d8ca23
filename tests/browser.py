"""Chromium for tests: one for all tests of a process. tests/conftest.py names this plugin."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip(f"no browser on PATH: one of {', '.join(NAMES)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """A function that opens an address; at the end no page had an error or asked another host."""
    contexts, wrong = [], list[str]()

    def open_page(address: str | Path, width: int = 1280, **context: Any) -> Page:
        url = address.as_uri() if isinstance(address, Path) else address
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, **context))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        origin = "/".join(url.split("/")[:3])
        local = ("data:", "blob:", origin)
        page.on("request", lambda request: request.url.startswith(local) or wrong.append(request.url))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong
