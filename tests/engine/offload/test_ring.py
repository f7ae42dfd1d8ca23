"""Blocks in files, a few of them in memory: what is fetched is what was put, in any order of calls."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.engine.offload import scratch
from stretto.engine.offload.ring import PrefetchRing
from stretto.engine.offload.scratch import OffloadError, ScratchFile


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[PrefetchRing]:
    prefetch_ring = PrefetchRing(tmp_path, "block", slots=3)
    yield prefetch_ring
    prefetch_ring.close()


def filled(ring: PrefetchRing, blocks: int, size: int = 5000) -> dict[int, Tensor]:
    want = dict[int, Tensor]()
    for key in range(blocks):
        memory = ring.add(key, size + key)
        want[key] = torch.randint(0, 256, (size + key,), dtype=torch.uint8)
        memory.copy_(want[key])
        ring.put(key)
    return want


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["fetch", "start", "put", "blank", "release"]), st.integers(0, 6)),
        max_size=60,
    ),
    slots=st.integers(1, 4),
    delay=st.integers(0, 3),
)
def test_any_order_of_calls_gives_what_was_put(
    calls: list[tuple[str, int]], slots: int, delay: int, tmp_path_factory: pytest.TempPathFactory
):
    ring = PrefetchRing(tmp_path_factory.mktemp("ring"), "block", slots, threads=1 + delay % 2)
    want, buffers = filled(ring, 7), dict[int, Tensor]()
    for at, (call, key) in enumerate(calls):
        if call == "start":
            ring.start_fetch(key)
        elif call in ("fetch", "blank") and key not in buffers and len(buffers) < slots:
            buffers[key] = getattr(ring, call)(key)[: want[key].numel()]
            if call == "blank":
                buffers[key].fill_(at)
                want[key].fill_(at)
            assert torch.equal(buffers[key], want[key])
        elif call == "put" and key in buffers:
            buffers.pop(key).add_(1)
            want[key] += 1
            ring.put(key)
        elif call == "release" and key in buffers:
            if at % 2 or not torch.equal(buffers[key], want[key]):
                continue
            buffers.pop(key)
            ring.put(key)  # blank ones are not in the file yet
    for key in list(buffers):
        buffers.pop(key)
        ring.put(key)
    for key in random.Random(len(calls)).sample(range(7), 7):
        assert torch.equal(ring.fetch(key)[: want[key].numel()], want[key])
        ring.release(key)
    ring.close()


def slow(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> list[str]:
    """Transfers of one kind take that long; returns the names of files as they end."""
    done, real = list[str](), getattr(ScratchFile, name)

    def later(self: ScratchFile, memory: Tensor, start: int) -> None:
        time.sleep(seconds)
        real(self, memory, start)
        done.append(self.path.name)

    monkeypatch.setattr(ScratchFile, name, later)
    return done


def test_a_read_waits_for_the_write_of_the_same_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ring = PrefetchRing(tmp_path, "block", threads=4)  # one is free to read too early
    want = filled(ring, 6)
    ring.drain()
    slow(monkeypatch, "write", 0.1)
    ring.fetch(0).add_(1)
    began = time.perf_counter()
    ring.put(0)
    for key in (1, 2, 3):  # its memory goes to another meanwhile
        ring.start_fetch(key)
    ring.fetch(1)
    ring.release(1)  # this is free
    assert torch.equal(ring.fetch(0)[:5000], want[0] + 1)
    assert time.perf_counter() - began > 0.09
    ring.close()


def test_memory_is_reused_only_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ring = PrefetchRing(tmp_path, "block", slots=1, threads=4)
    want = filled(ring, 2)
    ring.drain()
    slow(monkeypatch, "write", 0.1)
    ring.fetch(0).add_(1)
    ring.put(0)
    assert torch.equal(ring.fetch(1)[:5000], want[1][:5000])
    ring.release(1)
    assert torch.equal(ring.fetch(0)[:5000], want[0] + 1)
    ring.close()


def test_reads_ahead_and_writes_behind_run_beside_the_caller(
    ring: PrefetchRing, monkeypatch: pytest.MonkeyPatch
):
    filled(ring, 6)
    ring.drain()
    waited, moved, bytes_before = ring.waited_s, ring.moved_s, ring.moved
    for name in ("read", "write"):
        slow(monkeypatch, name, 0.02)
    for key in range(6):
        ring.fetch(key)
        for ahead in (key + 1, key + 2):
            if ahead < 6:
                ring.start_fetch(ahead)
        time.sleep(0.06)  # the work on it
        ring.put(key)
    ring.drain()
    assert ring.moved - bytes_before >= 2 * 6 * 8192 - 3 * 8192  # three may have been in memory still
    waited, moved = ring.waited_s - waited, ring.moved_s - moved
    assert moved > 0.15
    assert waited < 0.5 * moved


def test_a_ring_uses_the_memory_of_its_slots(ring: PrefetchRing):
    filled(ring, 9)
    for key in range(9):
        ring.start_fetch(key)
        ring.start_fetch((key + 1) % 9)
    slots = {ring.fetch(key).data_ptr() for key in range(3)}
    assert len(slots) == 3
    with pytest.raises(AssertionError, match="all 3 blocks of memory are held"):
        ring.fetch(4)
    for key in range(3):
        ring.release(key)
    for key in range(3, 9):
        assert ring.fetch(key).data_ptr() in slots
        ring.release(key)


def test_a_needed_block_evicts_one_that_was_read_ahead(ring: PrefetchRing):
    want = filled(ring, 7)
    for key in (4, 5, 6):
        ring.start_fetch(key)
    for key in (0, 1, 2):
        assert torch.equal(ring.fetch(key)[: 5000 + key], want[key])


def test_a_failed_write_is_raised_by_the_next_call(ring: PrefetchRing, monkeypatch: pytest.MonkeyPatch):
    filled(ring, 5)
    ring.drain()
    real = scratch.os.pwritev

    def broken(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(scratch.os, "pwritev", broken)
    for key in (0, 1, 2):
        ring.fetch(key)
    ring.put(1)
    message = (
        r"writing block 1 failed: Input/output error \(.*block-00001, byte 0\); the last checkpoint is intact"
    )
    with pytest.raises(OffloadError, match=message):
        ring.fetch(4)
    with pytest.raises(OffloadError, match=message):
        ring.drain()
    monkeypatch.setattr(scratch.os, "pwritev", real)


def test_check_raises_the_errors_of_finished_transfers(ring: PrefetchRing, monkeypatch: pytest.MonkeyPatch):
    filled(ring, 2)
    ring.check()
    ring.drain()
    gone = threading.Event()

    def broken(*arguments: object) -> int:
        gone.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch.os, "pwritev", broken)
    ring.fetch(0)
    ring.put(0)
    assert gone.wait(10)
    time.sleep(0.1)
    with pytest.raises(OffloadError, match="No space left"):
        ring.check()


def test_blocks_in_memory_are_not_read_again(ring: PrefetchRing, monkeypatch: pytest.MonkeyPatch):
    want = filled(ring, 3)
    reads = slow(monkeypatch, "read", 0.0)
    for _ in range(3):
        for key in range(3):
            ring.start_fetch((key + 1) % 3)
            assert torch.equal(ring.fetch(key)[: 5000 + key], want[key])
            ring.release(key)
    assert not reads
