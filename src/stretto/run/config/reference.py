"""The reference of every field, made from the schema.

`python -m stretto.run.config.reference` prints it; `docs/config.md` is its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stretto.recommender.config.schema import RecommenderConfig
from stretto.run.config.describe import allowed
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import Section, item_of, section_of

_NONE = FieldInfo(annotation=None)

_RECOMMENDER = """
# Recommenders

Where `model.family` is `dlrm`, or `model.preset` names a recommender, these are the sections. `eval`,
`checkpoint` and `run` are as above.
"""

_HEAD = """# Config reference

<!-- made by `python -m stretto.run.config.reference`; change the schema, not this file -->

A training job is one YAML file with these sections. Unknown fields, fields given twice and values of another
type are errors. Any field can be overridden on the command line, as in
`stretto train CONFIG optim.lr=3e-4 layout.tp=2`.
"""


def reference() -> str:
    """The reference as Markdown."""
    own = [*_sections(TrainConfig, ""), _RECOMMENDER]
    for name, field in RecommenderConfig.model_fields.items():
        inner = section_of(field)
        if inner is not None and inner is not section_of(TrainConfig.model_fields.get(name, _NONE)):
            own += _sections(inner, name)
    return _HEAD + "".join(own)


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


if __name__ == "__main__":
    print(reference(), end="")
