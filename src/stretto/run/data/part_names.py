"""Files of training and of held-out data, told apart by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Literal

Part = Literal["train", "valid"]

_TRAIN = {"train", "training"}
_VALID = {"valid", "validation", "val", "dev", "eval", "evaluation", "test", "testing", "heldout", "holdout"}


def parts_of(paths: Sequence[PurePath]) -> list[Part | None]:
    """The part that each path is named after: by a word of the file's name, else of the folders between it
    and the folder that all paths share. `test` counts as `valid`. None: no such word, or words of both parts.
    """
    if not paths:
        return []
    shared = os.path.commonpath([os.path.abspath(path.parent) for path in paths])
    return [_part(os.path.relpath(os.path.abspath(path), shared)) for path in paths]


def mixed_text(sources: Sequence[str]) -> str | None:
    """A warning if some of these texts, or of what lies in a folder among them, are named as training text
    and some as held-out text: all become one stream. None: they are not.
    """
    paths = list[PurePath]()
    for source in map(Path, sources):
        try:
            paths += sorted(source.expanduser().iterdir()) if source.expanduser().is_dir() else [source]
        except OSError:  # which the reader of the text reports
            paths.append(source)
    parts = parts_of(paths)
    if not {"train", "valid"} <= set(parts):
        return None
    train, valid = (paths[parts.index(part)] for part in ("train", "valid"))
    return (
        f"warning: {train} and {valid} become one stream, in a shuffled order, of which data.split holds out "
        f"another part than {valid.name}; to keep it apart, leave it out here and score it with "
        f"stretto evaluate RUN --data {valid}"
    )


def _part(name: str) -> Part | None:
    for each in reversed(PurePath(name).parts):
        plain = re.sub(r"(held|hold)[-_. ]out", r"\1out", each.lower())
        parts = set(re.split("[^a-z]+", plain))
        if parts & (_TRAIN | _VALID):
            return None if parts & _TRAIN and parts & _VALID else "train" if parts & _TRAIN else "valid"
    return None
