"""What agents read: AGENTS.md, llms.txt and the skills, whose commands are typed from an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import json_keys
from pages import ROOT, blocks
from stretto.cli.main import UsageError, app

SKILLS = sorted(path.parent.name for path in (ROOT / "skills").glob("*/SKILL.md"))
LLMS = (ROOT / "llms.txt").read_text(encoding="utf-8")
FAST = ("migrate",)  # without torch, in seconds


def skill(name: str) -> str:
    return (ROOT / "skills" / name / "SKILL.md").read_text(encoding="utf-8")


def stretto_commands(block: str) -> list[list[str]]:
    """The commands of a block, without redirections, the texts of files, and what follows ||."""
    lines = re.sub(r"<<'END'\n.*?\nEND\n", "\n", block, flags=re.DOTALL).splitlines()
    lines = [re.split(r" > | \|\| ", line)[0] for line in lines]
    return [shlex.split(line)[1:] for line in lines if line.startswith("stretto ")]


def test_five_skills() -> None:
    assert SKILLS == ["diagnose", "learn", "migrate", "plan", "prove"]


@pytest.mark.parametrize("name", SKILLS)
def test_a_skill_has_the_published_form(name: str) -> None:
    text = skill(name)
    assert text.count("\n") < 120
    _, head, body = text.split("---\n", 2)
    about: dict[str, Any] = yaml.safe_load(head)
    assert set(about) == {"name", "description"}
    assert about["name"] == name
    assert 40 < len(about["description"]) <= 1024
    assert "Use " in about["description"], "when an agent should take it"
    assert body.startswith("\n# ")
    assert all(len(line) <= 110 or "|" in line or line.startswith("stretto ") for line in body.splitlines())


@pytest.mark.parametrize("name", SKILLS)
def test_commands_parse_and_their_keys_are_listed(name: str) -> None:
    """Options exist, and each key of a table is one that a command of its section prints."""
    root = get_command(app)
    checked = 0
    for section in skill(name).split("\n## ")[1:]:
        titles = list[list[str]]()
        for block in blocks(f"## {section}", "sh"):
            for argv in stretto_commands(block):
                try:
                    command = root
                    rest, path = argv, list[str]()
                    while hasattr(command, "commands") or command is root:
                        path.append(rest[0])
                        command = command.get_command(None, rest[0])  # pyright: ignore
                        assert command is not None, argv
                        rest = rest[1:]
                    command.make_context(" ".join(path), list(rest), resilient_parsing=False)
                except UsageError as error:
                    raise AssertionError(f"{argv}: {error}") from None
                if "--json" in argv:
                    titles.append(path)
        for key in re.findall(r"^\| `([\w.\[\]]+)` \|", section, re.MULTILINE):
            assert any(listed(key, path) for path in titles), f"{key} is no key of {titles}"
            checked += 1
    assert checked > 3


def listed(key: str, command: list[str]) -> bool:
    """True if docs/reference/json.md lists the key in a section of the command."""
    path, _, last = key.rpartition(".")
    return any(
        f"{last}{mark}" in keys.get(path or "$", ())
        for title, keys in json_keys.sections().items()
        if json_keys.title_words(title) == command
        for mark in ("", "?")
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in SKILLS]
)
def test_the_commands_of_a_skill_work_in_an_empty_folder(name: str, tmp_path: Path) -> None:
    """As they stand: each block is a script that ends with its first failure."""
    environment = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"}
    for block in blocks(skill(name), "sh"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def test_llms_txt_leads_to_every_page() -> None:
    """The form of llmstxt.org: a title, a summary, sections of links with a line each."""
    title, summary = LLMS.split("\n\n")[:2]
    assert title == "# Stretto"
    assert summary.startswith("> ")
    links = re.findall(r"^- \[[^\]]+\]\(([^)#]+)\): \S.*$", LLMS, re.MULTILINE)
    assert len(links) == LLMS.count("\n- ") == len(set(links))
    assert all((ROOT / link).is_file() for link in links)
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    # the site's lists of pages, what it makes of code, and what lies at the root
    texts = {
        path: text
        for path, text in texts.items()
        if not re.search(r"^(```{(toctree|eval-rst)}|Source: )", text, re.MULTILINE)
    }
    pages = {str(path.relative_to(ROOT)) for path in texts}
    pages = {page for page in pages if not page.startswith("docs/learn/")}  # its list is docs/learn/index.md
    pages |= {f"skills/{name}/SKILL.md" for name in SKILLS}
    assert pages - set(links) == set()


def test_agents_md_names_what_is_there() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert text.count("\n") < 80
    for path in re.findall(r"`((?:src|tests|docs|skills|configs|examples|changelog\.d)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"\bmake (\w+)", text)) <= set(targets)
