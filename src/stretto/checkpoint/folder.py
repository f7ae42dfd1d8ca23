"""The folder of a run's checkpoints: names, commit by rename, what a crash left, what to keep.

step-00000100            a checkpoint
step-00000200.partial    being written, or left by a crash
step-00000200.replaced   the one that step-00000200 takes the place of, for the moment between two renames
step-00000050.deleting   being removed
"""

from __future__ import annotations

import os
from pathlib import Path

from stretto.checkpoint.files import remove, sync_folder
from stretto.checkpoint.manifest import MANIFEST, STEP_FOLDER, seems_whole
from stretto.errors import StrettoError

PARTIAL, REPLACED, DELETING = ".partial", ".replaced", ".deleting"


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step whose checkpoint this is by name; None for any other path."""
    found = STEP_FOLDER.fullmatch(path.name.removesuffix(REPLACED))
    return int(found[1]) if found else None


def checkpoints(folder: Path) -> list[Path]:
    """Paths that are checkpoints by name, newest step first; whether they are whole is not looked at.

    A `.replaced` one counts when a crash left nothing else of that step.
    """
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if step_of(p) is not None and p.is_dir() and not p.is_symlink()]
    names = {p.name for p in found}
    kept = [p for p in found if p.suffix != REPLACED or p.name.removesuffix(REPLACED) not in names]
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
    """Remove what crashed saves and removals left; put back what was set aside and not replaced."""
    for path in folder.iterdir():
        if not STEP_FOLDER.fullmatch(path.stem):
            continue
        if path.suffix in (PARTIAL, DELETING):
            remove(path)
        elif path.suffix == REPLACED:
            if path.with_suffix("").exists():
                remove(path)
            else:
                path.rename(path.with_suffix(""))


def commit(partial: Path) -> Path:
    """Give a wholly written folder its name, durably; a crash at any point leaves the old or the new one."""
    final = partial.with_suffix("")
    aside = partial.with_suffix(REPLACED)
    sync_folder(partial)
    if final.exists():
        os.rename(final, aside)
    os.rename(partial, final)
    sync_folder(final.parent)
    remove(aside)
    return final


def prune(folder: Path, newest: Path, keep: int) -> list[str]:
    """Remove all but the last `keep` whole checkpoints up to `newest`, which was just written.

    Damaged ones do not count and go only once `keep` newer whole ones exist; later steps (of a run that was
    taken up again from before them) are left alone. What could not be removed is told, not raised: the new
    one is safe already.

    Returns:
        one line for each that could not be removed.
    """
    if keep < 1:
        raise StrettoError(f"keep is {keep}", hint="keep at least 1 checkpoint, or None for all")
    whole, failed = 0, list[str]()
    newest_step = step_of(newest) or 0
    for path in checkpoints(folder):
        if (step_of(path) or 0) > newest_step:
            continue
        if whole >= keep:
            try:
                doomed = path.with_suffix(DELETING)
                os.rename(path, doomed)
                remove(doomed)
            except OSError as error:
                failed.append(f"old checkpoint {path} could not be removed: {error}")
        elif path == newest or seems_whole(path):
            whole += 1
    return failed
