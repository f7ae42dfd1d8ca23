"""What README and CONTRIBUTING tell people to type, typed: shortened, on a tiny text, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md")

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# a training job as small as it can be, laid over whatever the page says
TINY = (
    *("model.layers=2", "model.hidden=32", "data.sequence=16", "train.vocab_multiple=1", "train.steps=2"),
    *(
        "batch.global_size=8",
        "batch.micro_size=2",
        "optim.rate.warmup=0",
        "eval.every=null",
        "sample.tokens=0",
    ),
    *("metrics.tensorboard=false", "data.vocab=300"),
)

# and a recommender's
TINY_TABLES = ("batch.global_size=64", "train.steps=2", "eval.batches=1", "optim.rate.warmup=0")


def blocks(page: str, *kinds: str) -> list[str]:
    """Texts of a page's fenced blocks of some kinds."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [found[2] for found in _BLOCK.finditer(text) if found[1] in kinds]


@dataclass(frozen=True)
class Command:
    """A command of a page, and the output that the page shows under it."""

    line: str
    shown: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def sections(page: str) -> dict[str, str]:
    """Texts of a page by the headings of its sections, those with commands."""
    text = (ROOT / page).read_text(encoding="utf-8")
    parts = re.split(r"^##+ +(.+)$", text, flags=re.MULTILINE)
    found = zip(["", *parts[1::2]], parts[::2], strict=True)
    return {heading: body for heading, body in found if list(commands(body))}


def commands(text: str) -> Iterator[Command]:
    """Every command of a text in order: lines of `sh` blocks, and lines after `$ ` in `console` blocks."""
    for found in _BLOCK.finditer(text):
        if found[1] == "sh":
            lines = found[2].splitlines()
            yield from (Command(line) for line in lines if shlex.split(line, comments=True))
        elif found[1] == "console":
            for part in re.split(r"^\$ ", found[2], flags=re.MULTILINE)[1:]:
                line, *shown = part.splitlines()
                yield Command(line, tuple(shown))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the reader's clone is: the shipped configs, and some text of one's own."""
    folder = tmp_path_factory.mktemp("reader")
    for shipped in ("configs", "examples"):
        shutil.copytree(ROOT / shipped, folder / shipped)
    (folder / "text").mkdir()
    for name in ("argparse.py", "typing.py"):
        shutil.copy(Path(os.__file__).with_name(name), folder / "text" / name)
    (loop,) = blocks("README.md", "python")
    (folder / "my_loop.py").write_text(loop)
    return folder


def run(words: list[str], folder: Path, code: int = 0) -> str:
    """Output of a command that must end with `code`; scripts are those of this interpreter."""
    if words[0] == "python":
        words = [sys.executable, *words[1:]]
    elif words[0] in ("stretto", "torchrun"):
        words = [str(Path(sysconfig.get_path("scripts")) / words[0]), *words[1:]]
    keep = {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=folder, env=os.environ | keep, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, (
        f"{shlex.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    )
    return done.stdout if code == 0 else done.stderr


def swapped(words: list[str], **options: str) -> list[str]:
    """The words with other values of some options."""
    return [options.get(before.strip("-"), word) for before, word in zip(["", *words], words, strict=False)]


def shortened(words: list[str]) -> list[str]:
    """The command on one machine, with a tiny job laid over it; its own layout, text and name stay."""
    if words[:2] == ["stretto", "data"]:
        return swapped(words, vocab="512", samples="2000")
    if words[0] == "torchrun":
        words = [*swapped(words, nnodes="1", **{"rdzv-endpoint": "localhost:0"}), "run.name=node"]
    elif words[:2] not in (["stretto", "train"], ["stretto", "verify"]):
        return words
    own = {word.split(".")[0] for word in words}
    if "configs/dlrm.yaml" in words:
        some = [word for word in words if word not in ("--layouts", "all")]  # every placement takes a minute
        drawn = () if "data" in own else ("data.synthetic.samples=5000",)
        return [*some, *TINY_TABLES, *drawn]
    text = () if "data" in own else ("data.source=text/",)
    four = "layout" not in own and "configs/quickstart.yaml" in words
    ranks = ("layout.dp=1",) if four else ()  # 2 instead of 4
    more = ("model.layers=1", "--steps=1", "--ranks=1") if words[1] == "verify" else ()
    return [*words, *TINY, *text, *ranks, *more]


def steps_of(name: str, place: Path) -> int:
    """The last step of a run."""
    lines = (place / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return int(json.loads(lines[-1])["step"])


def follow(command: Command, place: Path) -> None:
    """Run a command as a reader would, and hold its output to what the page shows of it."""
    words = command.words
    if words[0] == "make":
        run([*words, "--dry-run", "-C", str(ROOT)], place)
        return
    if "/" in words[0]:
        assert os.access(ROOT / words[0], os.X_OK), f"{words[0]} cannot be run"
        return
    if ">" in words:  # the shell's
        words = words[: words.index(">")]
    refused = any(line.startswith("error: ") for line in command.shown)
    typed = words if refused else shortened(words)
    goes_on = {"--resume", "run.name=mine"} <= set(words)
    if goes_on:
        typed.append(f"train.steps={steps_of('mine', place) + 1}")
    printed = run(typed, place, code=2 if refused else 0)
    assert "resumed from" in printed or not goes_on, command.line
    if words[1] in ("layout", "schedule", "config"):  # the others print times, or numbers of the whole job
        lines = [line.rstrip() for line in printed.splitlines()]
        missing = [line for line in command.shown if line not in ("", "...", *lines)]
        assert not missing, command.line


# ------------------------------------------------------------------ sections

SECTIONS = [(page, heading) for page in PAGES for heading in sections(page)]
MINE = "run.name=mine"  # the run that later sections go on from


def needs_mine(words: list[str]) -> bool:
    return "runs/mine" in words or {"--resume", MINE} <= set(words)


def begin(page: str, place: Path) -> None:
    """The run that the page's sections go on from, if it is not there yet."""
    if not (place / "runs" / "mine").exists():
        whole = "".join(sections(page).values())
        follow(next(c for c in commands(whole) if MINE in c.words and not needs_mine(c.words)), place)


@pytest.mark.apart
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "heading"), SECTIONS)
def test_the_commands_of_a_section_are_true(page: str, heading: str, place: Path) -> None:
    for command in commands(sections(page)[heading]):
        if needs_mine(command.words):
            begin(page, place)
        follow(command, place)


def test_all_pages_have_commands() -> None:
    assert {page for page, _ in SECTIONS} == set(PAGES)
    assert all(len([*commands((ROOT / page).read_text(encoding="utf-8"))]) > 3 for page in PAGES)


def test_the_loop_of_ones_own_runs(place: Path) -> None:
    printed = run(["torchrun", "--standalone", "--nproc-per-node", "2", "my_loop.py"], place)
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < 0.6 * losses[0]


def test_the_new_schedule_of_contributing_is_one() -> None:
    code = "\n".join(blocks("CONTRIBUTING.md", "python"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Bubble(" in done.stdout


def test_links_lead_somewhere() -> None:
    pages = [*PAGES, "docs/design.md"]
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
