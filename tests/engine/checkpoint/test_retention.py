"""Whatever is saved, damaged, left half-written or impossible to remove: the last whole checkpoint, the best
and every Nth stay, and what nothing keeps goes.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from example_counts import scaled
from stretto.engine.checkpoint import folder as folders
from stretto.engine.checkpoint.files import FileEntry
from stretto.engine.checkpoint.folder import HELD_OUT_LOSS, Retention, begin, checkpoints, commit, tidy
from stretto.engine.checkpoint.index import INDEX
from stretto.engine.checkpoint.manifest import Manifest, quick_problems, write_manifest

Save = tuple[int, float | None, str]
"""Steps since the last, the held-out loss, and what becomes of it."""


def put(folder: Path, step: int, loss: float | None, becomes: str) -> Path | None:
    """A checkpoint without tensors; None where it is left half-written."""
    partial = begin(folder, step)
    (partial / INDEX).write_bytes(b"{}")
    if becomes == "half-written":
        return None
    manifest = Manifest(
        step=step,
        world=1,
        tensors=0,
        dtypes={},
        saved="now",
        stretto="0",
        torch="0",
        files={INDEX: FileEntry(2, 0)},
        meta={HELD_OUT_LOSS: loss},
    )
    write_manifest(partial, manifest)
    return commit(partial)


SAVES = st.tuples(
    st.integers(1, 3),
    st.none() | st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.5]),
    st.sampled_from(["whole"] * 4 + ["damaged", "half-written", "stuck"]),
)
KEEP = st.builds(
    Retention,
    last=st.integers(1, 3),
    every=st.none() | st.integers(2, 4),
    best=st.none() | st.integers(1, 2),
)


@settings(max_examples=scaled(200), deadline=None, derandomize=True)
@given(st.lists(SAVES, min_size=1, max_size=12), KEEP)
def test_what_is_to_be_kept_is_kept_in_any_schedule(saves: list[Save], keep: Retention) -> None:
    sync, os.fsync = os.fsync, lambda _: None
    root = Path(tempfile.mkdtemp())
    remove = folders.remove
    try:
        check_schedule(root, saves, keep)
    finally:
        os.fsync, folders.remove = sync, remove
        shutil.rmtree(root)


def check_schedule(root: Path, saves: list[Save], keep: Retention) -> None:
    assert keep.last is not None
    step, remove, losses = 0, folders.remove, dict[int, float]()
    for further, loss, becomes in saves:
        step += further
        before = {int(path.name[5:]) for path in checkpoints(root) if not quick_problems(path)}
        path = put(root, step, loss, becomes)
        if path is None:
            continue
        if becomes == "stuck":
            folders.remove = refuse
        failed = tidy(path, keep)
        folders.remove = remove
        if becomes == "damaged":
            (path / INDEX).unlink()
        else:
            before.add(step)
            if loss is not None:
                losses[step] = loss
        left = {int(path.name[5:]) for path in checkpoints(root) if not quick_problems(path)}
        complete = sorted(before | {step})  # it was whole as the others were tidied up
        retained = set(complete[-keep.last :])
        if keep.every is not None:
            retained |= {saved_step for saved_step in complete if saved_step % keep.every == 0}
        if keep.best is not None:
            now = {**losses, **({step: loss} if loss is not None else {})}
            evaluated = sorted(
                (saved_step for saved_step in complete if saved_step in now),
                key=lambda saved_step: (now[saved_step], saved_step),
            )
            retained |= set(evaluated[: keep.best])
        assert retained - {step} <= left
        assert (step in left) == (becomes != "damaged")
        assert left <= retained
        assert not failed or becomes == "stuck"


def refuse(path: Path) -> None:
    raise PermissionError(errno.EACCES, "no", str(path))
