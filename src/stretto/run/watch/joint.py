"""The watch of a job that torchrun or SLURM has started: its ranks watch each other through the
rendezvous store.

Every rank publishes its row every second, and more often where a hang seems near. Rank 0 judges all of them;
the others judge rank 0, and the store: whoever makes no progress and hears nothing is cut off. A rank that
ends the job ends its own process, so that what has started it sees a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stretto.engine.progress import PROGRESS, SIZE, RankMarks, read_row
from stretto.run.watch.hang import RECORD, Seen, failure, judge, process_state, read_records, remove_records
from stretto.run.watch.record import write_now
from stretto.run.watch.waits import counted_waits

HUNG = 69  # exit code of a rank that ends since another does not answer (EX_UNAVAILABLE)
_EVERY_S, _BEAT_S = 1.0, 0.25
_SOON_S = 0.25  # between two exchanges where a hang seems near
_ANSWER_S = 5.0  # of the store
_GATHER_S = 2.5  # for records
_GRACE_S = 2.5  # for the others to read the verdict
_AGAIN_S = 2.0
_ASK = "watch/ask"
_VERDICT, _READ = "watch/verdict", "watch/read"


@contextlib.contextmanager
def watched_together(folder: Path, hang_s: float | None) -> Generator[None]:
    """Watch over the other ranks of the default process group while in the block, unless a launcher does.

    Args:
        folder: for the records of a hang.
        hang_s: as in the config; 0: hangs are not looked for.
    """
    if hang_s == 0 or PROGRESS.attached:
        yield
        return
    PROGRESS.attach(memoryview(bytearray(SIZE)), os.getpid(), socket.gethostname())
    store: Any = dist.distributed_c10d._get_default_store()
    store = store.clone()
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    watch = JointWatch(store, folder, rank=dist.get_rank(), world=dist.get_world_size(), end=_end)
    watch.start()
    try:
        with counted_waits():
            yield
    finally:
        watch.stop()


def _end(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(HUNG)


class _Heard:
    """What is known of one rank's row, and since when it is as it is."""

    def __init__(self) -> None:
        self.row: RankMarks | None = None
        self.seconds = self.mute = 0.0

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds
        self.mute += seconds

    def update(self, row: RankMarks) -> None:
        if self.row is None or row.marks != self.row.marks:
            self.seconds = 0.0
        if self.row is None or row.alive_ns != self.row.alive_ns:
            self.mute = 0.0
        self.row = row

    def seen(self, rank: int) -> Seen | None:
        if self.row is None:
            return None
        state = process_state(self.row.process) if self.row.host == socket.gethostname() else ""
        return Seen(rank=rank, row=self.row, seconds=self.seconds, mute=self.mute, state=state)


class JointWatch:
    """One rank's part of the watch.

    Args:
        store: the rendezvous, in a client of its own.
        end: ends this process with a message.
    """

    def __init__(
        self, store: Any, folder: Path, *, rank: int, world: int, end: Callable[[str], None]
    ) -> None:
        self._store, self._folder = store, folder
        self._end = end
        self.rank, self.world = rank, world
        self._heard = {other: _Heard() for other in (range(world) if rank == 0 else {0, rank})}
        self._silence = 0.0  # seconds since the store has answered
        self._requests = self._answered = 0
        self._asked_at: list[int] | None = None  # on rank 0, the marks when it asked for records
        self._soon = False
        self._wait_until = 0.0
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Watch on two threads: one of them talks to the store, which may never answer."""
        for loop in (self._talk, self._beat):
            threading.Thread(target=loop, name="watch", daemon=True).start()

    def stop(self) -> None:
        """End the threads."""
        self._stopped.set()

    # ------------------------------------------------------------------ the store

    def _talk(self) -> None:
        while not self._stopped.wait(_SOON_S if self._soon else _EVERY_S):
            with contextlib.suppress(dist.DistError, RuntimeError):
                self.exchange()

    def exchange(self) -> None:
        """Publish this rank's row, and read those that it judges."""
        store = self._store
        store.set(_key(self.rank), _packed(read_row(PROGRESS.snapshot())))
        others = [other for other in self._heard if other != self.rank]
        texts = store.multi_get([_key(other) for other in others]) if others else []
        with self._lock:
            for other, text in zip(others, texts, strict=True):
                self._heard[other].update(_unpacked(text))
            self._silence = 0.0
        if self.rank != 0 and store.check([_VERDICT]):
            text = bytes(store.get(_VERDICT)).decode()
            store.add(_READ, 1)
            self._end(text)
        if store.check([_ASK]) and (number := int(store.get(_ASK))) != self._answered:
            self._answered = number
            write_now(self._folder, self.rank)

    # ------------------------------------------------------------------ the judgement

    def _beat(self) -> None:
        process, last = os.getpid(), time.monotonic()
        while not self._stopped.wait(_BEAT_S):
            PROGRESS.alive(process)
            now = time.monotonic()
            self.look(min(now - last, 1.0))
            last = now

    def look(self, passed: float) -> None:
        """Judge, `passed` seconds after the last time; ends this process where a rank hangs."""
        with self._lock:
            self._silence += passed
            for heard in self._heard.values():
                heard.pass_time(passed)
            self._heard[self.rank].update(read_row(PROGRESS.snapshot()))
            seen = {rank: one for rank, heard in self._heard.items() if (one := heard.seen(rank)) is not None}
        mine = seen[self.rank]
        self._soon = any(one.nearly_late for one in seen.values())
        if mine.late and self._silence > mine.row.limit:
            self._leave(
                f"the rendezvous store has not answered for {self._silence:.1f} s: this host is cut off, "
                "or the store's host is gone",
                mine,
            )
        elif self.rank != 0:
            if mine.late and 0 in seen and seen[0].mute > mine.row.limit:
                host = seen[0].row.host
                self._leave(f"rank 0 on host {host} has given no sign of life for {seen[0].mute:.1f} s", mine)
        elif time.monotonic() >= self._wait_until:
            if any(one.late for one in seen.values()):
                self._judge(seen)
            else:
                self._ask_ahead(seen)

    def _leave(self, why: str, mine: Seen) -> None:
        write_now(self._folder, self.rank)
        doing = mine.row.text + (", waiting for others" if mine.row.waits else "")
        self._end(
            f"rank {self.rank} on host {mine.row.host} ends: {why}; it was in step {mine.row.step}: {doing}, "
            f"without progress for {mine.seconds:.1f} s"
        )

    def _ask_ahead(self, seen: Mapping[int, Seen]) -> None:
        """Ask for records, as they may be needed soon; remove them where they were not."""
        if self._soon and self._asked_at is None:
            self._ask(seen, 0.0)
        elif not self._soon and self._asked_at is not None:
            self._asked_at = None
            remove_records(self._folder)

    def _ask(self, seen: Mapping[int, Seen], seconds: float) -> None:
        remove_records(self._folder)
        self._asked_at = [one.row.marks for one in seen.values()]
        self._requests += 1
        number = str(self._requests)
        self._on_store(lambda: self._store.set(_ASK, number), seconds)

    def _judge(self, seen: Mapping[int, Seen]) -> None:
        """Gather what the ranks know, and end the job; on rank 0."""
        if self._asked_at != [one.row.marks for one in seen.values()]:
            self._ask(seen, _ANSWER_S)
        end = time.monotonic() + _GATHER_S
        while time.monotonic() < end and not self._has_records(seen):
            time.sleep(0.05)
        verdict = judge(seen, read_records(self._folder, self.world))
        if not any(seen[rank].late for rank in verdict.culprits):
            self._wait_until = time.monotonic() + _AGAIN_S
            self._asked_at = None
            return
        hung = failure(seen, verdict, self._folder)
        text = f"rank {hung.rank} {hung.message}\n{hung.traceback}\nhint: {hung.hint}"
        readers = sum(one.answers for one in seen.values()) - 1
        self._on_store(lambda: self._tell(text, readers), _GRACE_S)
        self._end(text)

    def _tell(self, text: str, readers: int) -> None:
        """Set the verdict, and wait until so many ranks have read it, or have had time to."""
        end = time.monotonic() + _GRACE_S
        self._store.set(_VERDICT, text)
        while self._store.add(_READ, 0) < readers and time.monotonic() < end:
            time.sleep(0.05)

    def _on_store(self, act: Callable[[], object], seconds: float) -> None:
        """Do it on a thread of its own, and wait for it: the store may not answer."""

        def run() -> None:
            with contextlib.suppress(dist.DistError, RuntimeError):
                act()

        thread = threading.Thread(target=run, name="watch verdict", daemon=True)
        thread.start()
        thread.join(seconds)

    def _has_records(self, seen: Mapping[int, Seen]) -> bool:
        return all(
            (self._folder / RECORD.format(rank=one.rank)).is_file() for one in seen.values() if one.answers
        )


def _key(rank: int) -> str:
    return f"watch/{rank}"


def _packed(row: RankMarks) -> str:
    """A row as JSON; JSON has no infinity."""
    return json.dumps({**asdict(row), "limit": min(row.limit, 1e300)})


def _unpacked(text: bytes) -> RankMarks:
    """The row of another rank; what does not say as much as a row says raises RuntimeError."""
    try:
        facts = json.loads(text)
        limit = float(facts["limit"])
        return RankMarks(
            **{name: int(facts[name]) for name in ("marks", "marked_ns", "alive_ns", "process", "step")},
            limit=inf if limit >= 1e300 else limit,
            waits=bool(facts["waits"]),
            text=str(facts["text"])[:320],
            host=str(facts["host"])[:128],
        )
    except (ValueError, TypeError, KeyError) as error:
        raise RuntimeError(f"the row of another rank is no row: {error!r}") from None
