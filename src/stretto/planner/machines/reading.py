"""Strict reading of YAML mappings: unknown keys, wrong types and values out of range are errors with a line.

The files of the catalogue are read in the same way as a user's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

from stretto.errors import StrettoError, nearest, read_text

_MOST_VALUES = 10_000  # of one field
_E = re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+")  # numbers such as 1e9, which YAML 1.1 reads as texts
_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Fields:
    """One mapping of a file. A key that was not read before `finish` is unknown."""

    def __init__(self, node: Node, file: str, path: str = "") -> None:
        """Raises StrettoError if `node` is no mapping, or has a key twice."""
        self.file = file
        self.path = path
        self._line = node.start_mark.line + 1
        if not isinstance(node, MappingNode):
            raise self._wrong(self._line, path or "the file", "must be a mapping of fields")
        self._nodes: dict[str, Node] = {}
        self._read: set[str] = set()
        for key, value in node.value:
            if key.value in self._nodes:
                raise self._wrong(key.start_mark.line + 1, self._name(key.value), "is there twice")
            self._nodes[key.value] = value

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def text(self, key: str, default: str | None = None) -> str:
        """A text; required without `default`."""
        value = self._plain(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)  # as in `device: 4090`
        if not isinstance(value, str):
            raise self.wrong(key, f"is {value!r}, must be a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, empty if the key is missing."""
        value = self._plain(key, [])
        if not isinstance(value, list):
            raise self.wrong(key, "must be a list of texts")
        return tuple(str(item) for item in value)

    def flag(self, key: str) -> bool:
        """True or false; false if the key is missing."""
        value = self._plain(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {value!r}, must be true or false")
        return value

    def number(self, key: str, default: float | None = None, *, minimum: float | None = None) -> float:
        """A number of at least `minimum`, or above 0 if that is None; required without `default`."""
        value = _number(self._plain(key, default))
        if value is None or value < (minimum or 0.0) or (minimum is None and value == 0.0):
            condition = "above 0" if minimum is None else f"of at least {minimum:g}"
            raise self.wrong(key, f"is {self._plain(key, default)!r}, must be a number {condition}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.number(key, None if default is None else float(default), minimum=1.0)
        if not value.is_integer():
            raise self.wrong(key, f"is {value}, must be a whole number")
        return int(value)

    def plain(self, key: str) -> Any:
        """The value as plain YAML, or None if the key is missing."""
        return self._plain(key, None) if key in self._nodes or not self._read.add(key) else None

    def inside(self, key: str) -> Fields:
        """The mapping under that key."""
        return Fields(self._node(key), self.file, self._name(key))

    def items(self) -> Iterator[tuple[str, Fields]]:
        """Every key that was not read yet, with its mapping."""
        for key in [key for key in self._nodes if key not in self._read]:
            yield key, self.inside(key)

    def numbers(self, key: str, allowed: tuple[str, ...]) -> dict[Any, float]:
        """A mapping of names out of `allowed` to numbers above 0, empty if the key is missing."""
        if key not in self._nodes:
            self._read.add(key)
            return {}
        inner = self.inside(key)
        values = {name: inner.number(name) for name in allowed if name in inner}
        inner.finish(allowed)
        return values

    def is_mapping(self, key: str) -> bool:
        return isinstance(self._nodes.get(key), MappingNode)

    def finish(self, allowed: tuple[str, ...] = ()) -> None:
        """Raise StrettoError for a key that was not read."""
        for key, node in self._nodes.items():
            if key not in self._read:
                names = sorted({*self._read, *allowed})
                suggestion = nearest(key, names)
                hint = f"did you mean {suggestion!r}?" if suggestion else f"fields: {', '.join(names)}"
                line = node.start_mark.line + 1
                location = f" in {self.path}" if self.path else ""
                raise StrettoError(f"{self.file}:{line}: there is no field {key!r}{location}", hint=hint)

    def wrong(self, key: str, rule: str, hint: str | None = None) -> StrettoError:
        """The error of a field that breaks a rule."""
        node = self._nodes.get(key)
        return self._wrong(node.start_mark.line + 1 if node else self._line, self._name(key), rule, hint)

    def _wrong(self, line: int, name: str, rule: str, hint: str | None = None) -> StrettoError:
        return StrettoError(f"{self.file}:{line}: {name} {rule}", hint=hint)

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else str(key)

    def _node(self, key: str) -> Node:
        self._read.add(key)
        if key not in self._nodes:
            suggestion = nearest(key, self._nodes.keys() - self._read)
            raise self.wrong(key, "is missing", f"there is a field {suggestion!r}" if suggestion else None)
        return self._nodes[key]

    def _plain(self, key: str, default: Any) -> Any:
        self._read.add(key)
        if default is not None and key not in self._nodes:
            return default
        try:
            return _plain(self._node(key), iter(range(_MOST_VALUES)))
        except RecursionError:
            raise self.wrong(key, "has too many values in each other") from None


def read_fields(path: Path) -> Fields:
    """The mapping of a YAML file.

    Raises:
        StrettoError: the file is missing, not readable, not YAML, or no mapping.
    """
    text = read_text(path)
    try:
        node = yaml.compose(text, Loader=_SAFE)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise StrettoError(f"{path}{line}: this is not YAML", hint=getattr(error, "problem", None)) from None
    if node is None:
        raise StrettoError(
            f"{path} is empty", hint="see `stretto catalogue --help` for what is in such a file"
        )
    return Fields(node, str(path))


def shipped(package: str, name: str) -> Any:
    """The values of `data/NAME.yaml` in a package of Stretto, read by libyaml if PyYAML has it."""
    text = files(package).joinpath(f"data/{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=_SAFE)


def _plain(node: Node, left: Iterator[int]) -> Any:
    """The plain value of a node, with keys as texts.

    Args:
        left: one for each value that is yet allowed: anchors within anchors stand for any number.
    """
    if next(left, None) is None:
        raise RecursionError
    if isinstance(node, MappingNode):
        return {str(key.value): _plain(value, left) for key, value in node.value}
    if isinstance(node, SequenceNode):
        return [_plain(item, left) for item in node.value]
    quoted = bool(getattr(node, "style", None))
    tag, value = str(node.tag).rpartition(":")[2], str(node.value)
    if tag in ("int", "float") or (tag == "str" and not quoted and _E.fullmatch(value)):
        try:
            number = float(value.replace("_", ""))
            return int(number) if tag == "int" else number
        except (ValueError, OverflowError):  # as `.inf`, hours and minutes, or hundreds of digits
            return value
    if tag == "bool":
        return value.lower() in ("true", "yes", "on")
    return None if tag == "null" else value


def _number(value: Any) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
