"""The schema of a config, derived from declared dataclasses: which fields there are, and what they take.

A section is a frozen dataclass. Its fields in the config are those with a `Field`, and inner sections; all
others are not the file's to set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from stretto.job.field import Declared, declared

_TYPES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[str]: "a list of texts",
    tuple[str, ...]: "a list of texts",
    list[int]: "a list of whole numbers",
    dict[str, Any]: "a mapping",
    dict[str, float]: "a mapping of names to numbers",
    list[float]: "a list of numbers",
    tuple[float, float]: "a list of two numbers",
}


@cache
def config_fields(section: type) -> Mapping[str, Declared]:
    """Return the fields of a section by name, in the order of the declaration."""
    fields = declared(section).items()
    return {name: item for name, item in fields if item.field is not None or section_of(item) is not None}


def section_of(item: Declared) -> type | None:
    """Return the section that a field holds; None if it holds a value."""
    return item.type if isinstance(item.type, type) and is_dataclass(item.type) else None


def item_of(item: Declared) -> type | None:
    """Return the section that each item of a list is; None if the field holds no such list."""
    lists = (get_args(kind)[0] for kind in item.kinds if get_origin(kind) is list)
    return next((kind for kind in lists if isinstance(kind, type) and is_dataclass(kind)), None)


def fields_of(section: type, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Declared]]:
    """Yield every field that holds a value, with its path, in the order of the schema."""
    for name, item in config_fields(section).items():
        inner = section_of(item)
        if inner is None:
            yield (*path, name), item
        else:
            yield from fields_of(inner, (*path, name))


def find(section: type, path: tuple[Any, ...]) -> tuple[tuple[Any, ...], Declared | None]:
    """Return the longest start of `path` that the schema has, and the field there; None for a section.

    An item of a list of sections has its index in the path.
    """
    existing: tuple[Any, ...] = ()
    for name in path:
        item = config_fields(section).get(name) if isinstance(name, str) else None
        if item is None:
            return existing, None
        existing = (*existing, name)
        inner = section_of(item)
        if inner is None:
            inside, listed = path[len(existing) :], item_of(item)
            if listed is None or len(inside) < 2 or not isinstance(inside[0], int):
                return existing, item
            deeper, field = find(listed, inside[1:])
            return (*existing, inside[0], *deeper), field
        section = inner
    return existing, None


def allowed(item: Declared) -> str:
    """Describe the values of a field, such as "a whole number above 0, or null"; of a field with a pattern
    an example.
    """
    kinds = list[str]()
    for kind in item.kinds:
        if get_origin(kind) is Literal:
            kinds.append("one of " * (len(get_args(kind)) > 1) + ", ".join(map(str, get_args(kind))))
        elif get_origin(kind) is list and get_origin(get_args(kind)[0]) is Literal:
            kinds.append(f"a list of {', '.join(map(str, get_args(get_args(kind)[0])))}")
        elif kind is not NoneType:
            kinds.append(_TYPES.get(kind, "a list of mappings"))
    limits = list[str]()
    if item.field is not None:
        limits = item.field.limits() + ["that is not empty"] * item.field.filled
        limits += [f"such as {example}" for example in item.field.examples]
    text = " or ".join(kinds) + (f" {' and '.join(limits)}" if limits else "")
    return text + (", or null" if NoneType in item.kinds else "")


def choices(item: Declared) -> list[str]:
    """Return the words that a field takes, itself or in a list; none if it takes anything else."""
    kinds = (get_args(kind)[0] if get_origin(kind) is list else kind for kind in item.kinds)
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def takes_only_text(item: Declared) -> bool:
    """True if the only kind of value besides null is text: then 123 was meant as a text."""
    return [kind for kind in item.kinds if kind is not NoneType] == [str]


def plain_section(section: Any, *, defaults: bool = True) -> dict[str, Any]:
    """Return the fields of a section as JSON and YAML hold them.

    Args:
        defaults: all fields; false: those that differ from their defaults, without empty sections.
    """
    values = dict[str, Any]()
    for name, item in config_fields(type(section)).items():
        value = getattr(section, name)
        if section_of(item) is not None:
            inner = plain_section(value, defaults=defaults)
            if inner or defaults:
                values[name] = inner
        elif defaults or value != item.default:
            values[name] = _plain(value, defaults)
    return values


def _plain(value: Any, defaults: bool) -> Any:
    if is_dataclass(value):
        return plain_section(value, defaults=defaults)
    return [_plain(item, defaults) for item in value] if isinstance(value, list | tuple) else value
