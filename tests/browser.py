"""Chromium for tests: one for all tests of a process. tests/conftest.py names this plugin."""

from __future__ import annotations

import shutil
from collections import defaultdict
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


@pytest.fixture(scope="session")
def blank_pages() -> dict[int, list[Page]]:
    """Pages that no test uses, by width. A new one costs a second, as a window of the browser does."""
    return defaultdict(list)


@pytest.fixture
def opened(chromium: Browser, blank_pages: dict[int, list[Page]]) -> Iterator[Callable[..., Page]]:
    """A function that opens an address; at the end no page had an error or asked another host."""
    used: list[tuple[int | None, Page, dict[Any, Callable[[Any], Any]]]] = []
    wrong = list[str]()

    def open_page(
        address: str | Path, width: int = 1280, color_scheme: Any = "light", **context: Any
    ) -> Page:
        url = address.as_uri() if isinstance(address, Path) else address
        if context or not blank_pages[width]:
            page = chromium.new_context(viewport={"width": width, "height": 900}, **context).new_page()
        else:
            page = blank_pages[width].pop()
        page.set_default_timeout(30_000)
        page.emulate_media(color_scheme=color_scheme)
        local = ("data:", "blob:", "/".join(url.split("/")[:3]))
        listeners: dict[Any, Callable[[Any], Any]] = {
            "pageerror": lambda error: wrong.append(str(error)),
            "console": lambda message: message.type == "error" and wrong.append(message.text),
            "request": lambda request: request.url.startswith(local) or wrong.append(request.url),
        }
        for event, listener in listeners.items():
            page.on(event, listener)
        used.append((None if context else width, page, listeners))
        page.goto(url)
        return page

    yield open_page
    for width, page, listeners in used:
        if width is None or page.is_closed() or wrong:
            page.context.close()
            continue
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        page.goto("about:blank")
        page.mouse.move(0, 0)
        blank_pages[width].append(page)
    assert not wrong
