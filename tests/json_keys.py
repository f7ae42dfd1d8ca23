"""The keys of `--json`, as docs/reference/json.md lists them.

`conftest.py` checks the object of every command that a test runs in its own process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from stretto.cli.main import UsageError

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "json.md"

Listing = dict[str, frozenset[str]]  # keys by the path of their object; a key that may be absent ends in ?


@cache
def sections() -> dict[str, Listing]:
    """The listings of the page by the titles of their sections."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^## ([^\n]+)\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("\n## "), "a section without a listing"
    return {title: listing(block) for title, block in blocks}


def listing(block: str) -> Listing:
    lines = re.sub(r"\n +", " ", block).splitlines()
    return {path: frozenset(keys.split()) for path, _, keys in (line.partition(": ") for line in lines)}


def differences(value: Any, listed: Listing, path: str = "$") -> Iterator[str]:
    """Yield what a JSON value has or lacks against a listing."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from differences(item, listed, f"{path}[]")
    if not isinstance(value, Mapping) or not value:
        return
    keys = listed.get(path)
    if keys is None:
        yield f"{path} is an object with the keys {sorted(value)}"
        return
    if "..." in keys:
        return
    below = "" if path == "$" else f"{path}."
    for key, inner in value.items():
        if not {str(key), f"{key}?", "*"} & keys:
            yield f"{path} has the key {key}"
        else:
            yield from differences(inner, listed, f"{below}{'*' if '*' in keys else key}")
    absent = sorted(key for key in keys if key not in value and not key.endswith("?") and key != "*")
    if absent:
        yield f"{path} lacks {', '.join(absent)}"


def check(record: Any) -> None:
    """Check what the running command prints against its sections: those whose title begins with its words.

    Raises:
        AssertionError: a key that the page does not list, or a listed one that is absent.
    """
    # typer has a copy of click of its own in recent versions
    click = import_module(UsageError.__module__.replace("exceptions", "globals"))
    command = click.get_current_context().command_path.split()[1:]
    matching = {
        title: keys
        for title, keys in sections().items()
        if title_words(title) == command[: len(title_words(title))]
    }
    assert matching, f"{PAGE.name} has no section for `{' '.join(command)}`"
    compared = {title: [*differences(record, keys)] for title, keys in matching.items()}
    nearest = min(compared, key=lambda title: len(compared[title]))
    assert not compared[nearest], f"{PAGE.name}, {nearest}: {'; '.join(compared[nearest])}"


def title_words(title: str) -> list[str]:
    """The command of a section's title, without its options and the kind of its result."""
    return re.split(r":| --", title)[0].split()
