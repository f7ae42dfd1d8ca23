"""The lease of a run's folder, by which one job at a time writes to it.

`lease.json` names the job that holds the folder. On one machine that job also holds a lock on this file, and
each of its ranks one on the folder, which the system takes back however they end. Other machines may not see
locks: they go by the file's time of modification, which the holder renews every few seconds. No two clocks
are compared: who wants the folder watches for the time to change, for so long by its own clock.

A job whose lease was taken over, since it had given no sign of life, writes no more checkpoints; nor does one
whose folder or lease was removed.
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
STALE_S = 30.0  # a job of another machine that is watched for so long without one has ended
_PATIENCE_S = 0.5  # for a job that is just ending
_SETTLE_S = 1.0  # for another machine that takes the same lease over in the same moment
_RETRY_S = 2.0  # for a lease that is being written, or a file server that does not answer
_TOKEN = "STRETTO_LEASE"  # names the lease to this job's ranks, and the folder's device and inode
_TORCHRUN = "TORCHELASTIC_RUN_ID"
LOST = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN)  # what a folder that is gone answers
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
        RunFolderLost: at the end it is no longer there.
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
        os.environ[_TOKEN] = f"{mine.token} {identity(folder)}"
        ended = threading.Event()
        beats = threading.Thread(target=_beat, args=(folder, mine, ended), name="lease", daemon=True)
        beats.start()
        try:
            yield
            check_folder(folder)
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
    """Raise StrettoError if another job has taken this job's lease over, or as `check_folder`."""
    check_folder(folder)
    token, holder = os.environ.get(_TOKEN, "").partition(" ")[0], _read(folder)
    if token and holder is not None and holder.token != token:
        raise StrettoError(
            f"{folder} was taken over by {holder.text}: this job gave no sign of life for {STALE_S:.0f} s",
            hint="nothing more is written there; that job goes on from the last checkpoint",
        )


def check_folder(folder: Path) -> None:
    """Raise RunFolderLost if the folder or its lease is not there any more."""
    if (lost := lost_folder(folder)) is not None:
        raise RunFolderLost(lost, hint="start it again, and remove no folder that a job writes to")


class RunFolderLost(StrettoError):
    """The run's folder was removed, or replaced by another, while a job wrote to it."""


def lost_folder(folder: Path, before: str = "") -> str | None:
    """Why the folder that this job has leased is not its own any more; None: it is, or none was leased.

    Args:
        before: the folder's `identity` when it was first written to, for a job without a lease.
    """
    token, _, leased = os.environ.get(_TOKEN, "").partition(" ")
    end = time.monotonic() + _RETRY_S
    while True:
        now = identity(folder)
        if now == "" and (token or before):
            return f"run folder {folder} was removed while the job wrote to it"
        if now != (leased or now) or now != (before or now):
            return f"run folder {folder} was replaced by another while the job wrote to it"
        if not token or _read(folder) is not None:
            return None
        if time.monotonic() > end:
            return f"{folder / LEASE}, by which the job holds its run's folder, was removed or cannot be read"
        time.sleep(0.05)


def leave_folder() -> None:
    """Hold no folder from now on: `check_lease` has nothing to check."""
    os.environ.pop(_TOKEN, None)


def identity(folder: Path) -> str:
    """The folder's device and inode; "" where there is none."""
    try:
        status = folder.stat()
    except OSError as error:
        if error.errno not in LOST:
            raise
        return ""
    return f"{status.st_dev}:{status.st_ino}"


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
    watched, since = "", began  # the last sign of life from another machine, and when it was first seen
    while True:
        try:
            descriptor = os.open(folder / LEASE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(folder, error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # reading a pipe would never end
            os.close(descriptor)
            raise StrettoError(f"{folder / LEASE} is not a plain file", hint="remove it")
        try:
            stale = watched if time.monotonic() - since > STALE_S else ""
            problem = _obstacle(folder, descriptor, mine, stale)
            if problem is None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(mine)).encode(), 0)
                os.fsync(descriptor)
                if stale:
                    time.sleep(_SETTLE_S)
                if stale and (holder := _read(folder)) != mine:
                    raise _in_use(folder, holder)
                return descriptor
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise _unusable(folder, error) from None
            raise
        os.close(descriptor)
        now = time.monotonic()
        if isinstance(problem, _Elsewhere):
            if watched and problem.sign != watched:
                raise StrettoError(f"{problem.message}; it has just renewed its lease", hint=problem.hint)
            watched, since = problem.sign, since if watched else now
            note = f"watching for {STALE_S:.0f} s whether it still renews its lease"
        else:
            note = "waiting until they have ended"
            if now - began > (STALE_S if isinstance(problem, _Ending) else _PATIENCE_S):
                raise problem
        if now - began > 1 and not said:
            print(f"{problem.message}: {note}", file=sys.stderr, flush=True)
            said = True
        time.sleep(0.05)


def _obstacle(folder: Path, descriptor: int, mine: Holder, stale: str) -> StrettoError | None:
    """Why the lease, whose file is open, cannot be taken; the lock on it is held if it can.

    Args:
        stale: the last sign of life of a job of another machine, which has given no other for long enough.
    """
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
    sign = f"{holder.token} {there.st_mtime_ns}"
    return None if sign == stale else _Elsewhere(_in_use(folder, holder), sign)


class _Ending(StrettoError):
    """Only ranks are left of the job that held the folder: they save, and end."""


class _Elsewhere(StrettoError):
    """A job of another machine holds the folder, if it has not ended; `sign` changes when it renews that."""

    def __init__(self, refusal: StrettoError, sign: str) -> None:
        super().__init__(refusal.message, hint=refusal.hint)
        self.sign = sign


def _in_use(folder: Path, holder: Holder | None) -> StrettoError:
    who = "another job" if holder is None else holder.text
    hint = "wait until it has ended, or give another run.name"
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
    """Renew the file's time until the job ends, or the lease is another's. A lease that cannot be read for a
    moment is no other's.
    """
    while not ended.wait(BEAT_S) and _read(folder) in (mine, None):
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
