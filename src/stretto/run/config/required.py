"""Fields that a config marks REQUIRED: what a planner cannot know, and training must be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stretto.errors import StrettoError
from stretto.run.config.section import find

REQUIRED = "REQUIRED"

# each field that may be marked: an example of its value, and its meaning as a comment in a written config
FIELDS: Mapping[str, tuple[str, str]] = {
    "data.source": ("PATH", "text, JSONL or Parquet files, or a token folder"),
    "train.steps": ("1000", "updates in the whole run"),
    "optim.lr": ("3e-4", "peak learning rate"),
    "checkpoint.every": ("500", "steps from one checkpoint to the next; null: at the end only"),
    "run.dir": ("runs", "folder of all runs, with room for their checkpoints"),
}


def pop_required_markers(values: dict[str, Any], schema: type) -> tuple[str, ...]:
    """Remove every marked field from the values of a config, so that it takes its default; return their
    names.
    """
    marked = list[str]()
    for name in FIELDS:
        section, field = path = tuple(name.split("."))
        inside = values.get(section)
        if isinstance(inside, dict) and inside.get(field) == REQUIRED and find(schema, path)[0] == path:
            del inside[field]
            marked.append(name)
    return tuple(marked)


def set_required_markers(values: dict[str, Any], marked: tuple[str, ...]) -> dict[str, Any]:
    """The values of a config, changed in place, with these fields marked."""
    for name in marked:
        section, field = name.split(".")
        values.setdefault(section, {})[field] = REQUIRED
    return values


def comment_required_markers(text: str) -> str:
    """The YAML of a config with the meaning of each marked field as a comment behind it."""
    lines, section = list[str](), ""
    for line in text.splitlines():
        field, _, value = line.strip().partition(": ")
        if not line.startswith(" "):
            section = line.rstrip(":")
        about = FIELDS.get(f"{section}.{field}") if value == REQUIRED else None
        lines.append(line if about is None else f"{line}  # {about[1]}")
    return "\n".join(lines) + "\n"


def settings(marked: Sequence[str]) -> str:
    """Overrides that would set the marked fields, as in "train.steps=1000 optim.lr=3e-4"."""
    return " ".join(f"{name}={FIELDS[name][0]}" for name in marked)


class Marked(Protocol):
    """A config."""

    @property
    def required(self) -> tuple[str, ...]: ...


def check_required(config: Marked) -> None:
    """Raise StrettoError if any field is still marked; names all of them."""
    if marked := config.required:
        count = f"{len(marked)} fields are" if len(marked) > 1 else "1 field is"
        raise StrettoError(
            f"{count} marked {REQUIRED} in the config, and training needs them: {', '.join(marked)}",
            hint=f"set them in the file, or after its name as in {settings(marked)}",
        )
