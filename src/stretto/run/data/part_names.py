"""Files of training and of held-out data, told apart by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Literal

Part = Literal["train", "valid", "test"]

_MARKS: Sequence[tuple[Part, set[str]]] = [
    ("train", {"train", "training"}),
    ("valid", {"valid", "validation", "val", "dev", "eval", "evaluation", "heldout", "holdout"}),
    ("test", {"test", "testing"}),
]


def parts_of(paths: Sequence[PurePath]) -> list[Part | None]:
    """The part that each path is named after: by a word of the file's name, else of the folders between it
    and the folder that all paths share. None: no such word, or words of both training and held-out data.
    """
    if not paths:
        return []
    shared = os.path.commonpath([os.path.abspath(path.parent) for path in paths])
    return [_part(os.path.relpath(os.path.abspath(path), shared)) for path in paths]


def both_parts(parts: Sequence[Part | None]) -> bool:
    """True if some are training data and some are held out."""
    return "train" in parts and bool({"valid", "test"} & {*parts})


def mixed_text(sources: Sequence[str], remedy: str) -> str | None:
    """A warning if some of these texts, or of what lies in a folder among them, are named as training text
    and some as held-out text, and all become one stream. None: they are not.

    Args:
        remedy: what keeps them apart.
    """
    paths = list[PurePath]()
    for source in map(Path, sources):
        try:
            paths += sorted(source.expanduser().iterdir()) if source.expanduser().is_dir() else [source]
        except OSError:  # which the reader of the text reports
            paths.append(source)
    parts = parts_of(paths)
    if not both_parts(parts):
        return None
    train, valid = (
        next(path for path, part in zip(paths, parts, strict=True) if part in named)
        for named in (("train",), ("valid", "test"))
    )
    return (
        f"warning: {train} and {valid} become one stream, in a shuffled order, of which data.split holds out "
        f"another part than {valid.name}; to keep them apart, {remedy}"
    )


def _part(name: str) -> Part | None:
    for each in reversed(PurePath(name).parts):
        plain = re.sub(r"(held|hold)[-_. ]out", r"\1out", each.lower())
        marks = set(re.split("[^a-z]+", plain))
        parts: list[Part] = [part for part, synonyms in _MARKS if marks & synonyms]
        if parts:
            return None if parts[0] == "train" and len(parts) > 1 else parts[0]
    return None
