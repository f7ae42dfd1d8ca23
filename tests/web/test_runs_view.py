"""The studio in a browser: runs that grow, a training that is started, stopped and resumed, and a proof."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page, expect

from run_folders import HOSTILE, append, step, write_run
from stretto.view.trace import COMMUNICATION, Trace, TraceEvent, write_trace
from tiny_job import job_file

FAULTS = Path(__file__).parents[1] / "faults" / "planted"
SOURCES = Path(__file__).parents[2] / "src"

Studio = tuple[str, Path]  # the address, and the folder


@contextmanager
def started(folder: Path, **environment: str) -> Generator[tuple[str, int]]:
    """`stretto studio` of a folder, as a process of its own: its address and number; Ctrl-C ends it."""
    code = "from stretto.cli.main import main; main()"
    command = [sys.executable, "-c", code, "studio", str(folder), "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[Studio]:
    """The studio of an empty folder."""
    with started(tmp_path) as (address, _):
        yield address, tmp_path


def await_points(page: Page, least: int) -> int:
    """Wait until the loss has more points, and return their number."""
    points = 0
    for _ in range(1200):
        points = int(page.get_by_role("img", name="loss").get_attribute("data-points") or 0)
        if points > least:
            return points
        page.wait_for_timeout(100)
    raise AssertionError(f"{points} points")


def row(page: Page, name: str) -> Any:
    return page.get_by_role("row").filter(has=page.get_by_label(name, exact=True))


def test_curves_grow_and_runs_are_compared(studio: Studio, opened: Callable[..., Page]) -> None:
    address, folder = studio
    run = write_run(folder, "a", step(1), step(2), config="optim: {lr: 0.1}\ntrain: {steps: 4}\n")
    write_run(folder, "b", step(1), config=f"optim: {{lr: 0.2}}\ntrain: {{steps: 1}}\nx: '{HOSTILE}'\n")
    write_run(folder, HOSTILE, step(1))
    (folder / f"{HOSTILE}.yaml").write_text("train: {}\n")
    page = opened(address)
    assert "token" not in page.url
    expect(row(page, "runs/a")).to_contain_text("2/4")
    expect(page.get_by_label(f"runs/{HOSTILE}")).to_be_visible()  # a text
    expect(page.get_by_label("Config")).to_have_value(f"{HOSTILE}.yaml")
    page.get_by_label("runs/a", exact=True).check()
    loss = page.get_by_role("img", name="loss")
    expect(loss).to_have_attribute("data-points", "2")
    typing = page.get_by_label("Fields to override")
    typing.fill("optim.lr=1")
    append(run, step(3), step(4))
    expect(loss).to_have_attribute("data-points", "4")
    expect(row(page, "runs/a")).to_contain_text("finished")
    expect(typing).to_have_value("optim.lr=1")  # what is being typed stays
    page.get_by_label("runs/b", exact=True).check()
    expect(page.get_by_role("table", name="Fields in which the configs differ")).to_contain_text(
        "optim.lr0.10.2"
    )
    expect(loss.locator(".u-legend")).to_contain_text("runs/b")
    expect(page.locator("table").filter(has_text="Fields")).to_contain_text(HOSTILE)
    other = opened(f"{address}{page.url[page.url.index('#') :]}")  # a permalink
    expect(other.get_by_role("img", name="loss").locator(".u-legend")).to_contain_text("runs/b")
    page.get_by_role("button", name="中文").click()
    expect(page.get_by_role("heading", name="训练运行")).to_be_visible()


def write_trace_of(run: Path) -> None:
    """A measured step of a rank, beside its prediction."""
    (run / "trace").mkdir()
    events = (TraceEvent(0, "0F0", 0.0, 1.0), TraceEvent(0, "wait 0B0", 1.0, 2.0, COMMUNICATION))
    for name, source in (("step-1", "measured"), ("step-1.predicted", "replay")):
        text = write_trace(Trace((*events, TraceEvent(0, "0B0", 2.0, 4.0)), "1f1b", source))
        (run / "trace" / f"{name}.json").write_text(text)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("of_runs", "of_proofs"),
    [("dark", "light"), pytest.param("light", "dark", marks=pytest.mark.slow)],
)
def test_axe_finds_nothing_in_the_views_of_the_studio(
    studio: Studio,
    opened: Callable[..., Page],
    accessible: Callable[[Page], None],
    of_runs: str,
    of_proofs: str,
) -> None:
    """At 400 px, in either scheme: runs with curves, configs, a timeline and a hang; a proof that fails."""
    address, folder = studio
    job_file(folder)
    for name in "ab":
        run = write_run(folder, name, step(1), step(2), config=f"train: {{steps: 4, seed: {ord(name)}}}\n")
        (run / "hang").mkdir()
    write_trace_of(folder / "runs" / "a")
    page = opened(f"{address}#runs", width=400, color_scheme=of_runs)
    page.get_by_label("runs/a", exact=True).check()
    page.get_by_label("runs/b", exact=True).check()
    page.wait_for_selector("[data-ready]")
    page.get_by_role("button", name="Which rank do the others wait for?").first.click()
    page.locator("section pre").first.wait_for()
    accessible(page)
    page = opened(f"{address}#proofs", width=400, color_scheme=of_proofs)
    page.get_by_label("Fields to override").fill("layout.tp=3")
    page.get_by_role("button", name="Prove").click()
    expect(page.locator(".job")).to_contain_text("failed with exit code 2", timeout=60_000)
    accessible(page)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_is_started_stopped_and_resumed_from_the_page(
    studio: Studio, opened: Callable[..., Page]
) -> None:
    address, folder = studio
    path = job_file(folder)
    path.write_text(path.read_text().replace(str(folder / "runs"), "runs"))
    page = opened(address, width=400)
    page.set_default_timeout(120_000)
    expect.set_options(timeout=120_000)
    page.get_by_label("Fields to override").fill("layout.dp=2 train.steps=100 checkpoint.every=1000")
    page.get_by_role("button", name="Train", exact=True).click()
    page.get_by_label("runs/tiny", exact=True).check()
    expect(row(page, "runs/tiny")).to_contain_text("trains")
    await_points(page, await_points(page, 3))
    expect(page.get_by_role("img", name="memory of the host, peak").locator(".u-legend")).to_contain_text(
        "rank 1"
    )
    page.get_by_role("button", name="Stop runs/tiny").click()
    page.get_by_role("button", name="Go on training").click()
    page.get_by_role("button", name="Stop runs/tiny").click()
    page.get_by_role("button", name="Stop it").click()
    expect(row(page, "runs/tiny")).to_contain_text("stopped")
    expect(page.locator(".job").first).to_contain_text("stopped and saved")
    stopped = int(re.search(r"(\d+)/100", row(page, "runs/tiny").inner_text())[1])  # pyright: ignore
    assert 0 < stopped < 100
    page.get_by_role("button", name="Resume runs/tiny").click()
    expect(row(page, "runs/tiny")).to_contain_text("trains")
    await_points(page, stopped)
    expect(row(page, "runs/tiny")).to_contain_text("100/100")
    expect(row(page, "runs/tiny")).to_contain_text("finished")
    expect(page.locator(".job").first).to_contain_text("done")


@pytest.mark.slow
def test_a_proof_is_shown_as_it_goes(studio: Studio, opened: Callable[..., Page]) -> None:
    address, folder = studio
    job_file(folder)
    page = opened(f"{address}#proofs")
    expect.set_options(timeout=120_000)
    page.get_by_label("Fields to override").fill("layout.tp=2")
    page.get_by_role("button", name="Prove").click()
    expect(page.locator(".job")).to_contain_text("running")
    expect(page.locator(".outcome")).to_contain_text("Equal to one process")
    table = page.get_by_role("table", name="Largest relative difference")
    expect(table).to_contain_text("tp2")
    expect(table).to_contain_text("1.0e-09")
    expect(page.locator(".job pre")).to_contain_text("[1/1] equal")
    page.get_by_label("Fields to override").fill("layout.tp=3")
    page.get_by_role("button", name="Prove").click()
    expect(page.locator(".job")).to_contain_text("failed with exit code 2")
    expect(page.locator(".job pre")).to_contain_text("error:")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_proof_of_a_planted_fault_fails_with_its_cause(
    tmp_path: Path, opened: Callable[..., Page], accessible: Callable[[Page], None]
) -> None:
    """Gradients that are not summed over replicas, in a copy of the sources that the studio runs."""
    faults = yaml.safe_load((FAULTS / "engine_parallel.yaml").read_text())
    fault = next(each for each in faults if each["name"] == "gradients are not summed over replicas")
    shutil.copytree(SOURCES, tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    module = tmp_path / "src" / "stretto" / f"{fault['module'].replace('.', '/')}.py"
    text = module.read_text()
    assert text.count(fault["old"]) == 1
    module.write_text(text.replace(fault["old"], fault["new"]))
    (folder := tmp_path / "jobs").mkdir()
    job_file(folder)
    with started(folder, PYTHONPATH=str(tmp_path / "src")) as (address, _):
        page = opened(f"{address}#proofs", width=400)
        page.get_by_label("Fields to override").fill("layout.dp=2")
        page.get_by_role("button", name="Prove").click()
        expect(page.locator(".outcome")).to_contain_text("Differs from one process", timeout=240_000)
        expect(page.get_by_role("table", name="Largest relative difference")).to_contain_text("NO")
        expect(page.locator(".problem")).to_contain_text("dp2")
        expect(page.locator(".problem")).to_contain_text("the data-parallel reduction is missing")
        accessible(page)


def leaves(process: int) -> list[int]:
    """The processes below one that have no children, the busiest first."""
    children, seconds = defaultdict[int, list[int]](list), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(int(path.parent.name))
            seconds[int(path.parent.name)] = int(fields[11])
    found, below = list[int](), [process]
    while below:
        each = below.pop()
        below += children[each]
        found += [] if children[each] else [each]
    return sorted(found, key=seconds.__getitem__, reverse=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="ranks are found in /proc")
def test_a_rank_that_hangs_is_named(tmp_path: Path, opened: Callable[..., Page]) -> None:
    """A training of two ranks that the page has started, of which one is stopped by a signal."""
    path = job_file(tmp_path)
    path.write_text(path.read_text().replace(str(tmp_path / "runs"), "runs"))
    with started(tmp_path) as (address, process):
        page = opened(address)
        page.get_by_label("Fields to override").fill("layout.dp=2 train.steps=100000 train.hang_s=3")
        page.get_by_role("button", name="Train", exact=True).click()
        page.get_by_label("runs/tiny", exact=True).check(timeout=120_000)
        await_points(page, 5)
        os.kill(leaves(process)[0], signal.SIGSTOP)
        expect(row(page, "runs/tiny")).to_contain_text("(records of a hang)", timeout=120_000)
        expect(page.locator(".job").first).to_contain_text("failed", timeout=120_000)
        page.get_by_role("button", name="Which rank do the others wait for?").click()
        text = page.get_by_role("heading", name="Records of a hang").locator("..").locator("pre")
        expect(text).to_contain_text("ranks that hung:", timeout=120_000)
        expect(text).to_contain_text("stopped by a signal")


@pytest.mark.slow
def test_trainings_save_when_their_studio_ends(tmp_path: Path, opened: Callable[..., Page]) -> None:
    job_file(tmp_path)
    code = "from stretto.cli.main import main; main()"
    command = [sys.executable, "-c", code, "studio", str(tmp_path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        page = opened(process.stdout.readline().split()[-1])
        page.get_by_label("Fields to override").fill("train.steps=100000 checkpoint.every=100000")
        page.get_by_role("button", name="Train", exact=True).click()
        expect(row(page, "runs/tiny")).to_contain_text("trains", timeout=120_000)
        page.close()
        process.terminate()
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.count("a job of this studio ends")) == (0, 1), errors
    assert [*(tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*/manifest.json")]
