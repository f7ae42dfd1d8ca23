"""What all sections of a config share: strict types, no unknown fields, no change after it was read."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A mapping of the config file. Strict: a text is no number and a number no text."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True
    )


class JobSection(Section):
    """A whole config. It remembers which of its fields the file marks REQUIRED; these have their defaults."""

    _required: tuple[str, ...] = PrivateAttr(default=())

    @property
    def required(self) -> tuple[str, ...]:
        """The marked fields, as in "train.steps"."""
        return self._required

    def marking(self, fields: tuple[str, ...]) -> Self:
        """The same config with these fields marked."""
        copy = self.model_copy()
        copy._required = fields
        return copy


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds; None where it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def fields_of(
    section: type[Section], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field that holds a value, with its path, in the order of the schema."""
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield (*path, name), field
        else:
            yield from fields_of(inner, (*path, name))


def item_of(field: FieldInfo) -> type[Section] | None:
    """The section that each item of a list is; None where the field holds no such list."""
    for kind in kinds_of(field):
        if get_origin(kind) is list and issubclass(item := get_args(kind)[0], Section):
            return item
    return None


def find(section: type[Section], path: tuple[Any, ...]) -> tuple[tuple[Any, ...], FieldInfo | None]:
    """The longest start of `path` that the schema knows, and the field there; None for a section.

    Into an item of a list of sections a path goes by its number.
    """
    known: tuple[Any, ...] = ()
    for name in path:
        field = section.model_fields.get(name) if isinstance(name, str) else None
        if field is None:
            return known, None
        known = (*known, name)
        inner = section_of(field)
        if inner is None:
            return _in_list(field, known, path[len(known) :])
        section = inner
    return known, None


def _in_list(
    field: FieldInfo, known: tuple[Any, ...], rest: tuple[Any, ...]
) -> tuple[tuple[Any, ...], FieldInfo | None]:
    item = item_of(field)
    if item is None or len(rest) < 2 or not isinstance(rest[0], int):
        return known, field
    deeper, inner = find(item, rest[1:])
    return (*known, rest[0], *deeper), inner


def kinds_of(field: FieldInfo) -> tuple[Any, ...]:
    """The types that a field takes: the members of its union, or its one type."""
    kind = field.annotation
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
