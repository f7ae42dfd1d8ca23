"""The lease of a run's folder, by which one job at a time writes to it.

`lease.json` names the job that holds the folder. On one machine that job also holds a lock on this file, and
each of its ranks one on the folder, which the system takes back however they end. Other machines may not see
locks: they go by the file's time of modification, which the holder renews every few seconds.

A job whose lease was taken over, since it had given no sign of life, writes no more checkpoints.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import sys
import threading
import time
import uuid
from collections.abc import Generator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from stretto.errors import StrettoError

LEASE = "lease.json"
BEAT_S = 5.0  # between two signs of life
STALE_S = 30.0  # after this long without one, a job of another machine has ended
_PATIENCE_S = 0.5  # for a job that is just ending
_TOKEN = "STRETTO_LEASE"  # names the lease to this job's ranks
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The job that holds a folder.

    Attributes:
        machine: the host's name and the number of its last start.
        process: its number on that machine: the launcher, or rank 0 under torchrun.
        since: when it took the lease, in UTC.
        job: of torchrun or of SLURM, which may start it again elsewhere.
        starts: how often SLURM has started it again.
        token: unlike any other's.
    """

    machine: str
    process: int
    since: str
    job: str | None
    starts: int
    token: str

    @property
    def text(self) -> str:
        """Host and process, in words."""
        return f"a job on host {self.machine.partition('/')[0]}, process {self.process}, since {self.since}"

    def starts_again(self, holder: Holder) -> bool:
        """Whether this is the same job, whose ranks of before have been ended by who started it again."""
        if self.job is None or self.job != holder.job:
            return False
        return self.job.startswith(_TORCHRUN) or self.starts > holder.starts


@contextlib.contextmanager
def lease(folder: Path | None) -> Generator[None]:
    """Hold the folder, which is made if need be, for as long as this job may write to it; None: there
    is none.

    Raises:
        StrettoError: another job holds it, or it cannot be written to.
    """
    if folder is None:
        yield
        return
    made = _make(folder)
    descriptor = -1
    try:
        mine = _myself()
        descriptor = _take(folder, mine)
        before = os.environ.get(_TOKEN)
        os.environ[_TOKEN] = mine.token
        ended = threading.Event()
        beats = threading.Thread(target=_beat, args=(folder, mine, ended), name="lease", daemon=True)
        beats.start()
        try:
            yield
        finally:
            ended.set()
            beats.join()
            if before is None:
                del os.environ[_TOKEN]
            else:
                os.environ[_TOKEN] = before
            if _read(folder) == mine:
                (folder / LEASE).unlink(missing_ok=True)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        for path in made:
            with contextlib.suppress(OSError):  # something was written there
                path.rmdir()


@contextlib.contextmanager
def share(folder: Path) -> Generator[None]:
    """On each rank: no other job takes the folder before this rank has ended, whatever becomes of the job's
    launcher.
    """
    descriptor = None
    with contextlib.suppress(OSError):  # rank 0 says it, when it writes there
        descriptor = os.open(folder, os.O_RDONLY)
    if descriptor is None:  # outside of the handler, which failures of the job would name as their cause
        yield
        return
    try:
        _lock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def check_lease(folder: Path) -> None:
    """Raise StrettoError where another job has taken this job's lease over."""
    token, holder = os.environ.get(_TOKEN), _read(folder)
    if token is not None and holder is not None and holder.token != token:
        raise StrettoError(
            f"{folder} was taken over by {holder.text}: this job gave no sign of life for {STALE_S:.0f} s",
            hint="nothing more is written there; that job goes on from the last checkpoint",
        )


def _make(folder: Path) -> list[Path]:
    """Make the folder; returns the folders that were not there, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None
    return missing


def _take(folder: Path, mine: Holder) -> int:
    """Take the lease; returns the descriptor that holds its lock."""
    began, said = time.monotonic(), False
    while True:
        try:
            descriptor = os.open(folder / LEASE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(folder, error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a pipe would never end
            os.close(descriptor)
            raise StrettoError(f"{folder / LEASE} is not a plain file", hint="remove it")
        try:
            problem = _obstacle(folder, descriptor, mine)
            if problem is None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(mine)).encode(), 0)
                os.fsync(descriptor)
                return descriptor
        except OSError as error:
            os.close(descriptor)
            raise _unusable(folder, error) from None
        os.close(descriptor)
        waited, ending = time.monotonic() - began, isinstance(problem, _Ending)
        if waited > (STALE_S if ending else _PATIENCE_S):
            raise problem
        if ending and waited > 1 and not said:
            print(f"{problem.message}: waiting until they have ended", file=sys.stderr, flush=True)
            said = True
        time.sleep(0.05)


def _obstacle(folder: Path, descriptor: int, mine: Holder) -> StrettoError | None:
    """Why the lease, whose file is open, cannot be taken; the lock on it is held if it can."""
    locks = _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder = _read(folder)
    if locks is False:
        return _in_use(folder, holder)
    try:
        there = os.stat(folder / LEASE)
    except FileNotFoundError:  # its holder has just ended
        return _in_use(folder, None)
    if (there.st_dev, there.st_ino) != ((ours := os.fstat(descriptor)).st_dev, ours.st_ino):
        return _in_use(folder, holder)
    inner = os.open(folder, os.O_RDONLY)
    try:
        if _lock(inner, fcntl.LOCK_EX | fcntl.LOCK_NB) is False:
            return _Ending(
                f"ranks of an earlier job, whose launcher is gone, are still writing to {folder}",
                hint="wait until they have ended, or give another run.name",
            )
    finally:
        os.close(inner)
    if holder is None or mine.starts_again(holder):
        return None
    if holder.machine == mine.machine:
        gone = locks is True or not is_running(holder.process)
        return None if gone else _in_use(folder, holder)
    silent = time.time() - there.st_mtime
    return None if silent > STALE_S else _in_use(folder, holder, silent)


class _Ending(StrettoError):
    """Only ranks are left of the job that held the folder: they save, and end."""


def _in_use(folder: Path, holder: Holder | None, silent: float | None = None) -> StrettoError:
    who = "another job" if holder is None else holder.text
    hint = "wait until it has ended, or give another run.name"
    if silent is not None:
        who += f"; its last sign of life was {max(silent, 0):.0f} s ago"
        free = f"{STALE_S:.0f} s after its last sign of life"
        hint = f"if it has ended, the folder is free {free}; else {hint}"
    return StrettoError(f"{folder} is in use by {who}", hint=hint)


def _unusable(folder: Path, error: OSError) -> StrettoError:
    why = error.strerror or str(error)
    return StrettoError(f"run folder {folder} cannot be written to: {why}", hint="give another run.dir")


def _lock(descriptor: int, operation: int) -> bool | None:
    """Whether the lock is held now; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _read(folder: Path) -> Holder | None:
    """Who holds the folder; None where that is not known."""
    path = folder / LEASE
    try:
        record: Any = json.loads(path.read_bytes()[:4096]) if path.is_file() else None
        return Holder(**cast("dict[str, Any]", record)) if _is_holder(record) else None
    except (OSError, ValueError, RecursionError):
        return None


def _is_holder(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    kinds = {"machine": str, "process": int, "since": str, "job": str | None, "starts": int}
    kinds |= {"token": str}
    record = cast("dict[str, Any]", record)
    return set(record) == set(kinds) and all(isinstance(record[name], kind) for name, kind in kinds.items())


def _beat(folder: Path, mine: Holder, ended: threading.Event) -> None:
    """Renew the file's time until the job ends, or the lease is another's."""
    while not ended.wait(BEAT_S) and _read(folder) == mine:
        with contextlib.suppress(OSError):
            os.utime(folder / LEASE)


def _myself() -> Holder:
    with contextlib.suppress(OSError):
        start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return _holder(f"{socket.gethostname()}/{start}")
    return _holder(socket.gethostname())


def _holder(machine: str) -> Holder:
    names = (_TORCHRUN, "SLURM_JOB_ID")
    jobs = [f"{name} {os.environ[name]}" for name in names if os.environ.get(name, "none") != "none"]
    now = datetime.now(UTC)
    return Holder(
        machine=machine,
        process=os.getpid(),
        since=f"{now:%Y-%m-%d %H:%M:%S} UTC",
        job=jobs[0] if jobs else None,
        starts=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
        token=uuid.uuid4().hex,
    )


def is_running(process: int) -> bool:
    """Whether a process of this machine may still run; True where the system does not say."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
