"""Plain values to sections, strictly: every wrong value is one error that a person can act on.

Strict: a text is no number and a number no text; there are no unknown fields.
"""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING
from math import isfinite
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from stretto import versions
from stretto.errors import Problem, StrettoError, joined, nearest
from stretto.job.field import Declared
from stretto.run.config.section import (
    allowed,
    choices,
    config_fields,
    fields_of,
    find,
    item_of,
    section_of,
    takes_only_text,
)
from stretto.run.config.source import Place, Source

Path = tuple[Any, ...]
T = TypeVar("T")
REFERENCE = "see docs/reference/config.md, or `stretto config --reference`"

# what papers and other libraries call a value, in lower case without punctuation, and what it is called here
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "zero3": ("fsdp", "fsdp2", "fullyshardeddataparallel", "fullshard", "sharded", "zero", "stage3"),
    "zero2": ("shardgradop", "stage2"),
    "zero1": ("zeroredundancyoptimizer", "distributedoptimizer", "stage1"),
    "ddp": ("dp", "dataparallel", "distributeddataparallel", "replicated", "noshard", "stage0", "none"),
    "server": ("ps", "parameterserver"),
    "bfloat16": ("bf16", "brainfloat"),
    "float16": ("fp16", "half"),
    "float32": ("fp32", "float", "single"),
    "float64": ("fp64", "double"),
    "adamw": ("adam", "fusedadam"),
    "full": ("checkpointing", "activationcheckpointing", "gradientcheckpointing", "block", "true"),
    "sdpa": ("flash", "flashattention", "flashattn", "fused", "scaleddotproductattention"),
    "flex": ("flexattention",),
    "explicit": ("eager", "math", "unfused"),
    "ring": ("ringattention", "cp"),
    "ulysses": ("alltoall", "a2a", "deepspeedulysses"),
    "cpu": ("host", "ram", "dram", "memory"),
    "nvme": ("disk", "ssd", "file", "files"),
    "disk": ("nvme", "ssd", "file", "files"),
    "wsd": ("warmupstabledecay", "trapezoidal"),
    "gpt": ("gpt2", "gpt3"),
    "llama": ("llama2", "llama3", "mistral", "qwen"),
    "dot": ("dlrm",),
    "dcn": ("dcnv2", "cross"),
    "row": ("rowwise", "rows"),
    "column": ("columnwise", "columns"),
    "rowwise_adagrad": ("rowadagrad",),
    "hash": ("hashing",),
    "modulo": ("mod",),
    "quotient-remainder": ("qr", "compositional"),
}
_WRONG: Any = object()


class _Reader:
    """Reads a config, and notes the problem of every field by its path."""

    def __init__(self, root: type) -> None:
        self.root = root
        self.problems: dict[Path, tuple[str, str | None]] = {}

    def section(self, section: type[T], values: Any, path: Path) -> T:
        """Return the section; what stands for it in case of a problem is not a section."""
        name = ".".join(map(str, path))
        if not isinstance(values, dict):
            self._note(path, f"{name} is {_show(values)}, must be a mapping of fields")
            return _WRONG
        values = cast("dict[Any, Any]", values)
        before, fields = len(self.problems), config_fields(section)
        built = dict[str, Any]()
        for key, item in fields.items():
            place, inner = (*path, key), section_of(item)
            if key in values:
                value = values[key]
                built[key] = (
                    self._value(item, value, place) if inner is None else self.section(inner, value, place)
                )
            elif item.default is MISSING:
                self._note(place, f"{'.'.join(map(str, place))} is missing", REFERENCE)
        for key in values:
            if key not in fields:
                unknown = (*path, key)
                self._note(
                    unknown, f"there is no field {'.'.join(map(str, unknown))}", suggest(unknown, self.root)
                )
        if len(self.problems) > before:
            return _WRONG
        try:
            return section(**built)
        except Problem as error:
            error = error.within(name) if path else error
            self._note((*path, *error.field.removeprefix(f"{name}.").split(".")), error.message, error.hint)
        except StrettoError as error:
            self._note(path, f"{name} {error.message}", error.hint)
        return _WRONG

    def _value(self, item: Declared, value: Any, path: Path) -> Any:
        listed, about = item_of(item), item.field
        name = ".".join(map(str, path))
        assert about is not None
        if listed is not None and isinstance(value, list):
            return [
                self.section(listed, inner, (*path, i)) for i, inner in enumerate(cast("list[Any]", value))
            ]
        read = next((typed for kind in item.kinds if (typed := _read(kind, value)) is not _WRONG), _WRONG)
        if isinstance(read, float) and not isfinite(read):
            self._note(path, f"{name} is {_show(value)}, must be finite")
            return _WRONG
        fits = read is not _WRONG
        if isinstance(read, int | float) and not isinstance(read, bool):
            fits = about.holds(read)
        elif isinstance(read, str | list | tuple):
            fits = bool(read) or not about.filled
            fits = fits and (about.pattern is None or re.fullmatch(about.pattern, str(read)) is not None)
        if not fits:
            self._note(path, f"{name} is {_show(value)}, must be {allowed(item)}", _fix(item, value))
            return _WRONG
        if about.check is not None and read is not None:
            try:
                about.check(read)
            except StrettoError as error:
                self._note(path, f"{name} {error.message}", error.hint)
        return read

    def _note(self, path: Path, message: str, hint: str | None = None) -> None:
        self.problems.setdefault(path, (message, hint))


def _read(kind: Any, value: Any) -> Any:
    """Return a value of YAML as this type, or `_WRONG`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind is NoneType:
        return None if value is None else _WRONG
    if kind is float:
        try:
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else _WRONG
        except OverflowError:
            return _WRONG
    if origin is Literal:
        return value if any(value == word and type(value) is type(word) for word in arguments) else _WRONG
    if origin is None:
        return value if type(value) is kind else _WRONG
    if origin is dict:
        if not isinstance(value, dict):
            return _WRONG
        values = {key: _read(arguments[1], inner) for key, inner in cast("dict[Any, Any]", value).items()}
        return values if all(type(key) is str for key in values) and _WRONG not in values.values() else _WRONG
    if not isinstance(value, list | tuple):
        return _WRONG
    items = [_read(arguments[0], inner) for inner in cast("list[Any]", value)]
    if any(item is _WRONG for item in items) or (
        origin is tuple and len(items) != len(arguments) and ... not in arguments
    ):
        return _WRONG
    return origin(items)


def read_section(section: type[T], values: dict[str, Any], source: Source | None = None) -> T:
    """Return a section, or a whole config, with these plain values.

    Args:
        source: the file that they were read from; problems then come in its order, each with its place.

    Raises:
        StrettoError: an unknown field, or a value that a field does not take; each such field is a problem.
    """
    reader = _Reader(section)
    config = reader.section(section, values, ())
    if not reader.problems:
        return config
    # lines of the file in their order, then what has none, such as overrides
    ordered = sorted(
        reader.problems.items(), key=lambda item: (source and source.place(item[0]).line) or sys.maxsize
    )
    raise joined(
        [
            StrettoError(message if source is None else f"{source.place(path)}: {message}", hint=hint)
            for path, (message, hint) in ordered
        ]
    )


def wrong_fields(section: type, values: dict[str, Any]) -> dict[Path, str]:
    """Return the problems of a section's plain values by the paths of the fields."""
    reader = _Reader(section)
    reader.section(section, values, ())
    return {path: message for path, (message, _) in reader.problems.items()}


def _fix(item: Declared, value: Any) -> str | None:
    if isinstance(value, list):
        wrong = (each for each in cast("list[Any]", value) if each not in choices(item))
        value = next((each for each in wrong if isinstance(each, str)), None)
    if isinstance(value, str) and (similar := _meant(value, choices(item))):
        return f"did you mean {similar}?"
    if takes_only_text(item) and isinstance(value, int | float):
        return f"write it in quotes: '{value}'"
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off"):
        if bool in item.kinds:
            return "write true or false"
        if value.lower() in ("no", "off") and NoneType in item.kinds:
            return "write null"
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(_[0-9]+)+", value):
        return f"write {value.replace('_', '')}"
    if isinstance(value, float) and value.is_integer() and int in item.kinds:
        return f"write {int(value)}"
    return None


def _meant(value: str, choices: list[str]) -> str | None:
    """Return the allowed word that is spelt alike, means the same elsewhere, or looks most like `value`."""
    plain = re.sub(r"[^a-z0-9]", "", value.lower())
    for word in choices:
        if plain == re.sub(r"[^a-z0-9]", "", word.lower()) or plain in _SYNONYMS.get(word, ()):
            return word
    return nearest(value, choices)


def _show(value: Any) -> str:
    constants = {None: "null", True: "true", False: "false"}
    text = constants[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def apply_override(override: str, values: dict[str, Any], source: Source, schema: type) -> None:
    """Lay one `section.field=value` of the command line over the file's values; the value is read as YAML.

    Raises:
        StrettoError: not of that form, or no such field.
    """
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    if not equals:
        raise StrettoError(
            f"override {override!r} is not of the form section.field=value", hint="such as optim.lr=3e-4"
        )
    field, item = find(schema, path)
    if field != path and not any(each.fields and each.name == ".".join(path) for each in versions.DEPRECATED):
        raise StrettoError(
            f"override {override!r}: there is no field {'.'.join(path)}", hint=suggest(path, schema)
        )
    place = f"override {override!r}"
    if item is not None and takes_only_text(item):
        value = _text(text, place)
    else:
        value = Source(place, lines=False).read(text)
    for inner in [p for p in source.places if p[: len(path)] == path]:
        del source.places[inner]
    source.places[path] = Place(place)
    _set(values, path, value)
    move_deprecated(values, source)


def _set(values: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[path[-1]] = value


def move_deprecated(values: dict[str, Any], source: Source) -> None:
    """Replace the values of deprecated fields, in place, by those of the fields that replace them, and warn.

    Raises:
        StrettoError: a wrong value, a field that this version has removed, or a file or an override that
            gives a new field too.
    """
    for each in versions.DEPRECATED:
        path = tuple(each.name.split("."))
        section = values.get(path[0])
        if each.fields is None or not isinstance(section, dict) or path[-1] not in section:
            continue
        place = source.place(path)
        each.check(str(place))
        value = _read(each.kind, section.pop(path[-1]))
        if value is _WRONG:
            raise StrettoError(f"{place}: {each.name} is wrong", hint=f"write {each.instead}")
        for name, replacing in each.fields(value).items():
            new = tuple(name.split("."))
            target = values.get(new[0])
            if isinstance(target, dict) and new[-1] in target and source.place(new).source == place.source:
                raise StrettoError(f"{place}: {each.name} and {name} are both given", hint=f"keep {name}")
            _set(values, new, replacing)
            source.places[new] = place


def _text(text: str, place: str) -> str | None:
    """Return a text unchanged, since the shell took its quotes; quoted YAML and null are read as such."""
    if text.strip() in ("null", "~"):
        return None
    if text[:1] in ("'", '"'):
        value = Source(place, lines=False).read(text)
        if isinstance(value, str):
            return value
    return text


def suggest(path: tuple[Any, ...], schema: type) -> str:
    """Return a hint to the field that `path` may have meant: the nearest in its section, or of all."""
    name = ".".join(map(str, path))
    section_path, _ = find(schema, path)
    fields = {".".join(p): p for p, _ in fields_of(schema)}
    siblings = [n for n in fields if n.startswith("".join(f"{k}." for k in section_path))]
    same_last = [n for n, p in fields.items() if p[-1] == path[-1]]
    section = nearest(str(path[0]), config_fields(schema)) if not section_path else None
    if len(same_last) == 1:
        similar = same_last[0]
    elif section is not None and len(path) == 1:
        similar = section
    else:
        similar = nearest(name, siblings) or nearest(name, fields)
    return f"did you mean {similar}?" if similar else REFERENCE
