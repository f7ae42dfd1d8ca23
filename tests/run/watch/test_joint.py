"""Ranks that watch each other through a store: rank 0 judges all, the others rank 0 and the store."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.engine.progress import PROGRESS, SIZE, ProgressMarks, label, read_row
from stretto.run.watch import joint
from stretto.run.watch.joint import JointWatch, _key, _packed, _unpacked


class Store:
    """A store in this process; it can be cut off."""

    def __init__(self) -> None:
        self.values, self.cut = dict[str, bytes](), False

    def _reach(self) -> None:
        if self.cut:
            raise RuntimeError("no answer")

    def set(self, key: str, value: str) -> None:
        self._reach()
        self.values[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self._reach()
        number = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(number).encode()
        return number

    def get(self, key: str) -> bytes:
        self._reach()
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        self._reach()
        return all(key in self.values for key in keys)


class Ended(Exception):
    pass


def end(text: str) -> None:
    raise Ended(text)


class Job:
    """One rank's watch, and the rows of the others in the store."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.store, self.rank = Store(), rank
        self.others = {other: ProgressMarks() for other in range(world) if other != rank}
        for other, progress in self.others.items():
            progress.attach(memoryview(bytearray(SIZE)), 2**30 + other, f"host{other}")
        for progress in (PROGRESS, *self.others.values()):
            progress.limit(10.0, 100.0, 7)
            progress.mark(label("work"))
        self.watch = JointWatch(self.store, folder, rank=rank, world=world, end=end)

    def run(self, seconds: int, *, working: tuple[int, ...] = (), alive: tuple[int, ...] = ()) -> None:
        for _ in range(seconds):
            for other, progress in self.others.items():
                if other in working:
                    progress.mark(label("work"))
                if other in (*working, *alive):
                    progress.alive(2**30 + other)
                self.store.values[_key(other)] = _packed(read_row(progress.snapshot())).encode()
            PROGRESS.alive(os.getpid())
            if self.rank in working:
                PROGRESS.mark(label("work"))
            try:
                self.watch.exchange()
            except RuntimeError:
                assert self.store.cut
            self.watch.look(1.0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    PROGRESS.attach(memoryview(bytearray(SIZE)), os.getpid(), "host")
    monkeypatch.setattr(joint, "_GATHER_S", 0.0)
    monkeypatch.setattr(joint, "_GRACE_S", 0.0)
    monkeypatch.setattr(joint, "write_now", lambda *_: None)
    return lambda rank, world=4: Job(tmp_path, rank, world)


def test_rank_0_names_the_one_without_a_sign_of_life(job: Callable[..., Job]) -> None:
    ranks = job(0)
    ranks.run(60, working=(0, 1, 2, 3))
    with pytest.raises(Ended, match=r"^rank 2 hangs on host host2: step 7: work;.* no sign of life"):
        ranks.run(14, alive=(1, 3))
    assert b"hangs on host host2" in ranks.store.values["watch/verdict"]


def test_records_are_asked_for_ahead_and_once(job: Callable[..., Job]) -> None:
    ranks = job(0)
    ranks.run(20, working=(0, 1, 2, 3))
    ranks.run(6, alive=(0, 1, 2, 3))
    assert "watch/ask" not in ranks.store.values
    ranks.run(3, alive=(0, 1, 2, 3))
    assert ranks.store.values["watch/ask"] == b"1"
    with pytest.raises(Ended):
        ranks.run(5, alive=(0, 1, 2, 3))
    assert ranks.store.values["watch/ask"] == b"1"


def test_the_others_read_the_verdict(job: Callable[..., Job]) -> None:
    ranks = job(3)
    ranks.run(3, working=(0, 1, 2, 3))
    ranks.store.values["watch/verdict"] = b"rank 2 hangs"
    with pytest.raises(Ended, match=r"^rank 2 hangs$"):
        ranks.run(1, working=(0, 1, 2, 3))
    assert ranks.store.values["watch/read"] == b"1", "rank 0 need not wait for it"


def test_rank_0_is_judged_too(job: Callable[..., Job]) -> None:
    ranks = job(3)
    ranks.run(20, working=(0, 3))
    ranks.run(20, alive=(0,))  # it lives, and judges
    with pytest.raises(Ended, match=r"^rank 3 on host .* ends: rank 0 on host host0 has given no sign"):
        ranks.run(14)


@pytest.mark.parametrize("rank", [0, 3])
def test_who_is_cut_off_ends(job: Callable[..., Job], rank: int) -> None:
    ranks = job(rank)
    ranks.run(3, working=(0, 1, 2, 3))
    ranks.store.cut = True
    ranks.run(30, working=(0, 1, 2, 3)) if rank else None  # a job that goes on needs no store
    with pytest.raises(Ended, match="the rendezvous store has not answered" if rank else "hangs"):
        ranks.run(14)


def test_rows_of_others_are_read_with_care() -> None:
    row = replace(read_row(PROGRESS.snapshot()), limit=float("inf"))
    assert _unpacked(_packed(row).encode()) == row
    values: list[Any] = [b"", b"[]", b"{}", b"\xff", b'{"limit": "x"}', b"[" * 10000]
    for text in values:
        with pytest.raises(RuntimeError):
            _unpacked(text)
