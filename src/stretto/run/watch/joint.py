"""The watch of a job that torchrun or SLURM has started: its ranks watch each other through the
rendezvous store.

Every rank publishes its row every second, and more often if a hang seems near. Rank 0 judges all of them; the
others judge rank 0 and the store: a rank that makes no progress and gets no reply from the store is
considered partitioned. A rank that ends the job ends its own process, so that its launcher sees a failure.
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
from stretto.run.watch.hang import (
    RECORD,
    RankStatus,
    failure,
    judge,
    process_state,
    read_records,
    remove_records,
)
from stretto.run.watch.rank import counted_waits
from stretto.run.watch.record import write_now

HUNG = 69  # exit code of a rank that ends since another does not answer (EX_UNAVAILABLE)
_EVERY_S, _BEAT_S = 1.0, 0.25
_SOON_S = 0.25  # between two exchanges if a hang seems near
_ANSWER_S = 5.0  # of the store
_GATHER_S = 2.5  # for records
_GRACE_S = 2.5  # for the others to read the verdict
_AGAIN_S = 2.0
_ASK = "watch/ask"
_VERDICT, _READ = "watch/verdict", "watch/read"


@contextlib.contextmanager
def watched_together(folder: Path, hang_s: float | None) -> Generator[None]:
    """Watch the other ranks of the default process group inside the block, unless a launcher does.

    Args:
        folder: destination of the records of a hang.
        hang_s: limit within a step, as in the config; 0 disables the watch.
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


class PeerStatus:
    """Latest row of one rank, and for how long it has not changed."""

    def __init__(self) -> None:
        self.row: RankMarks | None = None
        self.seconds = self.silent_s = 0.0

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds
        self.silent_s += seconds

    def update(self, row: RankMarks) -> None:
        if self.row is None or row.marks != self.row.marks:
            self.seconds = 0.0
        if self.row is None or row.alive_ns != self.row.alive_ns:
            self.silent_s = 0.0
        self.row = row

    def status(self, rank: int) -> RankStatus | None:
        if self.row is None:
            return None
        state = process_state(self.row.process) if self.row.host == socket.gethostname() else ""
        return RankStatus(rank=rank, row=self.row, seconds=self.seconds, silent_s=self.silent_s, state=state)


class JointWatch:
    """One rank's part of the watch.

    Args:
        store: a separate client of the rendezvous store.
        end: callback that ends this process with a message.
    """

    def __init__(
        self, store: Any, folder: Path, *, rank: int, world: int, end: Callable[[str], None]
    ) -> None:
        self._store, self._folder = store, folder
        self._end = end
        self.rank, self.world = rank, world
        self._peers = {other: PeerStatus() for other in (range(world) if rank == 0 else {0, rank})}
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
        others = [other for other in self._peers if other != self.rank]
        texts = store.multi_get([_key(other) for other in others]) if others else []
        with self._lock:
            for other, text in zip(others, texts, strict=True):
                self._peers[other].update(_unpacked(text))
            self._silence = 0.0
        if self.rank != 0 and store.check([_VERDICT]):
            text = bytes(store.get(_VERDICT)).decode()
            store.add(_READ, 1)
            self._end(text)
        if store.check([_ASK]) and (request := int(store.get(_ASK))) != self._answered:
            self._answered = request
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
        """Judge the ranks, `passed` seconds after the last call; end this process if a rank hangs."""
        with self._lock:
            self._silence += passed
            for peer in self._peers.values():
                peer.pass_time(passed)
            self._peers[self.rank].update(read_row(PROGRESS.snapshot()))
            latest = {rank: peer.status(rank) for rank, peer in self._peers.items()}
            statuses = {rank: status for rank, status in latest.items() if status is not None}
        this_rank = statuses[self.rank]
        self._soon = any(status.nearly_late for status in statuses.values())
        if this_rank.late and self._silence > this_rank.row.limit:
            self._leave(
                f"the rendezvous store has not answered for {self._silence:.1f} s: this host is cut off, "
                "or the store's host is gone",
                this_rank,
            )
        elif self.rank != 0:
            if this_rank.late and 0 in statuses and statuses[0].silent_s > this_rank.row.limit:
                host = statuses[0].row.host
                self._leave(
                    f"rank 0 on host {host} has given no sign of life for {statuses[0].silent_s:.1f} s",
                    this_rank,
                )
        elif time.monotonic() >= self._wait_until:
            if any(status.late for status in statuses.values()):
                self._judge(statuses)
            elif self._soon and self._asked_at is None:  # records may be needed soon
                self._ask(statuses, 0.0)
            elif not self._soon and self._asked_at is not None:  # they were not
                self._asked_at = None
                remove_records(self._folder)

    def _leave(self, reason: str, this_rank: RankStatus) -> None:
        write_now(self._folder, self.rank)
        doing = this_rank.row.text + (", waiting for others" if this_rank.row.waits else "")
        self._end(
            f"rank {self.rank} on host {this_rank.row.host} ends: {reason}; it was in step "
            f"{this_rank.row.step}: {doing}, without progress for {this_rank.seconds:.1f} s"
        )

    def _ask(self, statuses: Mapping[int, RankStatus], seconds: float) -> None:
        remove_records(self._folder)
        self._asked_at = [status.row.marks for status in statuses.values()]
        self._requests += 1
        number = str(self._requests)
        self._on_store(lambda: self._store.set(_ASK, number), seconds)

    def _judge(self, statuses: Mapping[int, RankStatus]) -> None:
        """On rank 0: gather all ranks' records, and end the job if they name a rank that is late."""
        if self._asked_at != [status.row.marks for status in statuses.values()]:
            self._ask(statuses, _ANSWER_S)
        able = [status.rank for status in statuses.values() if status.answers]
        records = [self._folder / RECORD.format(rank=rank) for rank in able]
        end = time.monotonic() + _GATHER_S
        while time.monotonic() < end and not all(path.is_file() for path in records):
            time.sleep(0.05)
        verdict = judge(statuses, read_records(self._folder, self.world))
        if not any(statuses[rank].late for rank in verdict.culprits):
            self._wait_until = time.monotonic() + _AGAIN_S
            self._asked_at = None
            return
        hung = failure(statuses, verdict, self._folder)
        text = f"rank {hung.rank} {hung.message}\n{hung.traceback}\nhint: {hung.hint}"

        def publish() -> None:
            end = time.monotonic() + _GRACE_S  # for the other ranks to read it
            self._store.set(_VERDICT, text)
            while self._store.add(_READ, 0) < len(able) - 1 and time.monotonic() < end:
                time.sleep(0.05)

        self._on_store(publish, _GRACE_S)
        self._end(text)

    def _on_store(self, act: Callable[[], object], seconds: float) -> None:
        """Call `act` on a separate thread and wait at most `seconds`: the store may not answer."""

        def run() -> None:
            with contextlib.suppress(dist.DistError, RuntimeError):
                act()

        thread = threading.Thread(target=run, name="watch verdict", daemon=True)
        thread.start()
        thread.join(seconds)


def _key(rank: int) -> str:
    return f"watch/{rank}"


def _packed(row: RankMarks) -> str:
    """Return a row as JSON, which has no infinity."""
    return json.dumps({**asdict(row), "limit": min(row.limit, 1e300)})


def _unpacked(text: bytes) -> RankMarks:
    """Return the row of another rank; raise RuntimeError if the text is not a complete row."""
    try:
        fields = json.loads(text)
        limit = float(fields["limit"])
        return RankMarks(
            **{name: int(fields[name]) for name in ("marks", "marked_ns", "alive_ns", "process", "step")},
            limit=inf if limit >= 1e300 else limit,
            waits=bool(fields["waits"]),
            text=str(fields["text"])[:320],
            host=str(fields["host"])[:128],
        )
    except (ValueError, TypeError, KeyError) as error:
        raise RuntimeError(f"the row of another rank is no row: {error!r}") from None
