"""The folder of a run's checkpoints: names, commit by rename, cleaning up after a crash, retention.

step-00000100            a checkpoint
step-00000200.partial    being written, or left by a crash
step-00000200.replaced   an old checkpoint of step 200, until the new one is committed and tidied up
step-00000050.deleting   being removed
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stretto.engine.checkpoint.files import DamageError, remove, sync_folder
from stretto.engine.checkpoint.manifest import MANIFEST, STEP_FOLDER, load_manifest, quick_problems
from stretto.errors import StrettoError

PARTIAL = ".partial"
REPLACED = ".replaced"
DELETING = ".deleting"
HELD_OUT_LOSS = "held_out_loss"  # of a checkpoint's metadata: of the evaluation after its step


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint, from its path's name; None for any other path."""
    match = STEP_FOLDER.fullmatch(path.name.removesuffix(REPLACED))
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """Paths that are checkpoints by name, newest step first, whether whole or damaged. A `.replaced` one
    counts if a crash left no other of that step.
    """
    if not folder.is_dir():
        return []
    by_name = [p for p in folder.iterdir() if step_of(p) is not None and p.is_dir() and not p.is_symlink()]
    names = {p.name for p in by_name}
    remaining = [p for p in by_name if p.suffix != REPLACED or p.name.removesuffix(REPLACED) not in names]
    return sorted(remaining, key=lambda p: step_of(p) or 0, reverse=True)


def resolve(path: Path) -> Path:
    """The folder of checkpoints in a run's folder; any other path as it is."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def is_checkpoint(path: Path) -> bool:
    """Whether the path itself looks like a checkpoint: it has a manifest."""
    return (path / MANIFEST).is_file()


def begin(folder: Path, step: int) -> Path:
    """Clean up after crashed saves, and make the empty folder that this save writes to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise StrettoError(
            f"checkpoint folder {folder} is a file", hint="name another folder, or move the file"
        ) from None
    clean(folder)
    partial = folder / (step_name(step) + PARTIAL)
    partial.mkdir(mode=0o700)
    return partial


def clean(folder: Path) -> None:
    """Remove what crashed saves and removals left, and restore a `.replaced` checkpoint without a successor.

    What cannot be removed stays; `begin` fails only if that is the `.partial` of the same step.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if not STEP_FOLDER.fullmatch(path.stem):
            continue
        with contextlib.suppress(OSError):
            is_folder = path.is_dir() and not path.is_symlink()
            if path.suffix == REPLACED and is_folder and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (PARTIAL, DELETING, REPLACED):
                remove(path)


def commit(partial: Path) -> Path:
    """Give a completely written folder its final name, durably; a crash at any point leaves the old
    checkpoint or the new one. An old one of the same step is renamed to `.replaced`, for `tidy` to remove.
    """
    final, aside = partial.with_suffix(""), partial.with_suffix(REPLACED)
    sync_folder(partial)
    if final.exists():
        os.rename(final, aside)
    try:
        os.rename(partial, final)
    except OSError:
        if aside.exists():
            os.rename(aside, final)
        raise
    sync_folder(final.parent)
    return final


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one is committed: those that any of the fields keeps.

    Attributes:
        last: how many of the newest; None: all.
        every: those of steps that are multiples of this.
        best: how many of those with the least held-out loss at their step.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise StrettoError(f"keep.{name} is {value}", hint="at least 1, or None")


def tidy(newest: Path, keep: Retention) -> list[str]:
    """After a commit, remove the checkpoint that `newest` replaced, and the older ones that `keep` lets go.

    Damaged ones do not count, and are removed only once `keep.last` newer whole ones exist. Checkpoints of
    later steps, left by a run that was resumed from an earlier step, stay.

    Returns:
        One line for each that could not be removed, which is not an error: the new one is safe on disk.
    """
    doomed = [aside] if (aside := newest.with_suffix(REPLACED)).exists() else []
    if keep.last is not None:
        doomed += _beyond(newest, keep.last, keep)
    failed: list[str] = []
    for path in doomed:
        try:
            gone = path.with_suffix(DELETING)  # a half-removed folder must not look like a checkpoint
            os.rename(path, gone)
            remove(gone)
        except OSError as error:
            failed.append(f"old checkpoint {path} could not be removed: {error}")
    return failed


def _beyond(newest: Path, last: int, keep: Retention) -> list[Path]:
    """The older checkpoints that nothing keeps, whole or damaged."""
    step = step_of(newest) or 0
    older = [path for path in checkpoints(newest.parent) if (step_of(path) or 0) <= step]
    undamaged = [path for path in older if path == newest or not quick_problems(path)]
    if len(undamaged) < last:
        return []
    retained = set[Path]()
    if keep.every is not None:
        retained.update(path for path in undamaged if (step_of(path) or 0) % keep.every == 0)
    if keep.best is not None:
        retained.update(best(undamaged)[: keep.best])
    return [path for path in older[older.index(undamaged[last - 1]) + 1 :] if path not in retained]


def best(paths: Iterable[Path]) -> list[Path]:
    """The checkpoints among these at whose step the run was evaluated, the least held-out loss first; of
    equal ones the earlier.
    """
    losses = dict[Path, float]()
    for path in paths:
        with contextlib.suppress(DamageError, OSError):
            loss = load_manifest(path).meta.get(HELD_OUT_LOSS)
            if isinstance(loss, float):
                losses[path] = loss
    return sorted(losses, key=lambda path: (losses[path], step_of(path) or 0))
