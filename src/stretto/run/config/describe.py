"""What a field takes, in words: for errors and for the reference, from the one schema."""

from __future__ import annotations

from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from stretto.run.config.section import kinds_of

_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[str]: "a list of texts",
    list[int]: "a list of whole numbers",
    dict[str, Any]: "a mapping",
    dict[str, float]: "a mapping of names to numbers",
    list[float]: "a list of numbers",
    tuple[float, float]: "a list of two numbers",
}

_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def allowed(field: FieldInfo) -> str:
    """Such as "a whole number above 0, or null"; a field with a pattern shows an example instead of it."""
    kinds = kinds_of(field)
    words = " or ".join(_name(kind) for kind in kinds if kind is not NoneType)
    limits = " and ".join(_limits(field))
    return words + (f" {limits}" if limits else "") + (", or null" if NoneType in kinds else "")


def choices(field: FieldInfo) -> list[str]:
    """The words that a field takes; none where it takes anything else."""
    return [word for kind in kinds_of(field) if get_origin(kind) is Literal for word in get_args(kind)]


def takes_only_text(field: FieldInfo) -> bool:
    """Whether the field's only kind of value, beside null, is text: then 123 was meant as a text."""
    return [kind for kind in kinds_of(field) if kind is not NoneType] == [str]


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " * (len(get_args(kind)) > 1) + ", ".join(get_args(kind))
    if get_origin(kind) is list and kind not in _NAMES:
        return "a list of mappings"
    return _NAMES[kind]


def _limits(field: FieldInfo) -> list[str]:
    limits: list[str] = []
    for item in field.metadata:
        limits += [f"{word} {getattr(item, key)}" for key, word in _LIMITS.items() if hasattr(item, key)]
        if getattr(item, "min_length", None):
            limits.append("that is not empty")
    return limits + [f"such as {example}" for example in field.examples or ()]
