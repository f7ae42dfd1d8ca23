"""The cache of blocks: bounded, shared by threads and processes, and never wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from stretto.errors import StrettoError
from stretto.run.data.block_cache import BlockCache

SIZE = 1000


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


def fill(cache: BlockCache, number: int, fetch: Callable[[], bytes] | None = None) -> bytes | None:
    return cache.fill("k", number, SIZE, fetch or (lambda: content(number)))


def get(cache: BlockCache, number: int) -> bytes | None:
    return cache.get("k", number, SIZE, slice(0, SIZE))


def on_disk(folder: Path) -> int:
    """Bytes of all files in its folders, less those that go meanwhile."""
    total = 0
    for here, _, names in os.walk(folder):  # which, unlike Path.glob, takes a folder that has gone as empty
        for name in names if Path(here) != folder else ():
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(here, name))
    return total


def test_a_block_is_kept_and_read_in_parts(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10_000)
    assert get(cache, 3) is None
    assert fill(cache, 3) == content(3)
    assert cache.has("k", 3)
    assert fill(cache, 3, lambda: pytest.fail("it is there")) == content(3)
    assert BlockCache(tmp_path, 10_000).get("k", 3, SIZE, slice(10, 20)) == content(3)[10:20]
    assert not list(tmp_path.glob("*/*.partial"))


def test_the_longest_unused_are_dropped(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10 * (SIZE + 4))
    for number in range(40):
        fill(cache, number)
        assert on_disk(tmp_path) <= cache.limit
        for used in (0, number):
            path = tmp_path / "k" / str(used)
            os.utime(path, (number, number))  # as `get` does, by the second
    assert get(cache, 0) == content(0), "used all the time"
    left = sorted(int(path.name) for path in (tmp_path / "k").iterdir())
    assert left == [0, *range(40 - len(left) + 1, 40)]
    assert len(left) >= 9


def test_reading_counts_as_use(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10_000)
    fill(cache, 0)
    os.utime(tmp_path / "k" / "0", (1, 1))
    get(cache, 0)
    assert time.time() - (tmp_path / "k" / "0").stat().st_mtime < 60


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"x" + data[1:], lambda _: b""])
def test_a_damaged_block_is_fetched_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    fill(BlockCache(tmp_path, 10_000), 0)
    path = tmp_path / "k" / "0"
    path.write_bytes(damage(path.read_bytes()))
    cache = BlockCache(tmp_path, 10_000)
    assert get(cache, 0) is None
    assert fill(cache, 0) == content(0)
    assert get(cache, 0) == content(0)


def test_what_cannot_be_fetched_leaves_nothing(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10_000)

    def fail() -> bytes:
        raise StrettoError("planted")

    with pytest.raises(StrettoError, match="planted"):
        fill(cache, 0, fail)
    assert on_disk(tmp_path) == 0
    assert fill(cache, 0) == content(0)


def _die(folder: Path) -> None:
    fill(BlockCache(folder, 10_000), 0, lambda: os.kill(os.getpid(), signal.SIGKILL) or b"")


def test_what_a_killed_process_leaves_is_no_block_and_is_removed(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "k").iterdir()] == ["0.partial"]
    cache = BlockCache(tmp_path, 3 * (SIZE + 4))
    assert get(cache, 0) is None
    for number in range(1, 5):
        fill(cache, number)
    assert not (tmp_path / "k" / "0.partial").exists(), "its lock died with it"
    assert fill(cache, 0) == content(0)


def _race(folder: Path, log: Path, seed: int) -> None:
    cache = BlockCache(folder, 12 * (SIZE + 4))
    for number in np.random.default_rng(seed).integers(30, size=300).tolist():

        def fetch(number: int = number) -> bytes:
            with log.open("a") as file:
                file.write(f"{number}\n")
            return content(number)

        data = get(cache, number)
        assert (fill(cache, number, fetch) if data is None else data) == content(number)
        assert on_disk(folder) <= cache.limit + 2 * (SIZE + 4)


def test_processes_share_a_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=_race, args=(tmp_path / "c", tmp_path / "log", i)) for i in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert on_disk(tmp_path / "c") <= 12 * (SIZE + 4)


def test_a_block_is_fetched_once_however_many_want_it(tmp_path: Path) -> None:
    cache, times = BlockCache(tmp_path, 10_000), list[int]()

    def fetch() -> bytes:
        times.append(1)
        time.sleep(0.05)
        return content(0)

    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(lambda _: fill(cache, 0, fetch), range(8))} == {content(0)}
    assert len(times) == 1


def test_without_waiting_a_block_that_is_coming_is_left_to_the_other(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10_000)

    def fetch() -> bytes:
        assert cache.fill("k", 0, SIZE, lambda: pytest.fail("it is coming"), wait=False) is None
        return content(0)

    assert fill(cache, 0, fetch) == content(0)


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StrettoError, match=r"file/x: cannot be written.*") as error:
        fill(BlockCache(tmp_path / "file" / "x", 10_000), 0)
    assert "data.cache" in str(error.value.hint)
