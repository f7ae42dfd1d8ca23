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
    """As on a disk with so much room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def block(size: int, seed: int) -> torch.Tensor:
    memory = aligned_memory(size)
    return memory.copy_(torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(seed)))


def test_the_folder_says_whose_it_is_and_goes_when_closed(tmp_path: Path):
    path = tmp_path / "not" / "there"
    scratch, other = Scratch(path, 3), Scratch(path, 3)
    names = [scratch.folder.name, other.folder.name]
    assert names == [f"rank-00003-{os.getpid()}", f"rank-00003-{os.getpid()}-1"]
    (scratch.folder / "file").write_text("x")
    scratch.close()
    scratch.close()
    assert os.listdir(path) == names[1:]
    folder = other.folder
    del other  # nobody closed it
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


def test_what_dead_processes_left_is_removed_and_what_living_ones_use_is_not(tmp_path: Path):
    (tmp_path / "rank-of-somebody").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rank-00009-1").symlink_to(tmp_path / "elsewhere")
    words = [sys.executable, "-c", USES, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        own = Scratch(tmp_path, 0)
        Scratch(tmp_path, 0).close()
        assert (left / "file").exists()
        assert own.folder.exists()
        child.kill()
        child.wait()
    Scratch(tmp_path, 0).close()
    names = ["elsewhere", "rank-00009-1", "rank-of-somebody"]
    assert sorted(os.listdir(tmp_path)) == [names[0], own.folder.name, *names[1:]]
    own.close()
    assert sorted(os.listdir(tmp_path)) == names


def test_a_path_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        StrettoError, match=r"dp.path is .*file/below: no folder can be made there: Not a dir"
    ):
        Scratch(tmp_path / "file" / "below")
    with pytest.raises(StrettoError, match=r"dp.path is /proc/nothing"):
        Scratch("/proc/nothing")


def test_bytes_come_back(tmp_path: Path):
    file = ScratchFile(tmp_path / "a", 3 * ALIGN + 1, "units")
    assert file.size == 4 * ALIGN == (tmp_path / "a").stat().st_size
    values, back = block(2 * ALIGN, 1), aligned_memory(ALIGN)
    assert values.data_ptr() % ALIGN == back.data_ptr() % ALIGN == 0
    file.write(values, ALIGN)
    file.read(back, 2 * ALIGN)
    assert torch.equal(back, values[ALIGN:])
    file.close()
    assert not os.listdir(tmp_path)


def test_a_file_that_became_shorter(tmp_path: Path):
    file = ScratchFile(tmp_path / "a", 4 * ALIGN, "states of unit 7")
    os.truncate(file.path, ALIGN)
    with pytest.raises(
        OffloadError, match=r"reading states of unit 7 failed: the file ends too early \(.*/a, byte"
    ):
        file.read(aligned_memory(2 * ALIGN), 0)
    file.close()


def test_no_room_is_known_at_the_start_and_a_failed_write_when_it_fails(tmp_path: Path):
    with files_of_at_most(MIB):
        said = r"dp.path: no room for unit 5 in .*/a: File too large; the file needs 2.0 MiB"
        with pytest.raises(StrettoError, match=said):
            ScratchFile(tmp_path / "a", 2 * MIB, "unit 5")
        assert not os.listdir(tmp_path)
        file = ScratchFile(tmp_path / "b", MIB, "unit 6")
        said = r"writing unit 6 failed: File too large \(.*/b, byte 1048576\); the last checkpoint is whole"
        with pytest.raises(OffloadError, match=said):
            file.write(block(2 * ALIGN, 0), MIB - ALIGN)
        file.close()


def test_a_disk_without_room(tmp_path: Path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system of a given size can be made here")
    try:
        scratch = Scratch(tmp_path)
        first = ScratchFile(scratch.folder / "a", MIB, "unit 0")
        said = r"no room for unit 1 .* No space left on device; .* 2.0 MiB, 1.0 MiB are free"
        with pytest.raises(StrettoError, match=said) as told:
            ScratchFile(scratch.folder / "b", 2 * MIB, "unit 1")
        assert told.value.hint is not None
        first.close()
        scratch.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
