"""YAML text to plain values, with the line of each, and nothing that YAML could do beyond that.

Scalars are read by the core schema of YAML 1.2 (section 10.3.2): `3e-4` is a number, `no` and `1:30` are
texts. A file has no tags of its own making, no merge keys, no key twice, and no aliases that blow it up.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from stretto.errors import StrettoError

LARGEST_FILE = 1 << 20  # bytes
DEEPEST = 32  # levels of nesting
MOST_VALUES = 10_000  # in one file, aliases counted as often as they are used

Path = tuple[Any, ...]

_CORE: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2, which refuses deep nesting at once.

    Each level costs PyYAML a scan of the keys that are possible around it.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    _depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        if self._depth == DEEPEST:
            raise RecursionError
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class CoreDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, quoting what CoreLoader would not read back as the same text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        # PyYAML folds these line breaks in plain and single-quoted text so that they read back as spaces
        broken = any(c in data for c in "\x85\u2028\u2029")
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if broken else None)


CoreDumper.add_representer(str, CoreDumper.represent_str)
for _tag, _pattern, _first in _CORE:
    for _class in (CoreLoader, CoreDumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}",
            re.compile(rf"^(?:{_pattern})$"),
            ["" if c == "\0" else c for c in _first],
        )


class Place(NamedTuple):
    """Where a value stands: a file and its line, from 1 on, or what has no lines, such as an override."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Source:
    """A file's values and the place of each; without `lines`, the place is the name alone."""

    def __init__(self, name: str, *, lines: bool = True) -> None:
        self.name = name
        self._lines = lines
        self.places: dict[Path, Place] = {}
        self._values = 0

    def place(self, path: Path) -> Place:
        """Where the value at `path` stands: its own line, or that of the nearest one around it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, Place(self.name))

    def read(self, text: str) -> Any:
        """The plain values of one YAML document; None for an empty one.

        Raises:
            StrettoError: not YAML, or more than a config needs of it.
        """
        try:
            node = CoreLoader(text).get_single_node()
            return None if node is None else self._build(node, (), ())
        except yaml.YAMLError as error:
            raise self._not_yaml(error) from None
        except RecursionError:
            raise StrettoError(
                f"{self.name}: nested too deeply", hint="a config is two levels deep"
            ) from None

    def _not_yaml(self, error: yaml.YAMLError) -> StrettoError:
        mark = getattr(error, "problem_mark", None)
        place = Place(self.name) if mark is None else self._at(mark.line)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        return StrettoError(
            f"{place}: not valid YAML: {problem}", hint="look at indentation, colons and quotes"
        )

    def _fail(self, node: Node, message: str, hint: str | None = None) -> StrettoError:
        return StrettoError(f"{self._at(node.start_mark.line)}: {message}", hint=hint)

    def _at(self, line: int) -> Place:
        """The place of a line that PyYAML counts from 0."""
        return Place(self.name, line + 1 if self._lines else None)

    def _build(self, node: Node, path: Path, around: tuple[Node, ...]) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            raise self._fail(node, f"more than {MOST_VALUES} values", "write aliases out, or leave them out")
        if any(node is outer for outer in around):
            raise self._fail(node, "an alias inside what it stands for")
        if path:
            self.places[path] = self._at(node.start_mark.line)
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        inside = (*around, node)
        if isinstance(node, SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._build(item, (*path, i), inside) for i, item in enumerate(node.value)]
        if isinstance(node, MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path, inside)
        raise self._tagged(node)

    def _mapping(self, node: MappingNode, path: Path, inside: tuple[Node, ...]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise self._fail(key_node, "a key must be a name")
            key = key_node.value
            if key == "<<":
                raise self._fail(key_node, "merge keys (<<) are not supported", "write the fields out")
            line = key_node.start_mark.line
            if key in mapping:
                name = ".".join(map(str, (*path, key)))
                raise self._fail(
                    key_node, f"{name} is given twice, first in line {lines[key] + 1}", "keep one"
                )
            mapping[key] = self._build(value_node, (*path, key), inside)
            lines[key] = line
            self.places[*path, key] = self._at(line)
        return mapping

    def _scalar(self, node: ScalarNode) -> Any:
        text: str = node.value
        match node.tag.removeprefix("tag:yaml.org,2002:"):
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return self._int(node, text)
            case "float":
                return self._float(node, text)
            case _:
                raise self._tagged(node)

    def _int(self, node: ScalarNode, text: str) -> int:
        # a size no field can have; Python also refuses to read numbers of thousands of digits
        if len(text) > 40:
            raise self._fail(node, f"number of {len(text)} digits")
        try:
            return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
        except ValueError:  # an explicit !!int on something else
            raise self._fail(node, f"{text[:40]!r} is no whole number") from None

    def _float(self, node: ScalarNode, text: str) -> float:
        try:
            return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
        except ValueError:
            raise self._fail(node, f"{text[:40]!r} is no number") from None

    def _tagged(self, node: Node) -> StrettoError:
        return self._fail(node, f"tag {node.tag!r} is not allowed", "a config holds plain values only")
