"""The commands of README and of the pages that it leads to, run in order: shortened, on a tiny text."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import symtable
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.run import parse_args

from compared_here import command_here
from pages import (
    ROOT,
    Command,
    blocks,
    commands,
    run,
    run_here,
    scripts,
    sections,
    shortened,
    text_of,
    unprinted,
)
from stretto import run_ranks
from stretto.cli.main import COMMANDS
from stretto.run.compare import runs

pytestmark = pytest.mark.apart

# pages of which every command is run, and sections of others
PAGES = (
    "README.md",
    "docs/do/training.md",
    "docs/do/cluster.md",
    "docs/do/data.md",
    "docs/do/data-parallel.md",
    "docs/do/own-model.md",
    "docs/do/schedules.md",
    "docs/do/library.md",
    "docs/do/planning.md",
)
SECTIONS = [
    ("CONTRIBUTING.md", "Run the tests"),  # test_contributing.py runs what extends the package
    ("docs/do/prove.md", "Proving your own model"),
    ("docs/do/does-not-fit.md", "See what is in the way"),
    ("docs/do/does-not-fit.md", "Let the planner choose"),
    ("docs/do/does-not-fit.md", "Or change one thing at a time"),
    ("docs/do/migrating.md", "Plan for another framework"),
    ("docs/do/models.md", "Start from a published model"),
    ("docs/do/watching.md", "Hooks"),
    ("docs/do/watching.md", "Profile"),
    ("docs/do/long-runs.md", "Save often, and in the background"),
    ("docs/do/long-runs.md", "Guard against bad numbers"),
    ("docs/do/dlrm.md", "From a log to probabilities"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the reader's clone: the shipped configs, and some text."""
    folder = tmp_path_factory.mktemp("reader")
    for shipped in ("configs", "examples"):
        shutil.copytree(ROOT / shipped, folder / shipped)
    (folder / "text").mkdir()
    for name in ("argparse.py", "typing.py"):
        shutil.copy(Path(os.__file__).with_name(name), folder / "text" / name)
    (table,) = blocks(text_of("docs/do/planning.md"), "csv")
    (folder / "runs.csv").write_text(table, encoding="utf-8")
    for name, code in scripts().items():
        (folder / name).write_text(code, encoding="utf-8")
    return folder


def metrics(name: str, place: Path) -> str:
    return (place / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8")


def follow(command: Command, place: Path) -> None:
    """Run a command as a reader would, and hold its output to what the page shows of it."""
    argv = command.argv
    if argv[0] == "make":
        run([*argv, "--dry-run", "-C", str(ROOT)], place)
        return
    if "/" in argv[0]:
        assert os.access(ROOT / argv[0], os.X_OK), f"{argv[0]} cannot be run"
        return
    if argv[0] == "python" and len(argv) > 2:  # what later commands of the section read
        run(argv, place)
        return
    if argv[0] == "python":  # tests/examples runs it, and looks at what it prints
        assert (ROOT / argv[1]).exists(), f"{argv[1]} is not there"
        assert f'output("{Path(argv[1]).name}")' in text_of("tests/examples/test_examples.py")
        return
    if ">" in argv:  # the shell's
        argv = argv[: argv.index(">")]
    if argv[0] == "torchrun":  # tests/run/train/test_train_processes.py trains under it
        launch = parse_args(argv[1:])
        assert (launch.module, launch.training_script) == (True, "stretto.cli.main")
        argv = ["stretto", *launch.training_script_args, "run.name=node"]
    refused = any(line.startswith("error: ") for line in command.shown)
    typed = argv if refused else shortened(argv)
    goes_on = {"--resume", "run.name=mine"} <= set(argv)
    if goes_on:
        before = metrics("mine", place)
        step = json.loads(before.splitlines()[-1])["step"]
        typed.append(f"train.steps={step + 1}")
    with mock.patch.object(runs, "_stretto", command_here):  # tests/cli/test_cli_compare.py starts processes
        printed = run_here(typed, place, code=2 if refused else 0)
    if argv[1] == "prove":  # errors and seconds differ
        for line in (command.shown[0], command.shown[-1].partition(", ")[2]):
            assert line in printed, command.line
    if goes_on:  # a fresh run would have written other times
        after = metrics("mine", place)
        assert after.startswith(before), command.line
        assert json.loads(after.splitlines()[-1])["step"] == step + 1
    if argv[1] in ("layout", "schedule", "config"):  # the others print times, or numbers of the whole job
        assert not unprinted(command, printed), command.line


# ------------------------------------------------------------------ sections

SECTIONS += [(page, name) for page in PAGES for name, text in sections(page).items() if [*commands(text)]]
LONG = {  # run by hand
    *("From a log to probabilities", "Start from a published model", "What to change", "This machine"),
    *("Let the planner choose", "Plan for another framework"),
    *(
        "Profile",
        "Save often, and in the background",
        "Guard against bad numbers",
    ),  # as tests/run/train has them
    *("Plan", "Compare settings", "One rank of a huge layout, uneven layers, your own network"),
}
MINE = "run.name=mine"  # the run that later sections resume


def needs_mine(argv: list[str]) -> bool:
    return "runs/mine" in argv or {"--resume", MINE} <= set(argv)


def begin(page: str, place: Path) -> None:
    """Train the run that the page's sections resume, if it does not exist yet."""
    if not (place / "runs" / "mine").exists():
        follow(next(c for c in commands(text_of(page)) if MINE in c.argv and not needs_mine(c.argv)), place)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page", "heading"),
    [pytest.param(*section, marks=[pytest.mark.slow] if section[1] in LONG else []) for section in SECTIONS],
)
def test_the_commands_of_a_section_run(page: str, heading: str, place: Path) -> None:
    for command in commands(sections(page)[heading]):
        if needs_mine(command.argv):
            begin(page, place)
        follow(command, place)


def test_all_pages_have_commands() -> None:
    assert all(len([*commands(text_of(page))]) > 3 for page in PAGES)
    assert all([*commands(sections(page)[heading])] for page, heading in SECTIONS)


def test_the_page_of_planning_is_short() -> None:
    assert len(text_of("docs/do/planning.md").split()) < 1000, "the rest belongs into planning-evidence.md"


def test_what_layouts_take_on_the_page_of_what_does_not_fit(tmp_path: Path) -> None:
    """Every row's memory and step time, as the command above them predicts."""
    page = text_of("docs/do/does-not-fit.md")
    rows = re.findall(r"^\| [^|]+ \| `(tp=[^`]+)` \| ([\d.]+) GiB \| ([\d.]+) s \|$", page, re.MULTILINE)
    common = "stretto predict --model llama3-70b --cluster h100:64 batch=512 seq=8192 micro=1"
    assert len(rows) == page.count("GiB | ") == 7
    for layout, memory, seconds in rows:
        printed = run_here([*common.split(), *layout.split()], tmp_path)
        for name, figure in (("memory, device", f"{memory} GiB"), ("step time", f"{seconds} s")):
            assert re.search(rf"{name} +{re.escape(figure)} ", printed), f"{layout}:\n{printed}"


def test_every_command_is_on_the_page_of_commands() -> None:
    page = text_of("docs/reference/commands.md")
    assert not [name for name in COMMANDS if f"| `stretto {name}" not in page]


def test_the_training_loop_of_a_page_runs(place: Path) -> None:
    first, last = run_ranks(2, script_output, place / "my_loop.py")
    assert not first
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", last)]
    assert len(losses) == 5
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.slow
def test_the_exported_model_of_a_page_loads_in_transformers(place: Path) -> None:
    for command in commands(sections("docs/do/models.md")["Start from a published model"]):
        if not (place / "tuned").exists():
            follow(command, place)
    assert run(["python", "my_load.py"], place).startswith("def")


def script_output(path: Path) -> str:
    """The output of a script, run on this rank as torchrun would run it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


GENERATED = {"docs/reference/config.md", "docs/evidence/gpu-campaign.md"}
DOCS = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
PROSE = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    *sorted(DOCS - GENERATED),
]


@pytest.mark.parametrize("page", PROSE)
def test_prose_wraps_at_100(page: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "![", "<", "#", "    "))]
    assert not [line for line in lines if len(line) > 100 and " " in line.strip()]


def test_links_lead_somewhere() -> None:
    for page in PROSE:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text_of(page)):
            path = (ROOT / page).parent.joinpath(target) if target else ROOT / page
            assert path.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), f"{page}: #{anchor}"


def anchors(text: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ +(.+)$", outside, flags=re.MULTILINE)
    }


# folders that a path of a page may begin in
FOLDERS = ("", "src", "src/stretto", "src/stretto_interop", "tests", "docs", "benchmarks")
# where runs write, and what the reader has
ELSEWHERE = ("runs/", "text/", "hang/", "trace/", "tensorboard/", "profile/")


@pytest.mark.parametrize("page", PROSE)
def test_the_source_files_and_folders_that_a_page_names_are_there(page: str) -> None:
    """Files and folders in backticks; in a row of a table they may be in the folder that it begins with."""
    text = text_of(page)
    added = set(re.findall(r"^# (src/\S+\.py)$", text, flags=re.MULTILINE))
    missing = {
        path
        for line in text.splitlines()
        for path in re.findall(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+\.[a-z]+)?)(?:::\w+)?`", line)
        if path not in added and not path.startswith(ELSEWHERE) and not _is_there(path, line)
    }
    assert not missing


def _is_there(path: str, line: str) -> bool:
    row = re.findall(r"`([a-z_/]+)`", line.split("|")[1]) if line.startswith("|") else []
    return any((ROOT / base / path).exists() for base in (*FOLDERS, *(f"src/stretto/{name}" for name in row)))


@pytest.mark.parametrize("page", PROSE)
def test_the_modules_that_a_page_names_are_there(page: str) -> None:
    named = set(re.findall(r"`(stretto(?:\.\w+)+)", text_of(page)))
    missing = {name for name in named if not _is_in_source(name.split("."))}
    assert not missing


def _is_in_source(parts: list[str]) -> bool:
    """Whether a dotted name is a module or package, or a name that its module binds."""
    path = (ROOT / "src").joinpath(*parts)
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    *module, name = parts
    parent = (ROOT / "src").joinpath(*module)
    source = parent / "__init__.py" if parent.is_dir() else parent.with_suffix(".py")
    if not source.is_file():
        return False
    table = symtable.symtable(source.read_text(encoding="utf-8"), str(source), "exec")
    return name in table.get_identifiers()
