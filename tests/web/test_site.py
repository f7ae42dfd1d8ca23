"""The page as a folder of files: Python in a worker of the browser answers as it does here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from published_files import FOLDER
from stretto.cli import main
from stretto.program import names
from stretto.web.answers import reply_lines

PYODIDE = FOLDER / "pyodide"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (PYODIDE / "pyodide.asm.wasm").is_file():
        pytest.skip("make published fetches Pyodide")
    folder = tmp_path_factory.mktemp("site") / "page"
    assert main.run(["page", str(folder), "--pyodide", str(PYODIDE)]) == 0
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()


def here(question: dict[str, Any]) -> Any:
    """The answer of this process."""
    *parts, last = (json.loads(line) for line in reply_lines(json.dumps(question)))
    return last["answer"] or parts[-1]["part"]


def plan_question(model: str, cluster: str, batch: int, **more: Any) -> dict[str, Any]:
    """A search whose limit is work, which is counted: it ends at the same place on every machine."""
    return {"ask": "plan", "model": model, "cluster": cluster, "batch": batch, "seconds": 0.5, **more}


PLANS = [
    plan_question("gpt2-xl", "dgx-h100:8", 64, fix=["pp=2"]),
    plan_question("llama3-8b", "dgx-h100:16", 64, framework="megatron"),
    plan_question("llama3-8b", "dgx-a100-80gb:16", 64),
    plan_question("llama3-8b", "dgx-h100:8", 32, what_if=True),
    plan_question("llama3-8b", "h100:64", 256, fix=["tp=4"]),
    plan_question("llama3-70b", "dgx-h100:512", 512, seconds=1),
    plan_question("llama3-70b", "dgx-h100:64", 128, sequence=8192),
    plan_question("llama3-70b", "dgx-a100-80gb:256", 512, precision="fp16"),
    plan_question("mixtral-8x7b", "dgx-h100:64", 256),
    plan_question("deepseek-v3", "dgx-h100:512", 1024),
    plan_question("gpt3-175b", "dgx-a100-80gb:512", 1024, fix=["schedule=interleaved"]),
    plan_question("gpt2-xl", "dgx-h100:16", 128, asynchronous=True),
    plan_question("gpt2-xl", "dgx-h100:8", 64, wide=True),
    plan_question("llama3-8b", "dgx-h100:32", 256, fix=["pp=4"]),
    plan_question("llama3-8b", "dgx-h100:16", 64, software="tuned"),
    plan_question("llama3-8b", "dgx-h100:16", 64, framework="torchtitan"),
    plan_question("gpt2-xl", "dgx-h100:8", 48, precision="fp32"),
    plan_question("llama3-70b", "dgx-h100:8", 16),  # nothing fits without offload
    plan_question("mixtral-8x7b", "dgx-a100-80gb:32", 128, fix=["ep=8"]),
    plan_question("t5-3b", "tpu-v4-pod:32", 128),
]
QUICK = 2  # plans of the test that always runs


def without_clock(answer: Any) -> Any:
    """An answer without the seconds that a search took."""
    if isinstance(answer, dict):
        timed = {"search"} | ({"seconds"} if "candidates" in answer else set())
        return {key: without_clock(value) for key, value in answer.items() if key not in timed}
    return answer


def ask(page: Page, question: dict[str, Any]) -> Any:
    """The answer of the worker."""
    return page.evaluate("question => stretto.ask({...question, carried: false})", question)


@pytest.fixture
def worker(opened: Callable[..., Page], site: str) -> Page:
    page = opened(site)
    page.set_default_timeout(240_000)
    page.wait_for_selector("[data-ready]")  # carried by the page, unlike what is asked here
    return page


@pytest.mark.timeout(300)
def test_answers_of_the_worker_are_those_of_the_command_line(worker: Page) -> None:
    """Every schedule and some plans, to the last digit, under another version of Python and of libm."""
    for name in names():
        question = {"ask": "timeline", "programs": [{"name": name, "ranks": 4, "microbatches": 8}]}
        assert ask(worker, question) == here(question), name
    for question in PLANS[:QUICK]:
        assert without_clock(ask(worker, question)) == without_clock(here(question)), question


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plans_of_the_worker_are_those_of_the_command_line(worker: Page) -> None:
    for question in PLANS[QUICK:]:
        assert without_clock(ask(worker, question)) == without_clock(here(question)), question


def test_the_first_picture_does_not_wait_for_python(site: str, chromium: Browser) -> None:
    context = chromium.new_context()
    view = context.new_page()
    view.route("**/pyodide/**", lambda route: None)  # never answered
    view.goto(site)
    view.wait_for_selector("[data-ready]", timeout=20_000)
    view.get_by_text("starting Python").wait_for()
    assert view.get_by_role("table", name="The bubble, by definition").is_visible()
    context.close()


def test_a_page_that_is_opened_as_a_file_says_how_to_serve_it(
    opened: Callable[..., Page], folder: Path
) -> None:
    view = opened(folder / "index.html")
    view.wait_for_selector("[data-ready]")
    alert = view.get_by_role("alert")
    assert "opened as a file" in alert.inner_text()
    assert "python -m http.server" in alert.inner_text()
    # other questions get the same answer, in Chinese too
    view.get_by_label("Pipeline ranks").first.fill("6")
    view.get_by_label("Pipeline ranks").first.blur()
    view.locator("[role=alert]").nth(1).wait_for()
    chinese = opened(folder / "index.html", locale="zh-CN")
    chinese.wait_for_selector("[data-ready]")
    assert "此页面是以文件方式打开的" in chinese.get_by_role("alert").inner_text()


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "index.html").write_text("mine")
    assert main.run(["page", str(tmp_path), "--pyodide", str(PYODIDE)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main.run(["page", str(tmp_path / "new"), "--pyodide", str(tmp_path)]) == 2
    assert "npm pack pyodide" in capsys.readouterr().err
