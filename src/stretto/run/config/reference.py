"""The reference of every field, made from the schemas of all kinds of jobs.

`stretto config --reference` prints it; `docs/config.md` is its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stretto.run.config.describe import allowed
from stretto.run.config.section import Section, item_of, section_of

_HEAD = """# Config reference

<!-- made by `stretto config --reference`; change the schema, not this file -->

A training job is one YAML file with these sections. Unknown fields, fields given twice and values of another
type are errors. Any field can be overridden on the command line, as in
`stretto train CONFIG optim.lr=3e-4 layout.tp=2`.
"""


def reference(schemas: Sequence[tuple[str, type[Section]]]) -> str:
    """The reference as Markdown.

    Args:
        schemas: each kind of job, under the heading that introduces it. A section that several have alike is
            described once, with the first.
    """
    text = _HEAD
    described = set[type[Section]]()
    for heading, schema in schemas:
        text += heading
        for name, field in schema.model_fields.items():
            section = section_of(field)
            if section is not None and section not in described:
                text += "".join(_sections(section, name))
                described.add(section)
    return text


def _sections(section: type[Section], path: str) -> Iterator[str]:
    rows = [(name, field) for name, field in section.model_fields.items() if section_of(field) is None]
    if path:
        yield f"\n## `{path}`\n\n{_prose(section)}\n"
    if rows:
        yield "\n| field | value | default | meaning |\n|---|---|---|---|\n"
        yield from (_row(name, field) for name, field in rows)
    for name, field in rows:
        item = item_of(field)
        if item is not None:
            yield from _sections(item, f"{path}.{name}[]")
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is not None:
            yield from _sections(inner, f"{path}.{name}" if path else name)


def _prose(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _row(name: str, field: FieldInfo) -> str:
    assert field.description, name
    cells = (f"`{name}`", _cell(allowed(field)), f"`{_value(field.get_default())}`", _cell(field.description))
    return f"| {' | '.join(cells)} |\n"


def _value(value: Any) -> str:
    if value is PydanticUndefined:
        return "none, must be given"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"  # pyright: ignore[reportUnknownArgumentType]
    return repr(value) if isinstance(value, str) and (not value or value != value.strip()) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
