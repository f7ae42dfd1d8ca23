"""Overrides from the command line: `optim.lr=3e-4`."""

from __future__ import annotations

from typing import Any

from stretto.errors import StrettoError, nearest
from stretto.run.config.describe import takes_only_text
from stretto.run.config.schema import TrainConfig
from stretto.run.config.section import Section, fields_of, find
from stretto.run.config.source import Place, Source


def apply(override: str, values: dict[str, Any], source: Source, schema: type[Section] = TrainConfig) -> None:
    """Lay one `a.b=value` over the file's values; the value is read as YAML.

    Raises:
        StrettoError: not of that form, or no such field.
    """
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    if not equals:
        raise StrettoError(
            f"override {override!r} is not of the form section.field=value", hint="such as optim.lr=3e-4"
        )
    known, field = find(schema, path)
    if known != path:
        raise StrettoError(
            f"override {override!r}: there is no field {'.'.join(path)}", hint=suggest(path, schema)
        )
    where = f"override {override!r}"
    only_text = field is not None and takes_only_text(field)
    value = _text(text, where) if only_text else Source(where, lines=False).read(text)
    _forget(source, path)
    source.places[path] = Place(where)
    target = values
    for key in path[:-1]:
        if not isinstance(target.get(key), dict):
            target[key] = {}
        target = target[key]
    target[path[-1]] = value


def _text(text: str, where: str) -> str | None:
    """A text as it stands, since the shell took its quotes; quoted YAML and null are read as such."""
    if text.strip() in ("null", "~"):
        return None
    if text[:1] in ("'", '"'):
        value = Source(where, lines=False).read(text)
        if isinstance(value, str):
            return value
    return text


def _forget(source: Source, path: tuple[str, ...]) -> None:
    for inner in [p for p in source.places if p[: len(path)] == path]:
        del source.places[inner]


def suggest(path: tuple[Any, ...], schema: type[Section] = TrainConfig) -> str | None:
    """A hint to the field that `path` may have meant: the nearest beside it, or the nearest of all."""
    name = ".".join(map(str, path))
    known, _ = find(schema, path)
    fields = {".".join(p): p for p, _ in fields_of(schema)}
    beside = [n for n in fields if n.startswith("".join(f"{k}." for k in known))]
    same_last = [n for n, p in fields.items() if p[-1] == path[-1]]
    section = nearest(str(path[0]), schema.model_fields) if not known else None
    if len(same_last) == 1:
        near = same_last[0]
    elif section is not None and len(path) == 1:
        near = section
    else:
        near = nearest(name, beside) or nearest(name, fields)
    return f"did you mean {near}?" if near else "see docs/config.md, or `stretto config --reference`"
