"""The tokens that come with the package: whole, described truly, and found by name."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.run.config.check import find_problems
from stretto.run.config.data import DataConfig
from stretto.run.config.load import parse
from stretto.run.config.sources import SAMPLE, SAMPLE_FOLDER, holds_tokens, token_folder
from stretto.run.data.build import build
from stretto.run.data.open import open_source, open_tokens
from stretto.run.data.token_folder import TokenFolder

ROOT = Path(__file__).parents[3]
README = (SAMPLE_FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sample() -> TokenFolder:
    opened = open_tokens(SAMPLE)
    assert isinstance(opened, TokenFolder)
    return opened


def test_it_is_opened_by_its_name(sample: TokenFolder) -> None:
    sample.verify()
    assert holds_tokens([SAMPLE])
    opened = open_source(DataConfig(source=SAMPLE))
    assert opened.identity() == sample.identity()
    assert opened.tokenizer().fingerprint == sample.fingerprint


def test_its_readme_is_true(sample: TokenFolder) -> None:
    counts = re.search(r"(\d+) documents, ([\d,]+) tokens", README)
    assert counts is not None
    assert (int(counts[1]), int(counts[2].replace(",", ""))) == (sample.documents, sample.size)
    assert f"{sample.vocab:,} tokens" in README
    assert " ".join(sample.index.source) in README
    assert sum(path.stat().st_size for path in SAMPLE_FOLDER.iterdir()) < 2_000_000


def git(*arguments: str) -> list[str]:
    """The lines that git prints; none where it fails."""
    if shutil.which("git") is None:
        return []
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def test_its_documents_are_the_files_of_its_commit(sample: TokenFolder) -> None:
    commit = re.search(r"\b[0-9a-f]{40}\b", README)
    assert commit is not None
    listed = git("ls-tree", "-r", commit[0])
    if not listed:
        pytest.skip("a copy without the history of git")
    files = dict(line.split("\t")[::-1] for line in listed)
    patterns = [pattern.replace("**/*", "*") for pattern in sample.index.source]
    there = {
        files[name].split()[2] for name in files if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    starts, tokenizer = sample.offsets[:].tolist(), sample.tokenizer()
    texts = [
        tokenizer.decode(sample.tokens[start : end - 1].tolist()).encode() for start, end in pairwise(starts)
    ]
    blobs = {hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest() for text in texts}
    assert blobs == there - {hashlib.sha1(b"blob 0\0").hexdigest()}


def test_a_file_or_folder_of_its_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert token_folder(SAMPLE) == SAMPLE_FOLDER
    Path(SAMPLE).write_text("a text of this name")
    assert not holds_tokens([SAMPLE])
    opened = open_source(DataConfig(source=SAMPLE, vocab=300, cache="cache"))
    assert opened.documents == 1
    Path(SAMPLE).unlink()
    text = Path("text.txt")
    text.write_text("another text")
    build(text, out=SAMPLE, vocab=300)
    assert token_folder(SAMPLE) == Path(SAMPLE)
    assert open_source(DataConfig(source=SAMPLE)).documents == 1


def test_it_is_no_text_to_be_tokenised(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="stretto-sample: tokens already"):
        build(SAMPLE, out=tmp_path / "out")


def test_a_misspelt_name_is_an_error_with_the_right_one() -> None:
    config = "model: {family: gpt, layers: 1, hidden: 64, heads: 1}\ndata: {source: %s}\n"
    assert not find_problems(parse(config % SAMPLE))
    (problem,) = find_problems(parse(config % "stretto-smaple"))
    assert (problem.field, problem.fix) == ("data.source", f"did you mean {SAMPLE}?")
    (problem,) = find_problems(parse(config % "python-sdtlib"))
    assert problem.fix == "did you mean python-stdlib?"


def test_all_files_of_the_package_are_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["stretto"]
    package = ROOT / "src/stretto"
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files - shipped if path.suffix != ".py"} == set()
