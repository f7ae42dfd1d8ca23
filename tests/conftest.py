"""Settings of all tests."""

import gc
import os
import re
import signal
import tempfile
from collections.abc import Generator
from functools import cache
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

# One thread a process: workers share the cores with the ranks of their tests, and threads that wait for each
# other spin, taking the cores from those that compute. Set before torch is imported; processes that tests
# start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

import json_keys
from command_line import CommandLine
from stretto.cli.report import CommandReport
from stretto.run.launch import local

ROOT = Path(__file__).parents[1]

pytest_plugins = ["browser"]

# The time of an example depends on the load of the machine; no property is about speed. `pytest_configure`
# tries more of them where slow tests run too.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None)
settings.load_profile("quick")

# Tests neither read the user's measured profile of this machine nor write to it.
os.environ["XDG_CONFIG_HOME"] = os.path.join(tempfile.gettempdir(), "stretto-tests-have-no-profile")

# All tests of a worker fork their ranks from one server, which imports once, when it starts. What the server
# has not imported, every rank of every test would import again, for seconds each time.
local.PRELOAD = (
    *local.PRELOAD,
    "stretto.run.train.assemble",
    "stretto.run.train.async_step",
    "stretto.run.train.companions",
    "stretto.run.train.language_job",
    "stretto.run.train.warm",
    "stretto.verify.language.prove",
    "stretto.recommender.train.task",
    "stretto.recommender.train.job",
    "stretto.verify.recommender.prove",
    "stretto.recommender.train.registered",
    "stretto.cli.main",
    "torch._dynamo",  # imported by the first optimiser of a process
    "torch.export._trace",  # by layers of a split batch, 0.4 s a rank
    "torch.distributed.optim",  # with the next by models of torch's own parallelism, 0.4 s a rank
    "torch.distributed.pipelining",
    "stretto.prove",
    "stretto.verify.language.precision",
    "numpy.random",
    "numpy.ma",
    "hypothesis",
    "pytest",
)
set_forkserver_preload(list(local.PRELOAD))  # for a server that a test starts without `run_ranks`

# A shell starts what it runs in the background with Ctrl-C ignored; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take longest come first, so that no worker is left alone with one at the end.
LONGEST = (
    *("test_train_processes.py", "test_resume.py", "test_train_splits.py", "test_verify_layouts.py"),
    *("test_verify_every.py", "test_readme.py", "test_contributing.py", "test_pipeline_schedules.py"),
    *("test_train_schedules.py", "test_pipeline_recompute.py", "test_recommender_placements.py"),
    *("test_dryrun_run.py", "test_train_faults.py", "test_house.py"),
)
RANK = {name: rank for rank, name in enumerate(LONGEST)}


def pytest_configure(config: pytest.Config) -> None:
    """Workers import test files in other orders: what one has compiled, the others read from its cache."""
    if config.option.markexpr != "not slow":
        settings.load_profile("thorough")
    worker = getattr(config, "workerinput", None)
    if worker is not None and [Path(arg).resolve() for arg in config.args] == [ROOT / "tests"]:
        files = sorted((ROOT / "tests").rglob("test_*.py"))
        first = int(worker["workerid"].removeprefix("gw")) * len(files) // worker["workercount"]
        config.args = [str(file) for file in (*files[first:], *files[:first])]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Ten thousand tests and their modules stay to the end: no garbage collection need visit them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000, 10, 10)  # not 700: a sixteenth of the time of tests without ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (RANK.get(item.path.name, len(RANK)), item.path))


@cache
def is_apart(file: str) -> bool:
    """Whether the tests of a file may run on several workers."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return re.search(r"^pytestmark = .*mark\.apart", text, re.MULTILINE) is not None


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file go to one worker, since they share its fixtures; those of files marked `apart` go
    anywhere: they start processes of their own and mostly wait for them. pytest-xdist's groups would say the
    same, but 3.8 writes them where pytest from 9.2 on does not read them.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if is_apart(file) else file

    config.option.loadscopereorder = False  # the order above
    return ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture
def stretto(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """Runs a command line: `stretto("layout", "--world", "8")`."""
    return CommandLine(capsys)


@pytest.fixture(autouse=True, scope="session")
def _json_keys_are_listed() -> Generator[None]:
    """Every JSON object that a command prints in this process has the keys that the documentation lists."""
    print_report = CommandReport.print

    def checked(report: CommandReport, as_json: bool, *arguments: Any, **options: Any) -> None:
        if as_json:
            report.record = report.record() if callable(report.record) else report.record
            json_keys.check(report.record)
        print_report(report, as_json, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CommandReport, "print", checked)
        yield
