"""The folder of a run's checkpoints: names, commit by rename, cleaning up after a crash, retention.

step-00000100            a checkpoint
step-00000200.partial    being written, or left over from a crash
step-00000200.replaced   an old checkpoint of step 200, until the new one is committed
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
MOST_RUNS = 8  # that a hint names
HELD_OUT_LOSS = "held_out_loss"  # key of a checkpoint's metadata: loss of the evaluation after its step


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint from its path's name; None for any other path."""
    match = STEP_FOLDER.fullmatch(path.name.removesuffix(REPLACED))
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders named like checkpoints, intact or damaged, newest step first.

    A `.replaced` checkpoint is included if a crash left no other of that step.
    """
    if not folder.is_dir():
        return []
    by_name = [p for p in folder.iterdir() if step_of(p) is not None and p.is_dir() and not p.is_symlink()]
    names = {p.name for p in by_name}
    remaining = [p for p in by_name if p.suffix != REPLACED or p.name.removesuffix(REPLACED) not in names]
    return sorted(remaining, key=lambda p: step_of(p) or 0, reverse=True)


def resolve(path: Path) -> Path:
    """Return the folder of checkpoints in a run's folder; any other path unchanged."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def runs_hint(folder: Path, otherwise: str) -> str:
    """Return a hint that names the runs in a folder that is none itself; `otherwise` if it contains none."""
    inner = [path for name in (".", "runs") if (folder / name).is_dir() for path in (folder / name).iterdir()]
    runs = sorted(str(path) for path in inner if checkpoints(resolve(path)))
    more = f" and {len(runs) - MOST_RUNS} more" if len(runs) > MOST_RUNS else ""
    return f"name one of the runs there: {', '.join(runs[:MOST_RUNS])}{more}" if runs else otherwise


def is_checkpoint(path: Path) -> bool:
    """True if the path is a folder with a manifest."""
    return (path / MANIFEST).is_file()


def begin(folder: Path, step: int) -> Path:
    """Clean up after crashed saves, and create the empty folder that this save writes to."""
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
    """Remove leftovers of crashed saves and removals; restore a `.replaced` checkpoint without a successor.

    Folders that cannot be removed stay; `begin` fails only if one is the `.partial` of the same step.
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
    """Durably rename a completely written folder to its final name.

    A crash at any point leaves the old or the new checkpoint. An old one of the same step is renamed to
    `.replaced`, which `tidy` removes.
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
    """The checkpoints to retain when a new one is committed: those that any of the fields selects.

    Attributes:
        last: number of newest checkpoints, or None for all.
        every: retain checkpoints of steps that are multiples of this.
        best: number of checkpoints with the lowest held-out loss at their step.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise StrettoError(f"keep.{name} is {value}", hint="at least 1, or None")


def tidy(newest: Path, keep: Retention) -> list[str]:
    """After a commit, remove the checkpoint that `newest` replaced, and older ones that `keep` does not
    retain.

    Damaged checkpoints do not count, and are removed only once `keep.last` newer undamaged ones exist. Those
    of later steps, from before a run was resumed from an earlier step, stay.

    Returns:
        One line per checkpoint that could not be removed, which is not an error: the new one is on disk.
    """
    doomed = [aside] if (aside := newest.with_suffix(REPLACED)).exists() else []
    if keep.last is not None:
        step = step_of(newest) or 0
        older = [path for path in checkpoints(newest.parent) if (step_of(path) or 0) <= step]
        undamaged = [path for path in older if path == newest or not quick_problems(path)]
        retained = set[Path]()
        if keep.every is not None:
            retained.update(path for path in undamaged if (step_of(path) or 0) % keep.every == 0)
        if keep.best is not None:
            retained.update(best(undamaged)[: keep.best])
        if len(undamaged) >= keep.last:
            oldest = older.index(undamaged[keep.last - 1])  # of the `keep.last` newest
            doomed += [path for path in older[oldest + 1 :] if path not in retained]
    failed: list[str] = []
    for path in doomed:
        try:
            gone = path.with_suffix(DELETING)  # a half-removed folder must not look like a checkpoint
            os.rename(path, gone)
            remove(gone)
        except OSError as error:
            failed.append(f"old checkpoint {path} could not be removed: {error}")
    return failed


def best(paths: Iterable[Path]) -> list[Path]:
    """Return the checkpoints that have a held-out loss, lowest loss first, then earliest step."""
    losses = dict[Path, float]()
    for path in paths:
        with contextlib.suppress(DamageError, OSError):
            loss = load_manifest(path).meta.get(HELD_OUT_LOSS)
            if isinstance(loss, float):
                losses[path] = loss
    return sorted(losses, key=lambda path: (losses[path], step_of(path) or 0))
