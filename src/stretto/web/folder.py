"""The folder of a studio: the files that a question may name, and the runs in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.run.config.source import LARGEST_FILE, Source

CONFIG = "config.yaml"
STEPS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"
DEEPEST, MOST_FOLDERS = 4, 5_000  # of the folders that are searched for runs and configs
_PASSED_OVER = {"checkpoints", "hang", "node_modules", "profile", "tensorboard", "trace", "__pycache__"}
_SECTIONS = {"model", "tables", "data", "batch", "optim", "train", "layout"}  # of configs


class StudioFolder:
    """A folder whose files are read, and nothing outside of it, links included."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise StrettoError(f"{root} is no folder", hint="name the folder that has runs/ and your configs")
        self.root = root.resolve()
        self._configs: dict[Path, tuple[int, Any]] = {}
        self.cut_short = False  # the last search saw only the first of its folders

    def path(self, name: Any) -> Path:
        """Return the path of a name relative to the folder.

        Raises:
            StrettoError: it is outside of the folder.
        """
        try:
            path = (self.root / name).resolve()
            if path.is_relative_to(self.root):
                return path
        except (TypeError, ValueError, OSError, RuntimeError):  # no text, a null byte, a circle of links
            pass
        raise StrettoError(f"{str(name)!r} is not in the studio's folder", hint=f"name a path in {self.root}")

    def run(self, name: Any) -> Path:
        """Return the folder of a run.

        Raises:
            StrettoError: it is outside of the folder, or no run.
        """
        path = self.path(name)
        if not self.is_run(path):
            raise StrettoError(f"{name} is no run: it has no {STEPS}")
        return path

    def is_run(self, path: Path) -> bool:
        """True if the path is the folder of a run, whose records are in the studio's folder."""
        records = (path / STEPS).resolve()
        return records.is_relative_to(self.root) and records.is_file()

    def name(self, path: Path) -> str:
        """Return the path relative to the folder."""
        return path.relative_to(self.root).as_posix()

    def read(self, path: Path, largest: int = LARGEST_FILE) -> str:
        """Return the text of a file in the folder.

        Raises:
            StrettoError: it is outside of the folder, absent, no plain file, or too large.
        """
        inside = self.path(path)
        if not inside.is_file():
            raise StrettoError(f"there is no file {self.name(path)}")
        if inside.stat().st_size > largest:
            raise StrettoError(f"{self.name(path)} has more than {largest >> 20} MiB")
        return inside.read_text(encoding="utf-8", errors="replace")

    def config(self, path: Path) -> Mapping[str, Any]:
        """Return the values of a YAML file; of one that is absent or no mapping none."""
        try:
            changed = self.path(path).stat().st_mtime_ns
            if self._configs.get(path, (0, None))[0] != changed:
                self._configs[path] = changed, Source(path.name, lines=False).read(self.read(path))
            values = self._configs[path][1]
        except (StrettoError, OSError):
            values = None
        return values if isinstance(values, dict) else {}

    def runs(self) -> list[Path]:
        """The folders of runs, in order."""
        folders = (Path(folder) for folder, _, files in self._walk() if STEPS in files)
        return sorted(filter(self.is_run, folders))

    def configs(self) -> list[str]:
        """The names of files that look like configs, but for those that runs have written."""
        return [
            self.name(path)
            for folder, _, files in self._walk()
            if STEPS not in files
            for path in (Path(folder) / name for name in sorted(files) if name.endswith((".yaml", ".yml")))
            if _SECTIONS & {*self.config(path)}
        ]

    def _walk(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield folders with their files, the upper ones first; not below runs."""
        self.cut_short = False
        for count, (folder, inner, files) in enumerate(os.walk(self.root)):
            if count == MOST_FOLDERS:
                self.cut_short = True
                return
            yield folder, inner, files
            deep = len(Path(folder).relative_to(self.root).parts) >= DEEPEST or STEPS in files
            shown = sorted(n for n in inner if not n.startswith(".") and n not in _PASSED_OVER)
            inner[:] = [] if deep else shown
