"""Finds the places of planted faults again after the sources changed.

    python tests/faults/anchor.py REF [--dry-run]

A fault quotes a piece of a module. If the module no longer has it once, the fault is planted in the module as
it was at REF, and what that changes is merged, token by token, into the sources as they are: into the file
that git takes for the same one, else into the function or class that is most like the one with the fault.
The entry's `module`, `old` and `new` are rewritten if that succeeds and the fault can be planted; others are
listed, to be mended by hand. Read the diff of tests/faults/planted before you commit it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import yaml

from faults import FAULTS, FOLDER, ROOT, Fault, problems

TOKEN = re.compile(r"\w+|\s+|.")
ALIKE = 0.5  # share of tokens that two definitions have in common, from which one may be the other


def find_place(fault: Fault, ref: str) -> Fault | None:
    """The fault at its new place; None if no merge is without conflict."""
    before = read_at(ref, fault.source)
    if before is None or before.count(fault.old) != 1:
        return None
    renamed = renames(ref).get(f"src/{fault.source}", f"src/{fault.source}")
    for module, text, old_text in candidates(fault, before, renamed):
        merged = merge(old_text, text, old_text.replace(fault.old, fault.new))
        if merged is None or merged == text:
            continue
        source = sources()[module]
        old, new = quote(source, source.replace(text, merged))
        moved = replace(fault, module=module, old=old, new=new)
        if not problems(moved):
            return moved
    return None


def candidates(fault: Fault, before: str, renamed: str) -> Iterator[tuple[str, str, str]]:
    """Texts that may be the same, likeliest first, as (module now, its text now, the text at REF)."""
    if (path := ROOT / renamed).exists():
        yield module_of(path), path.read_text(encoding="utf-8"), before
    holders = [text for text in definitions(before) if fault.old in text]
    for old_text in sorted(holders, key=len):
        tokens = Counter(TOKEN.findall(old_text))
        likeness = [
            (2 * (tokens & others).total() / (tokens.total() + others.total()), module, text)
            for module, text, others in all_definitions()
        ]
        for ratio, module, text in sorted(likeness, reverse=True)[:3]:
            if ratio > ALIKE:
                yield module, text, old_text


def merge(base: str, changed: str, planted: str) -> str | None:
    """Make in `changed` what `planted` changes of `base`; None if that is not possible without a conflict."""
    with tempfile.TemporaryDirectory(prefix="stretto-anchor-") as folder:
        paths = [Path(folder) / name for name in ("changed", "base", "planted")]
        for path, text in zip(paths, (changed, base, planted), strict=True):
            path.write_text("\n".join(map(json.dumps, TOKEN.findall(text))) + "\n", encoding="utf-8")
        done = subprocess.run(
            ["git", "merge-file", "-p", "--diff3", *paths], capture_output=True, encoding="utf-8", check=False
        )
    tokens, conflict = list[str](), list[list[str]]()
    for line in done.stdout.splitlines():
        if line.startswith("<<<<<<<"):
            conflict = [[]]
        elif line.startswith(("|||||||", "=======")):
            conflict.append([])
        elif line.startswith(">>>>>>>"):
            now, before, with_fault = conflict
            if len(now) != len(before):
                return None
            names = dict(zip(before, now, strict=True))  # both changed the same tokens: these were renamed
            tokens += [names.get(token, token) for token in with_fault]
            conflict = []
        else:
            (conflict[-1] if conflict else tokens).append(json.loads(line))
    return "".join(tokens)


def quote(text: str, planted: str) -> tuple[str, str]:
    """The lines in which two texts differ, and those before that make them unique in `text`."""
    lines, others = text.splitlines(keepends=True), planted.splitlines(keepends=True)
    first = next(i for i, pair in enumerate(zip(lines, others, strict=False)) if pair[0] != pair[1])
    last = next(
        i for i, pair in enumerate(zip(reversed(lines), reversed(others), strict=False)) if pair[0] != pair[1]
    )
    last = min(last, len(lines) - first, len(others) - first)
    old = "".join(lines[first : len(lines) - last])
    while (text.count(old) != 1 or not old.strip()) and first > 0:
        first -= 1
        old = "".join(lines[first : len(lines) - last])
    new = "".join(others[first : len(others) - last])
    if "\n" in old.rstrip("\n") or "\n" in new.rstrip("\n"):
        return old, new
    return old.strip(), new.strip()  # one line reads better without its indentation


def definitions(text: str) -> list[str]:
    """The texts of all functions and classes of a module."""
    lines = text.splitlines(keepends=True)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]


@cache
def sources() -> Mapping[str, str]:
    """The texts of all modules by their names."""
    paths = sorted((ROOT / "src").rglob("*.py"))
    return {module_of(path): path.read_text(encoding="utf-8") for path in paths}


@cache
def all_definitions() -> list[tuple[str, str, Counter[str]]]:
    """All functions and classes of the sources: module, text, tokens."""
    return [
        (module, text, Counter(TOKEN.findall(text)))
        for module, source in sources().items()
        for text in definitions(source)
    ]


def module_of(path: Path) -> str:
    """A module's name as faults have it: without `stretto`, and with the name of another package."""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__").removeprefix("stretto.")


@cache
def renames(ref: str) -> Mapping[str, str]:
    """Files of REF that have another name now, as git finds them, by their old names."""
    rows = git("diff", "-M40%", "--name-status", "--diff-filter=R", ref, "--", "src").splitlines()
    return {old: new for _, old, new in (row.split("\t") for row in rows)}


def read_at(ref: str, source: Path) -> str | None:
    try:
        return git("show", f"{ref}:src/{source}")
    except subprocess.CalledProcessError:
        return None


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout


def rewrite(fault: Fault, moved: Fault) -> None:
    """Change the fields of the fault's entry that differ, and no other text of its file."""
    path = FOLDER / f"{fault.room}.yaml"
    text = path.read_text(encoding="utf-8")
    entries = yaml.compose(text).value
    (entry,) = (e for e in entries if {k.value: v.value for k, v in e.value}["name"] == fault.name)
    for key, value in sorted(entry.value, key=lambda pair: -pair[1].start_mark.index):
        field = getattr(moved, key.value, None)
        if key.value in ("module", "old", "new") and field != value.value:
            end = value.end_mark.index
            text = f"{text[: value.start_mark.index]}{scalar(field)}{ending(text, end)}{text[end:]}"
    path.write_text(text, encoding="utf-8")


def scalar(value: str) -> str:
    """A value in YAML, several lines as a block."""
    if "\n" not in value:
        return yaml.safe_dump(value, width=10**6).removesuffix("\n").removesuffix("\n...")
    indent = "2" if value.startswith((" ", "\n")) else ""
    body = "".join(f"    {line}" if line.strip() else line for line in value.splitlines(keepends=True))
    chomp = "" if value.endswith("\n") else "-"
    return f"|{indent}{chomp}\n{body}".removesuffix("\n")


def ending(text: str, index: int) -> str:
    """A block scalar's end mark is behind its last line break, which has to be written again."""
    return "\n" if index and text[index - 1] == "\n" else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ref", metavar="REF", help="a commit whose sources have what the faults quote")
    parser.add_argument("--dry-run", action="store_true", help="only list what would change")
    options = parser.parse_args()
    failures = 0
    for fault in FAULTS:
        if not problems(fault):
            continue
        moved = find_place(fault, options.ref)
        if moved is None:
            failures += 1
            print(f"NOT FOUND  {fault.room}: {fault.name} ({fault.module}): {fault.old.strip()}")
            continue
        print(f"moved      {fault.room}: {fault.name} ({moved.module}): {moved.old.strip()}")
        if not options.dry_run:
            rewrite(fault, moved)
    print(f"{failures} faults have to be mended by hand")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
