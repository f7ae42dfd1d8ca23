"""A trained model as a command names it: the checkpoint, its run, and the config that it was trained with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from stretto.engine.checkpoint.folder import checkpoints, is_checkpoint, resolve, runs_hint, step_of
from stretto.engine.checkpoint.manifest import quick_problems, read_manifest
from stretto.errors import StrettoError
from stretto.run.config.load import read_config
from stretto.run.train.metrics import json_line

CONFIG, EVALUATIONS = "config.yaml", "eval.jsonl"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A checkpoint and its metadata.

    Attributes:
        step: updates made; 0 for an imported model.
        run: the run's folder, or None if the checkpoint lies elsewhere.
        meta: what was saved in addition to the tensors.
    """

    checkpoint: Path
    step: int
    run: Path | None
    meta: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of the run's files: its own, else the checkpoint's."""
        return self.run or self.checkpoint

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The model's sizes as the checkpoint records them."""
        sizes = self.meta.get("model")
        return cast("Mapping[str, Any]", sizes) if isinstance(sizes, dict) else {}

    def config_text(self) -> tuple[str, str]:
        """Return the YAML of the config that the model was trained with, and its name in messages.

        Raises:
            StrettoError: neither the checkpoint nor its run has one.
        """
        if isinstance(config := self.meta.get("config"), dict):
            return yaml.safe_dump(config, sort_keys=False), f"the config in {self.checkpoint}"
        path = self.folder / CONFIG
        if path.is_file():
            return read_config(path), str(path)
        raise StrettoError(
            f"checkpoint {self.checkpoint} holds no config, and there is no {path}",
            hint="name a config after it, with the model's sizes and data",
        )

    def append(self, record: Mapping[str, Any]) -> Path | None:
        """Add a line to the run's `eval.jsonl`, and return its path, or None without a run. Warns of a folder
        that cannot be written to.
        """
        if self.run is None:
            return None
        path = self.run / EVALUATIONS
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json_line(record) + "\n")
        except OSError as error:
            print(f"warning: {path} cannot be written: {error.strerror}", file=sys.stderr)
            return None
        return path


def find_trained(path: Path, step: int | None = None) -> Trained:
    """Return the checkpoint of a step, or the newest one whose files have their sizes, of a run, of a folder
    of checkpoints, or at the path itself.

    Raises:
        StrettoError: none exists; names those that do.
    """
    if is_checkpoint(path):
        if step is not None and step != step_of(path):
            raise StrettoError(
                f"--checkpoint {step}: {path} is the checkpoint of step {step_of(path)}",
                hint="name its run, or leave the option out",
            )
        return _trained(path)
    if path.is_file():
        raise StrettoError(f"{path} is a file", hint="name a run such as runs/quickstart, or a checkpoint")
    candidates = checkpoints(resolve(path))
    if not candidates:
        hint = runs_hint(path, "name a run such as runs/quickstart, or a step-... folder")
        raise StrettoError(f"{path}: no checkpoint there", hint=hint)
    if step is not None:
        steps = [step_of(candidate) for candidate in candidates]
        if step not in steps:
            saved = ", ".join(map(str, reversed(steps)))
            raise StrettoError(f"--checkpoint {step}: {path} has none of that step", hint=f"it has {saved}")
        return _trained(candidates[steps.index(step)])
    for candidate in candidates:
        if not (wrong := quick_problems(candidate)):
            return _trained(candidate)
        print(f"warning: checkpoint {candidate.name} is damaged: {wrong[0]}", file=sys.stderr)
    raise StrettoError(f"no checkpoint in {path} is whole", hint=f"see stretto checkpoint verify {path}")


def _trained(checkpoint: Path) -> Trained:
    manifest = read_manifest(checkpoint)
    folder = checkpoint.absolute().parent
    inside = folder.name == "checkpoints"
    run = checkpoint.parent.parent if checkpoint.is_absolute() or len(checkpoint.parts) > 2 else folder.parent
    return Trained(checkpoint=checkpoint, step=manifest.step, run=run if inside else None, meta=manifest.meta)
