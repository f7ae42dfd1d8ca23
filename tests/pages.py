"""The documentation pages: their code blocks, their commands, and how to run these as a reader would."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from stretto.cli import main

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(r"^```([\w{}]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# overrides that make any training job as small as possible
TINY = (
    *("model.layers=2", "model.hidden=32", "data.sequence=16", "train.vocab_multiple=1", "train.steps=2"),
    *(
        "batch.global_size=8",
        "batch.micro_size=2",
        "optim.rate.warmup=0",
        "eval.every=null",
        "sample.tokens=0",
    ),
    "data.vocab=300",
)

# and any recommender's
TINY_TABLES = ("batch.global_size=64", "train.steps=2", "eval.batches=1", "optim.rate.warmup=0")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str, *kinds: str) -> list[str]:
    """Texts of a page's fenced blocks of some kinds."""
    return [block[2] for block in _BLOCK.finditer(text) if block[1] in kinds]


def scripts() -> dict[str, str]:
    """Texts of the scripts that pages have the reader write, by file name."""
    (hooks,) = blocks(text_of("docs/do/watching.md"), "python")
    (load,) = blocks(text_of("docs/do/models.md"), "python")
    (proof,) = blocks(text_of("docs/do/prove.md"), "python")
    loop, *_notebook = blocks(text_of("docs/do/library.md"), "python")
    lessons = {
        name[1]: text
        for page in sorted((ROOT / "docs" / "learn").glob("*.md"))
        for text in blocks(page.read_text(encoding="utf-8"), "python")
        if (name := re.match(r"# (\w+\.py)\n", text))
    }
    return lessons | {"my_hooks.py": hooks, "my_load.py": load, "my_proof.py": proof, "my_loop.py": loop}


@dataclass(frozen=True)
class Command:
    """A command of a page, and the output that the page shows under it."""

    line: str
    shown: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def sections(page: str) -> dict[str, str]:
    """Texts of a page by the headings of its sections; the text before the first is under ""."""
    parts = re.split(r"^##+ +(.+)$", text_of(page), flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


def commands(text: str) -> Iterator[Command]:
    """Every command of a text in order: lines of `sh` blocks, and lines after `$ ` in `console` blocks."""
    for block in _BLOCK.finditer(text):
        if block[1] == "sh":
            lines = block[2].splitlines()
            yield from (Command(line) for line in lines if shlex.split(line, comments=True))
        elif block[1] == "console":
            for part in re.split(r"^\$ ", block[2], flags=re.MULTILINE)[1:]:
                line, *shown = part.splitlines()
                yield Command(line, tuple(shown))


def run(argv: list[str], folder: Path, code: int = 0, source: Path | None = None) -> str:
    """Output of a process that must end with `code`; scripts are those of this interpreter.

    source: the folder of the package, if it is not this checkout's.
    """
    if argv[0] == "python":
        argv = [sys.executable, *argv[1:]]
    elif argv[0] in ("stretto", "torchrun"):
        argv = [str(Path(sysconfig.get_path("scripts")) / argv[0]), *argv[1:]]
    keep = _variables(folder)
    if source is not None:
        keep["PYTHONPATH"] = str(source)
    done = subprocess.run(
        argv, cwd=folder, env=os.environ | keep, capture_output=True, text=True, timeout=240, check=False
    )
    return _output(argv, done.returncode, (done.stdout, done.stderr), code)


def run_here(argv: list[str], folder: Path, code: int = 0) -> str:
    """The same of a `stretto` command, in this process: PyTorch is imported already, here and in the server
    that ranks are forked from.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, _variables(folder)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        ended = main.run(argv[1:])
    return _output(argv, ended, (out.getvalue(), err.getvalue()), code)


_END = "-- the end of what one command has printed --"
_IN_TURN = f"""
import json, sys
from stretto.cli.main import run
for words in json.loads(sys.argv[1]):
    ended = run(words[1:])
    print({_END!r}, flush=True)
    if ended:
        sys.exit(ended)
"""


def run_in_turn(lines: list[list[str]], folder: Path, source: Path | None = None) -> list[str]:
    """Outputs of `stretto` commands, those of their ranks included, all in one process that imports PyTorch
    once; each must end with 0.

    source: the folder of the package, if it is not this checkout's.
    """
    printed = run(["python", "-c", _IN_TURN, json.dumps(lines)], folder, source=source)
    return printed.split(f"{_END}\n")[:-1]


def _variables(folder: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def _output(argv: list[str], ended: int, printed: Sequence[str], code: int) -> str:
    assert ended == code, f"{shlex.join(argv)} ended with {ended}:\n{printed[0][-2000:]}{printed[1][-3000:]}"
    return printed[0 if code == 0 else 1]


_NUMBER = re.compile(r"\d[\d.,]*(e[+-]?\d+)?")


def unprinted(command: Command, printed: str, *, numbers: bool = True) -> list[str]:
    """Lines that a page shows under a command, and that it did not print.

    numbers: whether they must be the same too, not only the words around them.
    """

    def plain(line: str) -> str:
        return line.rstrip() if numbers else " ".join(_NUMBER.sub("0", line).split())

    lines = {plain(line) for line in printed.splitlines()}
    return [line for line in command.shown if line not in ("", "...") and plain(line) not in lines]


def swapped(argv: list[str], **options: str) -> list[str]:
    """The words with other values of some options."""
    return [options.get(before.strip("-"), word) for before, word in zip(["", *argv], argv, strict=False)]


def shortened(argv: list[str]) -> list[str]:
    """The command with overrides that make its job tiny; its layout, text and name stay."""
    if argv[:2] == ["stretto", "data"]:
        return swapped(argv, vocab="512", samples="2000")
    if argv[:3] == ["stretto", "schedule", "auto"]:
        return swapped(argv, microbatches="4")
    if argv[:2] == ["stretto", "plan"] and "--fix" not in argv:
        return [*argv, "--seconds=0.5"]
    if argv[:2] == ["stretto", "verify"] and not {"--steps", "--layouts"} & {*argv}:
        argv = [*argv, "--steps=1"]
    if argv[:2] == ["stretto", "compare"] and "--predict" not in argv:
        given = ("train.steps", "eval.every", *(word.partition("=")[0] for word in argv))
        small = [word for word in TINY if word.partition("=")[0] not in given]
        once = ("--warmup=0", "--repeats=1", "--no-memory", "data.source=text/")
        return [*swapped(argv, steps="2"), *small, *once]
    if argv[:2] not in (["stretto", "train"], ["stretto", "verify"]):
        return argv
    if argv[2].endswith("tiny-llama/config.yaml"):  # it is tiny, and its model is that of the weights
        return [*(word for word in argv if "steps" not in word), "train.steps=2", "batch.global_size=2"]
    overridden = {word.split(".")[0] for word in argv}
    if argv[2] in ("configs/dlrm.yaml", "dlrm"):
        some = [word for word in argv if word not in ("--layouts", "all")]  # every placement takes a minute
        drawn = () if "data" in overridden else ("data.synthetic.samples=5000",)
        return [*some, *TINY_TABLES, *drawn]
    text = () if "data" in overridden else ("data.source=text/",)
    four = "layout" not in overridden and "configs/quickstart.yaml" in argv
    ranks = ("layout.dp=1",) if four else ()  # 2 instead of 4
    every = argv[1] == "verify" and "--layouts" in argv
    more = ("model.layers=1", "--steps=1", "--ranks=1") if every else ()
    from_file = "examples/my_model.yaml" in argv  # no other field than its arguments changes the model
    tiny = [word for word in TINY if not (from_file and word.startswith(("model.", "data.vocab")))]
    tiny += ["model.arguments={vocab: 1024, positions: 64, layers: 2}"] if from_file else []
    return [*swapped(argv, profile="1:2"), *tiny, *text, *ranks, *more]
