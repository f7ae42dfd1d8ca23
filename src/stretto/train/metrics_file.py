"""A file of one JSON object a line, that a resumed run continues without gap or repetition."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.train.metrics_record import json_line


class StepLines:
    """Appends to `path`; what it holds of steps after `start` is dropped first.

    A run that died after its last checkpoint has written steps that the resumed run makes again, and perhaps
    half a line.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep(path, start)
        self._file = path.open("a", encoding="utf-8")

    def write(self, facts: Mapping[str, Any]) -> None:
        """Add one line; whoever reads the file sees it at once."""
        self._file.write(json_line(facts) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole objects of the file, in its order; a broken line ends it."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                facts = json.loads(line)
            except json.JSONDecodeError:
                return
            if not isinstance(facts, dict) or not line.endswith("\n"):
                return
            yield facts


def _keep(path: Path, last: int) -> None:
    """Rewrite the file with the steps up to `last` only: written beside, then renamed over it."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        for facts in read_lines(path):
            if isinstance(facts.get("step"), int) and facts["step"] <= last:
                file.write(json_line(facts) + "\n")
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
