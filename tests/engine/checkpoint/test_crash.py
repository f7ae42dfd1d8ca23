"""A save that dies at any file operation, or fails on any rank, leaves the last checkpoint as it was."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hand_layouts import Hand, blank_state, differing, true_state
from ranks import on_ranks
from save_faults import attempt, die_at, failing, in_child
from stretto.engine.checkpoint import files, storage
from stretto.engine.checkpoint.files import CheckedWriter, remove
from stretto.engine.checkpoint.folder import Retention, checkpoints
from stretto.engine.checkpoint.load import latest, load, verify
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.control import CollectiveError
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError
from stretto.run.launch.local import RankFailed

FEW = ("model.scale", "model.embed", "model.blocks.0.qkv", "model.table.ids")
Tensors = dict[str, tuple[torch.Tensor, ShardPlacement]]


def marked(value: float) -> Tensors:
    """Part of the true state, and one tensor that tells which save this is."""
    state = {n: s for n, s in true_state(Hand(), 0).items() if n in FEW}
    state["model.scale"][0].fill_(value)
    return state


def mark_of(path: Path) -> float:
    """Load completely, check everything, give the mark."""
    state = {n: (torch.full_like(t, 77), p) for n, (t, p) in marked(0).items()}
    loaded = load(path, state)
    wrong = [n for n, (t, _) in marked(loaded.meta["mark"]).items() if not torch.equal(t, state[n][0])]
    assert wrong == []
    return loaded.meta["mark"]


def put(folder: Path, step: int, mark: float, keep: int | None = None) -> None:
    save(folder, step, marked(mark), {"mark": mark}, keep=Retention(last=keep))


@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.slow) for case in ("first", "next")), "replace", "prune"]
)
def test_death_at_every_file_operation(tmp_path: Path, case: str) -> None:
    """Afterwards the old or the new one loads whole, never a mix, and the next save tidies up."""
    step, keep = (1 if case == "replace" else 2), (1 if case == "prune" else None)
    before = set[float]() if case == "first" else {1.0}
    count, seen = 0, list[float | None]()
    while True:
        count += 1
        folder = tmp_path / str(count)
        if before:
            put(folder, 1, 1.0)

        def doomed(folder: Path = folder, count: int = count) -> None:
            die_at(count)
            put(folder, step, 2.0, keep)

        code = in_child(doomed)
        assert code in (0, 9)
        results = latest(folder)
        seen.append(mark_of(results) if results else None)
        if code == 0:
            break
        put(folder, 3, 3.0)
        left = sorted(path.name for path in folder.iterdir())
        assert all(name.startswith("step-") and len(name) == 13 for name in left), left
        assert "step-00000003" in left
        assert mark_of(folder / "step-00000003") == 3.0
        shutil.rmtree(folder)
    assert count > 12, "the operations are not counted"
    assert seen[0] == (1.0 if before else None)
    assert seen[-1] == 2.0
    first_new = seen.index(2.0)
    assert set(seen[:first_new]) <= (before or {None})
    assert set(seen[first_new:]) == {2.0}


def test_disk_full_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1, 1.0)
    writes = 0
    while True:
        writes += 1
        with monkeypatch.context() as patch:
            full = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(CheckedWriter, "_write_once", failing(writes, full))
            reported = attempt(lambda: put(tmp_path, 2, 2.0, keep=1))
        if reported == "done":
            break
        assert reported.startswith("CollectiveError: rank 0: the disk is full: [Errno 28] ")
        assert str(tmp_path) in reported
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
        assert mark_of(tmp_path / "step-00000001") == 1.0
    assert writes > 5
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_a_full_disk_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, 1.0)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 100))
    with pytest.raises(CollectiveError, match=r"needs \d+ bytes, .* has 100 bytes free"):
        put(tmp_path, 2, 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failed_commit_restores_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1, 1.0)
    rename, calls = os.rename, list[int]()

    def second_fails(*paths: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(*paths)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(CollectiveError, match="Input/output error"):
        put(tmp_path, 1, 2.0)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert mark_of(tmp_path / "step-00000001") == 1.0


def test_a_checkpoint_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StrettoError, match="is a file"):
        put(tmp_path / "file", 1, 1.0)


class TestRetention:
    def names(self, folder: Path) -> list[int]:
        return [int(p.name[5:]) for p in checkpoints(folder)]

    def test_keeps_the_last_whole_ones(self, tmp_path: Path) -> None:
        for step in range(1, 6):
            put(tmp_path, step, step, keep=2)
        assert self.names(tmp_path) == [5, 4]

    def test_damaged_ones_do_not_count(self, tmp_path: Path) -> None:
        for step in range(1, 5):
            put(tmp_path, step, step)
        for step in (3, 4):
            (tmp_path / f"step-{step:08d}" / "metadata.json").unlink()
        put(tmp_path, 5, 5, keep=2)
        assert self.names(tmp_path) == [5, 4, 3, 2]
        put(tmp_path, 6, 6, keep=2)
        assert self.names(tmp_path) == [6, 5]

    def test_never_the_one_just_written(self, tmp_path: Path) -> None:
        put(tmp_path, 30, 30)
        put(tmp_path, 20, 20, keep=1)
        assert self.names(tmp_path) == [30, 20]

    def test_what_cannot_be_removed_is_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(tmp_path, 1, 1)
        put(tmp_path, 2, 1)

        def refuse(path: Path) -> None:
            if path.exists():
                raise PermissionError(errno.EACCES, "no", str(path))

        monkeypatch.setattr("stretto.engine.checkpoint.folder.remove", refuse)
        for mark in (2, 3):  # the second takes the place of the first
            with pytest.warns(UserWarning, match="could not be removed"):
                put(tmp_path, 2, mark, keep=1)
            assert latest(tmp_path) == tmp_path / "step-00000002"
            assert mark_of(tmp_path / "step-00000002") == mark

    def test_other_things_in_the_folder_stay(self, tmp_path: Path) -> None:
        for name in ("notes.txt", "step-x", "best.partial", "step-1.partial"):
            (tmp_path / name).mkdir()
        put(tmp_path, 1, 1, keep=1)
        put(tmp_path, 2, 2, keep=1)
        assert {p.name for p in tmp_path.iterdir()} == {
            "notes.txt", "step-x", "best.partial", "step-1.partial", "step-00000002",
        }  # fmt: skip


META_CASES = {
    "meta.a is a object": {"a": object()},
    r"meta.a\[1\] is nan": {"a": [1, float("nan")]},
    "meta has the key 1": {1: 2},
    "meta.a.b is a Tensor": {"a": {"b": torch.ones(1)}},
}


@pytest.mark.parametrize("message", META_CASES)
def test_meta_that_json_would_change_is_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        save(tmp_path, 1, {}, META_CASES[message])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [-1, 1.0, True, 10**18])
def test_invalid_steps_are_refused(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(StrettoError, match="step is"):
        save(tmp_path, bad, {}, {})


def test_pieces_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    unsharded = ShardPlacement.unsharded("w", (4, 2))
    hole = ShardPlacement("w", (5, 2), unsharded.pieces)
    with pytest.raises(StrettoError, match=r"tensor w of shape \[5, 2\]: pieces have 8 elements of 10"):
        save(tmp_path, 1, {"w": (torch.ones(4, 2), hole)}, {})
    with pytest.raises(
        StrettoError, match=r"tensor w: piece at \[0, 0\] of size \[4, 2\] lies outside the local"
    ):
        save(tmp_path, 1, {"w": (torch.ones(3, 2), unsharded)}, {})
    assert list(tmp_path.iterdir()) == []


HANDS = Hand(tp=2)


def fail_in_many_ways(root: str) -> list[str]:
    """On two ranks; what each way of failing raised here."""
    rank, reported = dist.get_rank(), list[str]()
    state = true_state(HANDS, rank)
    folder = Path(root)
    save(folder, 1, state, {"mark": 1})

    def write(step: int = 2, **changes: Any) -> Callable[[], object]:
        return lambda: save(**({"folder": folder, "step": step, "tensors": state, "meta": {}} | changes))

    original = CheckedWriter._write_once
    for broken in (1, 0):
        if rank == broken:
            CheckedWriter._write_once = failing(1, OSError(errno.EIO, "Input/output error"))
        reported.append(attempt(write()))
        CheckedWriter._write_once = original
    if rank == 0:  # at the commit
        files.os.rename, rename = failing_rename, os.rename
        reported.append(attempt(write()))
        files.os.rename = rename
    else:
        reported.append(attempt(write()))
    reported.append(attempt(write(meta={"x": object()} if rank else {})))
    reported.append(attempt(write(step=2 + rank)))
    other = {
        **state,
        "model.scale": (torch.ones(2), ShardPlacement.unsharded("model.scale", (2,), owned=rank == 1)),
    }
    reported.append(attempt(write(tensors=other if rank else state)))
    reported.append(attempt(write(tensors={n: s for n, s in state.items() if rank == 0})))
    dist.barrier()
    assert [p.name for p in folder.iterdir()] == ["step-00000001"]
    path = folder / "step-00000001"
    reported.append(
        attempt(lambda: load(path, blank_state(HANDS, rank) | ({"w": other["model.scale"]} if rank else {})))
    )
    if rank:
        storage.safe_open = broken_open
    reported.append(attempt(lambda: load(path, blank_state(HANDS, rank))))
    storage.safe_open = safe_open
    blank = blank_state(HANDS, rank)
    reported.append(attempt(lambda: load(path, blank)))
    assert differing(blank, HANDS, rank) == []
    reported.append(attempt(write()))
    assert latest(folder) == folder / "step-00000002"
    return reported


safe_open = storage.safe_open


def broken_open(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


def failing_rename(*_: Any) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_a_failure_on_one_rank_is_the_same_failure_on_all(tmp_path: Path) -> None:
    zero, first = on_ranks(2, fail_in_many_ways, str(tmp_path))
    assert zero == first
    expected = [
        "CollectiveError: rank 1: [Errno 5] Input/output error: ",
        "CollectiveError: rank 0: [Errno 5] Input/output error: ",
        "CollectiveError: rank 0: [Errno 13] Permission denied",
        "StrettoError: meta.x is a object (on rank 1)",
        "StrettoError: ranks save different steps: [2, 3]",
        "StrettoError: tensor model.scale has shape [] on one rank, [2] on another",
        "StrettoError: tensor model.embed of shape [13, 6]: pieces have 48 elements of 78",
        "StrettoError: checkpoint of another model: it has no tensor w of shape [2] (on rank 1)",
        f"CollectiveError: rank 1: checkpoint {tmp_path}/step-00000001 is damaged: file shard-",
        "done",
        "done",
    ]
    assert len(zero) == len(expected)
    for message, start in zip(zero, expected, strict=True):
        assert message.startswith(start)


def die_in_the_middle(root: str) -> None:
    rank = dist.get_rank()
    state = true_state(HANDS, rank)
    save(root, 1, state, {})
    if rank == 1:
        die_at(3)
    save(root, 2, state, {})


def test_a_rank_that_dies_in_a_save_ends_the_job_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        on_ranks(2, die_in_the_middle, str(tmp_path))
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert verify(tmp_path / "step-00000001") == []


def test_a_pipe_in_the_way_is_removed_without_being_opened(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    (tmp_path / "folder").mkdir()
    link.symlink_to(tmp_path / "folder")
    for path in (pipe, link, tmp_path / "none"):
        remove(path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
