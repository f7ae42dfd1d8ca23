"""The tasks of exercises in English and Chinese, and how `stretto learn` chooses between them."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import pytest

from command_line import CommandLine
from stretto.learn.catalogue import EXERCISES, TASKS

# of the English text that each Chinese one translates
TRANSLATED = {
    "bugs": "4edf94e007a5",
    "cut": "a94582553fe3",
    "ddp": "0d885ca5cec0",
    "pipeline": "5a8fa0b8ef43",
    "plan": "6c1ea0ebc3c3",
    "recompute": "52faf6ec8b8a",
    "ring": "3a2436da6079",
    "schedule": "f9825984cf68",
    "sequence": "e29714d204b1",
    "tables": "43c5861ad094",
    "tensor": "f12d7234ebbe",
    "zero1": "d468e14b6754",
}


def digest(name: str) -> str:
    return sha256((TASKS / "en" / f"{name}.md").read_bytes()).hexdigest()[:12]


def test_every_task_has_its_chinese() -> None:
    names = {exercise.name for exercise in EXERCISES}
    assert {path.stem for path in (TASKS / "en").iterdir()} == names
    assert {path.stem for path in (TASKS / "zh").iterdir()} == names
    stale = {name: digest(name) for name in sorted(names) if TRANSLATED.get(name) != digest(name)}
    assert not stale, "renew the Chinese of these, then their digests in TRANSLATED"


def literals(text: str) -> list[str]:
    """What is the same in every language: code, and the years of papers."""
    text = " ".join(text.split())
    return sorted(set(re.findall(r"`[^`]+`|arXiv [\d.]+|\b(?:19|20)\d\d\b", text)))


@pytest.mark.parametrize("name", [exercise.name for exercise in EXERCISES])
def test_a_chinese_task_has_the_code_and_the_sources_of_the_english(name: str) -> None:
    english, chinese = ((TASKS / each / f"{name}.md").read_text(encoding="utf-8") for each in ("en", "zh"))
    assert literals(chinese) == literals(english)
    assert english.count("\n- ") == chinese.count("\n- ")
    assert len(re.findall("[\u4e00-\u9fff]", chinese)) > 100


@pytest.mark.parametrize(
    ("options", "environment", "lesson"),
    [
        ([], {}, "data parallel"),
        ([], {"LANG": "zh_CN.UTF-8"}, "数据并行"),
        ([], {"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "data parallel"),
        (["--lang", "zh"], {}, "数据并行"),
        (["--lang", "en"], {"LANG": "zh_CN.UTF-8"}, "data parallel"),
    ],
)
def test_the_language_is_that_of_the_option_or_of_the_environment(
    options: list[str],
    environment: dict[str, str],
    lesson: str,
    stretto: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert stretto.json("learn", *options)["exercises"][0]["lesson"] == lesson
    begun = stretto.json("learn", "ddp", *options)
    assert begun["lesson"] == lesson
    assert ("每个 rank" in begun["task"]) == (lesson == "数据并行")
