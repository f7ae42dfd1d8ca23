"""A rank's folder for files that live no longer than it, and what goes wrong with disks."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stretto.engine.offload.scratch import ALIGN, OffloadError, Scratch, ScratchFile, aligned_memory
from stretto.errors import StrettoError

MIB = 2**20


@contextmanager
def files_of_at_most(size: int) -> Generator[None]:
    """A disk with this much free space."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def block(size: int, seed: int) -> torch.Tensor:
    memory = aligned_memory(size)
    return memory.copy_(torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)))


def test_the_scratch_folder_is_named_after_its_rank_and_removed_when_closed(tmp_path: Path):
    path = tmp_path / "not" / "there"
    scratch, other = Scratch(path, 3), Scratch(path, 3)
    names = [scratch.folder.name, other.folder.name]
    assert names == [f"rank-00003-{os.getpid()}", f"rank-00003-{os.getpid()}-1"]
    (scratch.folder / "file").write_text("x")
    scratch.close()
    scratch.close()
    assert os.listdir(path) == names[1:]
    folder = other.folder
    del other  # without closing it
    assert not folder.exists()


# what a process has that uses its folder
USES = """
import fcntl, os, sys
folder = f"{sys.argv[1]}/rank-00001-{os.getpid()}"
os.mkdir(folder)
open(folder + "/file", "w").close()
fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
print(folder, flush=True)
sys.stdin.read()
"""


def test_folders_of_dead_processes_are_removed_and_those_in_use_are_not(tmp_path: Path):
    (tmp_path / "rank-of-a-user").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rank-00009-1").symlink_to(tmp_path / "elsewhere")
    command = [sys.executable, "-c", USES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        mine = Scratch(tmp_path, 0)
        Scratch(tmp_path, 0).close()
        assert (left / "file").exists()
        assert mine.folder.exists()
        child.kill()
        child.wait()
    Scratch(tmp_path, 0).close()
    names = ["elsewhere", "rank-00009-1", "rank-of-a-user"]
    assert sorted(os.listdir(tmp_path)) == [names[0], mine.folder.name, *names[1:]]
    mine.close()
    assert sorted(os.listdir(tmp_path)) == names


def test_an_offload_path_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StrettoError, match=r"dp.path is .*file/below: no folder can be created: Not a dir"):
        Scratch(tmp_path / "file" / "below")
    with pytest.raises(StrettoError, match=r"dp.path is /proc/nothing"):
        Scratch("/proc/nothing")


def test_a_scratch_file_returns_the_bytes_written(tmp_path: Path):
    file = ScratchFile(tmp_path / "a", 3 * ALIGN + 1, "units")
    assert file.size == 4 * ALIGN == (tmp_path / "a").stat().st_size
    values, back = block(2 * ALIGN, 1), aligned_memory(ALIGN)
    assert values.data_ptr() % ALIGN == back.data_ptr() % ALIGN == 0
    file.write(values, ALIGN)
    file.read(back, 2 * ALIGN)
    assert torch.equal(back, values[ALIGN:])
    file.close()
    assert not os.listdir(tmp_path)


def test_a_shortened_file_fails_the_read(tmp_path: Path):
    file = ScratchFile(tmp_path / "a", 4 * ALIGN, "states of unit 7")
    os.truncate(file.path, ALIGN)
    with pytest.raises(
        OffloadError, match=r"reading states of unit 7 failed: the file ends too early \(.*/a, byte"
    ):
        file.read(aligned_memory(2 * ALIGN), 0)
    file.close()


def test_a_full_disk_is_reported_at_the_start_and_a_failed_write_at_once(tmp_path: Path):
    with files_of_at_most(MIB):
        message = r"dp.path: no room for unit 5 in .*/a: File too large; the file needs 2.0 MiB"
        with pytest.raises(StrettoError, match=message):
            ScratchFile(tmp_path / "a", 2 * MIB, "unit 5")
        assert not os.listdir(tmp_path)
        file = ScratchFile(tmp_path / "b", MIB, "unit 6")
        message = (
            r"writing unit 6 failed: File too large \(.*/b, byte 1048576\); the last checkpoint is intact"
        )
        with pytest.raises(OffloadError, match=message):
            file.write(block(2 * ALIGN, 0), MIB - ALIGN)
        file.close()


def test_a_full_disk_is_reported_when_the_file_is_made(tmp_path: Path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system of a given size can be made here")
    try:
        scratch = Scratch(tmp_path)
        first = ScratchFile(scratch.folder / "a", MIB, "unit 0")
        message = r"no room for unit 1 .* No space left on device; .* 2.0 MiB, 1.0 MiB are free"
        with pytest.raises(StrettoError, match=message) as reported:
            ScratchFile(scratch.folder / "b", 2 * MIB, "unit 1")
        assert reported.value.hint is not None
        first.close()
        scratch.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
