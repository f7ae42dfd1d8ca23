"""The folder of a run's checkpoints: names, commit by rename, what a crash left, what to keep.

step-00000100            a checkpoint
step-00000200.partial    being written, or left by a crash
step-00000200.replaced   the one that step-00000200 takes the place of, for the moment between two renames
step-00000050.deleting   being removed
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from stretto.engine.checkpoint.files import remove, sync_folder
from stretto.engine.checkpoint.manifest import MANIFEST, STEP_FOLDER, quick_problems
from stretto.errors import StrettoError

PARTIAL = ".partial"
REPLACED = ".replaced"
DELETING = ".deleting"


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step whose checkpoint this is by name; None for any other path."""
    match = STEP_FOLDER.fullmatch(path.name.removesuffix(REPLACED))
    return int(match[1]) if match else None


def checkpoints(folder: Path) -> list[Path]:
    """Paths that are checkpoints by name, newest step first; whether they are whole is not looked at.

    A `.replaced` one counts when a crash left nothing else of that step.
    """
    if not folder.is_dir():
        return []
    complete = [p for p in folder.iterdir() if step_of(p) is not None and p.is_dir() and not p.is_symlink()]
    names = {p.name for p in complete}
    kept = [p for p in complete if p.suffix != REPLACED or p.name.removesuffix(REPLACED) not in names]
    return sorted(kept, key=lambda p: step_of(p) or 0, reverse=True)


def resolve(path: Path) -> Path:
    """The folder that holds the checkpoints of a run folder, or of the folder itself."""
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def is_checkpoint(path: Path) -> bool:
    """Whether the path itself is a checkpoint, by its looks."""
    return (path / MANIFEST).is_file()


def begin(folder: Path, step: int) -> Path:
    """Clean up after crashed saves and make the empty folder that this save writes into."""
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
    """Remove what crashed saves and removals left; put back what was set aside and not replaced.

    What cannot be removed stays: only a `.partial` of the same step is in the way, and then `begin` fails.
    """
    for path in folder.iterdir():
        if not STEP_FOLDER.fullmatch(path.stem):
            continue
        with contextlib.suppress(OSError):
            if path.suffix == REPLACED and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (PARTIAL, DELETING, REPLACED):
                remove(path)


def commit(partial: Path) -> Path:
    """Give a wholly written folder its name, durably; a crash at any point leaves the old or the new one.

    One of the same step that was there before is left aside, for `tidy`.
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


def tidy(newest: Path, keep: int | None) -> list[str]:
    """After a commit: remove what `newest` took the place of, and all but the last `keep` whole checkpoints.

    Damaged ones do not count, and go only once `keep` newer whole ones exist; later steps, of a run that was
    taken up again from before them, are left alone.

    Returns:
        one line for each that could not be removed: no reason to fail, since the new one is safe on disk.
    """
    doomed = [aside] if (aside := newest.with_suffix(REPLACED)).exists() else []
    if keep is not None:
        doomed += _beyond(newest, keep)
    failed: list[str] = []
    for path in doomed:
        try:
            gone = path.with_suffix(DELETING)  # so that one half removed is not taken for a checkpoint
            os.rename(path, gone)
            remove(gone)
        except OSError as error:
            failed.append(f"old checkpoint {path} could not be removed: {error}")
    return failed


def _beyond(newest: Path, keep: int) -> list[Path]:
    whole, beyond = 0, list[Path]()
    for path in checkpoints(newest.parent):
        if (step_of(path) or 0) > (step_of(newest) or 0):
            continue
        if whole >= keep:
            beyond.append(path)
        elif path == newest or not quick_problems(path):
            whole += 1
    return beyond
