"""The public interface as lines: names with signatures, commands with options, fields with defaults, keys.

    python tests/public_interface.py      # writes tests/data/public.txt

`test_public_interface.py` compares the interface with that file. After ` | ` in a line come words, and more
may be added: the values that a field takes, the keys of an object of `--json`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

import json_keys
import stretto
from stretto import versions
from stretto.cli.main import app, app_commands, app_of
from stretto.cli.report import JSON_VERSIONS
from stretto.recommender.config.schema import RecommenderConfig
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import choices, fields_of, item_of

FILE = Path(__file__).parent / "data" / "public.txt"
COMMAND = "python tests/public_interface.py"


def lines() -> Iterator[str]:
    """Yield a line for each part of the interface, in the order of the file."""
    yield f"# What CONTRIBUTING.md promises, in the order of its list. `{COMMAND}` writes this file."
    for module in (stretto, import_module("stretto.prove")):
        for name in sorted(module.__all__):
            yield from _name(f"{module.__name__}.{name}", getattr(module, name))
    yield from _options("stretto", get_command(app))
    for name in sorted(app_commands()):
        command = get_command(app_of(name))
        yield from _options(f"stretto {name}", command)
        for inner, each in sorted(getattr(command, "commands", {}).items()):
            yield from _options(f"stretto {name} {inner}", each)
    for schema in (TrainConfig, RecommenderConfig):
        yield from _fields(f"{schema.__name__}: ", schema)
    for title, listing in sorted(json_keys.sections().items()):
        version = JSON_VERSIONS.get(" ".join(json_keys.title_words(title)), 1)
        for path, keys in listing.items():
            yield f"--json {title}/{version} {path} | {' '.join(sorted(keys))}"


def _name(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value) or not callable(value):
        yield f"{name}: {type(value).__name__}"
        return
    yield f"{name}: {'class ' if inspect.isclass(value) else ''}{_signature(value)}"
    for method, member in sorted(vars(value).items()) if inspect.isclass(value) else ():
        if method.startswith("_") or not str(value.__module__).startswith("stretto"):
            continue
        if isinstance(member, property):
            yield f"{name}.{method}: property"
        elif callable(inner := getattr(value, method)):
            yield f"{name}.{method}: {_signature(inner)}"


def _signature(value: Any) -> str:
    """Parameters with defaults, without types, which are for readers; an address is none of either."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # an enumeration
        return "(...)"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.Signature(bare)))


def _options(command_path: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands") and command.params == []:
        return
    for each in command.params:
        if each.name == "help" or getattr(each, "hidden", False):
            continue
        is_argument = isinstance(each, typer.core.TyperArgument)
        name = (each.metavar or each.name) if is_argument else "/".join([*each.opts, *each.secondary_opts])
        flag = "" if is_argument or each.is_flag else f" {each.type.name.replace('choice', 'str')}"
        default = "required" if each.required else f"default {each.default!r}"
        repeatable = ", repeatable" if each.nargs == -1 or each.multiple else ""
        yield f"{command_path} {name}{flag}, {default}{repeatable}"


def _fields(prefix: str, schema: type) -> Iterator[str]:
    for path, item in fields_of(schema):
        name = prefix + ".".join(path)
        kinds = " or ".join(
            getattr(kind, "__name__", str(kind)) for kind in item.kinds if kind is not type(None)
        )
        allowed = choices(item)
        default = "required" if item.default is MISSING else f"= {item.default!r}"
        yield f"{name}: {'one of' if allowed else kinds} {default}" + (
            f" | {' '.join(map(str, allowed))}" if allowed else ""
        )
        if (inner := item_of(item)) is not None:
            yield from _fields(f"{name}[].", inner)


def items(text: str) -> set[str]:
    """Return the parts of a file that may not go: its lines, each word after ` | ` on its own."""
    parts = set[str]()
    for line in text.splitlines():
        head, _, listed = line.partition(" | ")
        parts |= {f"{head} | {word}" for word in listed.split()} or {head}
    return parts


def problems(before: str, after: str) -> list[str]:
    """Return what to do about each difference between the file and the interface."""
    gone, new = items(before) - items(after), items(after) - items(before)
    deprecated = tuple(each.name for each in versions.DEPRECATED)
    found = list[str]()
    for part in sorted(gone):
        if part.startswith("--json "):
            title, _, before_version = part.partition(" | ")[0].rpartition(" ")[0].rpartition("/")
            command = " ".join(json_keys.title_words(title.removeprefix("--json ")))
            version = JSON_VERSIONS.get(command, 1)
            if version == int(before_version):
                found.append(
                    f"{part}: is gone; raise JSON_VERSIONS[{command!r}] to {version + 1}, add a fragment"
                )
        elif not re.match("|".join(rf"(\w+: )?{re.escape(name)}\b" for name in deprecated) or "(?!)", part):
            found.append(
                f"{part}: is gone or changed; keep it and add it to versions.DEPRECATED, or, if it was"
            )
            found[-1] += " deprecated for a minor version, add a fragment `removed` (CONTRIBUTING.md)"
    if gone or new:
        found.append(f"then: {COMMAND} ({len(new)} new, {len(gone)} gone)")
    return found


def current() -> str:
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    for problem in problems(FILE.read_text(encoding="utf-8") if FILE.exists() else "", current()):
        print(problem)
    FILE.write_text(current(), encoding="utf-8")
