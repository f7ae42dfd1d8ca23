"""A release: fragments that towncrier knows, and a workflow without tokens that checks what it uploads."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TOWNCRIER = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
KINDS = [kind["directory"] for kind in TOWNCRIER["type"]]
WORKFLOW = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
JOBS: dict[str, Any] = yaml.safe_load(WORKFLOW)["jobs"]


def problem(name: str, text: str) -> str | None:
    """What is wrong with a fragment; None if nothing is."""
    if not re.fullmatch(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(KINDS)})\.md", name):
        return f"{name}: the name is not NUMBER.KIND.md or +WORDS.KIND.md, KIND one of {', '.join(KINDS)}"
    if not text.strip() or "\n" in text.strip() or len(text) > 300:
        return f"{name}: not one line of at most 300 characters"
    return None


def test_fragments_are_legal() -> None:
    folder = ROOT / TOWNCRIER["directory"]
    found = [path for path in folder.iterdir() if path.name not in TOWNCRIER["ignore"]]
    assert not [text for path in found if (text := problem(path.name, path.read_text(encoding="utf-8")))]
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(\w+)`", readme)) >= set(KINDS)
    changelog = (ROOT / TOWNCRIER["filename"]).read_text(encoding="utf-8")
    assert changelog.count(TOWNCRIER["start_string"]) == 1


@pytest.mark.parametrize(
    ("name", "text", "legal"),
    [
        ("12.plan.md", "`plan` is faster.\n", True),
        ("+short-words.fixed.md", "A line.", True),
        ("12.feature.md", "A line.", False),
        ("plan.md", "A line.", False),
        ("12.plan.rst", "A line.", False),
        ("12.plan.md", "Two\nlines.", False),
        ("12.plan.md", "\n", False),
    ],
)
def test_illegal_fragments_are_seen(name: str, text: str, legal: bool) -> None:
    assert (problem(name, text) is None) == legal


def test_the_upload_follows_the_checks_and_holds_no_token() -> None:
    needs = {name: job.get("needs") for name, job in JOBS.items()}
    assert needs == {"build": None, "check": "build", "publish": "check", "describe": "publish"}
    assert yaml.safe_load(WORKFLOW)["permissions"] == {"contents": "read"}
    assert "secrets." not in WORKFLOW
    assert "password" not in WORKFLOW
    trusted = [name for name, job in JOBS.items() if job.get("permissions", {}).get("id-token") == "write"]
    assert trusted == ["publish"]
    assert JOBS["publish"]["environment"] == "release"
    assert not [step for step in JOBS["publish"]["steps"] if "run" in step], (
        "only actions may use the identity"
    )


def test_the_wheel_is_checked_without_a_checkout() -> None:
    """From an empty folder and the artefact alone, first without torch."""
    steps = JOBS["check"]["steps"]
    assert not [step for step in steps if "checkout" in step.get("uses", "")]
    commands = [step["run"] for step in steps if "run" in step]
    assert [command.split()[0] for command in commands] == ["pip", "stretto", "pip", "stretto"]
    assert commands[0] == "pip install dist/*.whl"
    assert commands[3].startswith("stretto train quickstart")
