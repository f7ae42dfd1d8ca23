"""Saves that are killed, run out of disk, or are damaged afterwards: the newest whole checkpoint loads
bitwise, in the foreground and in the background.

By hand, all of it: pytest -m slow -s tests/torture/test_save_torture.py
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import counts
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hand_layouts import Hand, true_state
from ranks import on_ranks
from save_faults import attempt, die_at, failing, in_child
from stretto.engine.checkpoint import storage
from stretto.engine.checkpoint.background import BackgroundSave
from stretto.engine.checkpoint.files import CheckedWriter
from stretto.engine.checkpoint.folder import Retention
from stretto.engine.checkpoint.load import latest, load
from stretto.engine.checkpoint.manifest import problems
from stretto.engine.checkpoint.save import save
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.run.launch.local import RankFailed

COMMAND = "pytest -m slow tests/torture/test_save_torture.py"
HANDS = Hand(tp=2)
WAYS = ("waited for", "background")
Tensors = dict[str, tuple[Tensor, ShardPlacement]]


def marked(mark: int, hand: Hand = HANDS, rank: int = 0) -> Tensors:
    """What a rank holds; every tensor tells which save it is of."""
    return {name: (local + mark, place) for name, (local, place) in true_state(hand, rank).items()}


def put(folder: Path, step: int, mark: int, way: str = WAYS[0], keep: int | None = None) -> None:
    """Save from the ranks that there are."""
    ranks = dist.is_initialized()
    tensors = marked(mark, HANDS if ranks else Hand(), dist.get_rank() if ranks else 0)
    if way == WAYS[0]:
        save(folder, step, tensors, {"mark": mark}, keep=Retention(last=keep))
        return
    background = BackgroundSave(torch.device("cpu"))
    try:
        background.start(folder, step, tensors, {"mark": mark}, keep=Retention(last=keep))
        for local, _ in tensors.values():
            local.zero_()
        background.finish()
    finally:
        background.close()


def newest(folder: Path) -> int | None:
    """The mark of the newest whole checkpoint, all of whose tensors must be of that save."""
    path = latest(folder, lambda _: None)
    if path is None:
        return None
    mine = (HANDS, dist.get_rank()) if dist.is_initialized() else (Hand(), 0)
    read = {name: (torch.full_like(t, 99), place) for name, (t, place) in marked(0, *mine).items()}
    mark = load(path, read).meta["mark"]
    for name, (local, place) in marked(mark, *mine).items():
        wrong = [p for p in place.pieces if not torch.equal(p.of_local(local), p.of_local(read[name][0]))]
        assert not wrong, name
    return mark


# ------------------------------------------------------------------ kills

CASES = {"fresh": (1, None), "existing": (2, None), "same step": (1, None), "tidied": (2, 1)}
"""Step and `keep` of the save that is killed; all but the first find a checkpoint of step 1."""


def put_and_die(root: str, way: str, case: str, victim: int, operation: int) -> None:
    """On each rank; the victim dies in that operation on files."""
    step, keep = CASES[case]
    if dist.get_rank() == victim:
        die_at(operation)
    put(Path(root), step, 2, way, keep)


def killed(folder: Path, way: str, case: str, victim: int, operation: int) -> bool:
    """Whether the rank died, or had fewer operations; what is left loads, and is tidied up afterwards."""
    if case != "fresh":
        put(folder, 1, 1)
    try:
        on_ranks(2, put_and_die, str(folder), way, case, victim, operation)
        died = False
    except RankFailed:
        died = True
    mark = newest(folder)
    assert mark in ((None, 2) if case == "fresh" else (1, 2))
    assert died or mark == 2
    put(folder, 3, 3)
    left = sorted(path.name for path in folder.iterdir())
    assert all(name.startswith("step-") and len(name) == 13 for name in left), left
    assert newest(folder) == 3
    shutil.rmtree(folder)
    return died


@pytest.mark.parametrize(
    ("way", "case", "victim", "operation"),
    [("background", "existing", 1, 5), ("background", "same step", 0, 30)],
)
def test_a_kill_in_a_save(tmp_path: Path, way: str, case: str, victim: int, operation: int) -> None:
    assert killed(tmp_path / "run", way, case, victim, operation)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_a_kill_at_every_file_operation_of_a_save(tmp_path: Path, way: str, case: str) -> None:
    kills = list[int]()
    for victim in (0, 1):
        operation = 1
        while killed(tmp_path / "run", way, case, victim, operation):
            operation += 1
        assert operation > 8, "the operations are not counted"
        kills.append(operation - 1)
    counts.record(
        f"kill at every file operation of a save, {way}, {case}",
        tried=sum(kills),
        passed=sum(kills),
        command=f"{COMMAND} -k every_file",
        note=f"operations of 2 ranks: {kills}; the newest whole checkpoint is bitwise of one save",
    )


# ------------------------------------------------------------------ full disks


@contextmanager
def small_disk(path: Path, kib: int) -> Iterator[None]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("tmpfs cannot be mounted")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)
        path.rmdir()


def put_large(folder: Path, step: int, way: str) -> None:
    """A checkpoint of 512 KiB in eight tensors."""
    names = [f"model.{i}" for i in range(8)]
    tensors = {n: (torch.full((16384,), float(step)), ShardPlacement.unsharded(n, (16384,))) for n in names}
    if way == WAYS[0]:
        save(folder, step, tensors, {})
        return
    background = BackgroundSave(torch.device("cpu"))
    background.start(folder, step, tensors, {})
    background.finish()


def full_at(folder: Path, way: str, expected: Sequence[str]) -> bool:
    """Whether a second save fails, with one of these errors; then the first is all that there is."""
    outcome = attempt(lambda: put_large(folder, 2, way))
    left = sorted(path.name for path in folder.iterdir())
    assert all(problems(folder / name) == [] for name in left), left
    if outcome == "done":
        assert left == ["step-00000001", "step-00000002"]
        return False
    assert any(outcome.startswith(f"CollectiveError: rank 0: {message}") for message in expected), outcome
    assert left == ["step-00000001"]
    return True


def disks(folder: Path, points: Sequence[int], looks_ahead: bool) -> int:
    """How many saves failed, on disks with room for so many fiftieths of a second checkpoint."""
    failed, usage = 0, storage.shutil.disk_usage
    for point in points:
        with small_disk(folder, 532 + 520 * point // 50):
            run = folder / "checkpoints"
            put_large(run, 1, WAYS[0])
            if not looks_ahead:
                storage.shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10**12, 0, 10**12)
            try:
                failed += full_at(run, WAYS[point % 2], ["the disk is full"])
            finally:
                storage.shutil.disk_usage = usage
    return failed


def limits(folder: Path, points: Sequence[int]) -> int:
    """As `disks`, where no file may be longer than so many fiftieths of a checkpoint's."""

    def limited(run: Path, point: int) -> None:
        torch.set_num_threads(1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limit = 526_000 * point // 50
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        assert full_at(run, WAYS[point % 2], ["[Errno 27] File too large"])

    failed = 0
    for point in points:
        run = folder / str(point)
        put_large(run, 1, WAYS[0])
        failed += in_child(lambda run=run, point=point: limited(run, point)) == 0
        shutil.rmtree(run)
    return failed


def test_a_full_disk(tmp_path: Path) -> None:
    assert disks(tmp_path / "disk", (3, 40), looks_ahead=False) == 2
    assert disks(tmp_path / "disk", (41,), looks_ahead=True) == 1
    assert limits(tmp_path, (4, 31)) == 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_full_disks(tmp_path: Path) -> None:
    points = range(50)
    for how, looks_ahead in (("seen ahead", True), ("not seen ahead", False)):
        failed = disks(tmp_path / "disk", points, looks_ahead)
        assert failed == 50, failed
        counts.record(
            f"disk full, tmpfs of 50 sizes, {how}",
            tried=50,
            passed=failed,
            command=f"{COMMAND} -k full_disks",
            note="one error that names the file or the bytes, .partial removed, the last checkpoint whole",
        )
    failed = limits(tmp_path, points)
    assert failed == 50, failed
    counts.record(
        "file size limited at 50 points (RLIMIT_FSIZE)",
        tried=50,
        passed=failed,
        command=f"{COMMAND} -k full_disks",
        note="as above",
    )


# ------------------------------------------------------------------ writes that fail


def short(which: int) -> Callable[[CheckedWriter, memoryview], int]:
    """From that write on, the system takes a part of each block."""
    write, left = CheckedWriter._write_once, [which]

    def some(self: CheckedWriter, block: memoryview) -> int:
        left[0] -= 1
        return write(self, block if left[0] > 0 else block[: max(1, len(block) // 3)])

    return some


def break_writes(root: str, cases: Sequence[tuple[int, int, str, str]]) -> list[str]:
    """On each rank: what the saves came to."""
    folder, outcomes, write = Path(root), list[str](), CheckedWriter._write_once
    put(folder, 1, 1)
    for rank, which, kind, way in cases:
        if dist.get_rank() == rank:
            error = OSError(errno.EIO, "Input/output error")
            CheckedWriter._write_once = short(which) if kind == "short" else failing(which, error)
        outcomes.append(attempt(lambda way=way: put(folder, 2, 2, way)))
        CheckedWriter._write_once = write
        dist.barrier()
        assert newest(folder) == (2 if outcomes[-1] == "done" else 1)
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "step-00000002", ignore_errors=True)
            assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        dist.barrier()
    return outcomes


def broken(folder: Path, number: int) -> int:
    """How many of so many writes that fail, or are short, come to the same on all ranks."""
    draw = random.Random(number)
    cases = [
        (i % 2, draw.randint(1, 9), ("EIO", "EIO", "short")[i % 3], WAYS[i // 2 % 2]) for i in range(number)
    ]
    zero, first_rank = on_ranks(2, break_writes, str(folder), cases)
    right = 0
    for case, first, second in zip(cases, zero, first_rank, strict=True):
        rank, _, kind, _ = case
        expected = (
            "done" if kind == "short" else f"CollectiveError: rank {rank}: [Errno 5] Input/output error"
        )
        assert first == second, case
        assert first.startswith(expected), (case, first)
        assert kind == "short" or "step-00000002.partial/" in first
        right += 1
    return right


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_write_fails_silently(tmp_path: Path) -> None:
    passed = broken(tmp_path / "run", 100)
    counts.record(
        "EIO or a short write in a writer of either rank",
        tried=100,
        passed=passed,
        command=f"{COMMAND} -k silently",
        note="waited for and in the background; the same error on both ranks, or every byte written",
    )


# ------------------------------------------------------------------ damage


def flipped(path: Path, number: int) -> int:
    """How many of so many single bits, anywhere in a checkpoint's files, are found and named."""
    draw, found = random.Random(number), 0
    files = sorted(path.iterdir())
    sizes = [file.stat().st_size for file in files]
    for i in range(number):
        file = files[i % 3] if i < number // 2 else draw.choices(files, sizes)[0]
        data = file.read_bytes()
        place = draw.randrange(len(data))
        broken = bytearray(data)
        broken[place] ^= 1 << draw.randrange(8)
        file.write_bytes(broken)
        wrong = problems(path)
        found += bool(wrong) and any(file.name in line for line in wrong)
        file.write_bytes(data)
    assert problems(path) == []
    return found


def mangled(root: Path, number: int) -> int:
    """How many of so many truncated, deleted and swapped files are found, so that the last one loads."""
    draw, found = random.Random(number), 0
    old, new = root / "step-00000001", root / "step-00000002"
    for i in range(number):
        file = draw.choice([path for path in new.iterdir() if i % 3 != 2 or path.name != "metadata.json"])
        data = file.read_bytes()
        if i % 3 == 0:
            os.truncate(file, draw.randrange(len(data)))
        elif i % 3 == 1:
            file.unlink()
        else:  # the index of both is the same
            shutil.copyfile(old / file.name, file)
        found += newest(root) == 1
        file.unlink(missing_ok=True)
        file.write_bytes(data)
    assert newest(root) == 2
    return found


def test_damage_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step, step)
    assert flipped(tmp_path / "step-00000002", 30) == 30
    assert mangled(tmp_path, 12) == 12


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_damage_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        put(tmp_path, step, step)
    for torture, count, passed in (
        ("a bit flipped anywhere in a checkpoint", 1000, flipped(tmp_path / "step-00000002", 1000)),
        ("a file truncated, deleted, or of another checkpoint", 500, mangled(tmp_path, 500)),
    ):
        assert passed == count, torture
        counts.record(
            torture,
            tried=count,
            passed=passed,
            command=f"{COMMAND} -k all_damage",
            note="found, file named" if count == 1000 else "found, and the checkpoint before it loads",
        )
