"""The lease of a run's folder, by which one job at a time writes to it.

`lease.json` names the job that holds the folder. On one machine that job also holds a lock on this file, and
each of its ranks one on the folder, which the system releases however they end. Other machines may not see
locks: they rely on the file's modification time, which the holder renews every few seconds. Clocks are never
compared: a job that wants the folder waits, by its own clock, for this time to change.

A job whose lease was taken over because it had given no sign of life writes no more checkpoints, nor does a
job whose folder or lease was removed.
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
STALE_S = 30.0  # a job of another machine that gives no sign of life for so long has ended
_PATIENCE_S = 0.5  # for a job that is just ending
_SETTLE_S = 1.0  # for another machine that takes the same lease over at the same moment
_RETRY_S = 2.0  # for a lease that is being written, or a file server that does not answer
_TOKEN = "STRETTO_LEASE"  # names the lease to this job's ranks, and the folder's device and inode
_TORCHRUN = "TORCHELASTIC_RUN_ID"
LOST = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN)  # errors from a folder that is gone
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF, errno.EINVAL)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The job that holds a folder.

    Attributes:
        machine: the host's name and boot id.
        process: process id there: the launcher's, or rank 0's under torchrun.
        since: when it took the lease, in UTC.
        job: job id of torchrun or SLURM, which may start the job again elsewhere.
        starts: number of restarts by SLURM.
        token: unique to this lease.
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
        """True if this is the same job, whose earlier ranks were ended by torchrun or SLURM."""
        if self.job is None or self.job != holder.job:
            return False
        return self.job.startswith(_TORCHRUN) or self.starts > holder.starts


@contextlib.contextmanager
def lease(folder: Path | None) -> Generator[None]:
    """Hold the folder for as long as this job may write to it; it is created if necessary.

    Args:
        folder: the run's folder, or None if the job has none.

    Raises:
        StrettoError: another job holds it, or it cannot be written to.
        RunFolderLost: at the end it no longer exists.
    """
    if folder is None:
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None
    descriptor = -1
    try:
        names = (_TORCHRUN, "SLURM_JOB_ID")
        jobs = [f"{name} {os.environ[name]}" for name in names if os.environ.get(name, "none") != "none"]
        now = datetime.now(UTC)
        this_job = Holder(
            machine=this_machine(),
            process=os.getpid(),
            since=f"{now:%Y-%m-%d %H:%M:%S} UTC",
            job=jobs[0] if jobs else None,
            starts=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            token=uuid.uuid4().hex,
        )
        descriptor = _acquire(folder, this_job)
        before = os.environ.get(_TOKEN)
        os.environ[_TOKEN] = f"{this_job.token} {identity(folder)}"
        ended = threading.Event()
        beats = threading.Thread(target=_renew, args=(folder, this_job, ended), name="lease", daemon=True)
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
            if read_lease(folder) == this_job:
                (folder / LEASE).unlink(missing_ok=True)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        for path in created:
            with contextlib.suppress(OSError):  # something was written there
                path.rmdir()


@contextlib.contextmanager
def share_folder(folder: Path) -> Generator[None]:
    """On each rank, keep other jobs from taking the folder before this rank has ended, whatever happens to
    the job's launcher.
    """
    descriptor = None
    with contextlib.suppress(OSError):  # rank 0 reports it when it writes there
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
    """Raise StrettoError if another job has taken this job's lease over; also what `check_folder` raises."""
    check_folder(folder)
    token, holder = os.environ.get(_TOKEN, "").partition(" ")[0], read_lease(folder)
    if token and holder is not None and holder.token != token:
        raise StrettoError(
            f"{folder} was taken over by {holder.text}: this job gave no sign of life for {STALE_S:.0f} s",
            hint="nothing more is written there; that job continues from the last checkpoint",
        )


def check_folder(folder: Path) -> None:
    """Raise RunFolderLost if the folder or its lease no longer exists."""
    if (lost := lost_folder(folder)) is not None:
        raise RunFolderLost(lost, hint="start it again, and remove no folder that a job writes to")


class RunFolderLost(StrettoError):
    """The run's folder was removed, or replaced by another, while a job wrote to it."""


def lost_folder(folder: Path, before: str = "") -> str | None:
    """Return why the folder no longer is the one that this job has leased, or None if it is or none was
    leased.

    Args:
        folder: the run's folder.
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
        if not token or read_lease(folder) is not None:
            return None
        if time.monotonic() > end:
            return f"{folder / LEASE}, by which the job holds its run's folder, was removed or cannot be read"
        time.sleep(0.05)


def leave_folder() -> None:
    """Forget the lease: from now on `check_lease` has nothing to check."""
    os.environ.pop(_TOKEN, None)


def identity(folder: Path) -> str:
    """Return the folder's device and inode; "" if it does not exist."""
    try:
        status = folder.stat()
    except OSError as error:
        if error.errno not in LOST:
            raise
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def _acquire(folder: Path, this_job: Holder) -> int:
    """Take the lease; return the descriptor that holds its lock."""
    began, reported = time.monotonic(), False
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
            problem = _obstacle(folder, descriptor, this_job, stale)
            if problem is None:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(asdict(this_job)).encode(), 0)
                os.fsync(descriptor)
                if stale:
                    time.sleep(_SETTLE_S)
                if stale and (holder := read_lease(folder)) != this_job:
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
        if now - began > 1 and not reported:
            print(f"{problem.message}: {note}", file=sys.stderr, flush=True)
            reported = True
        time.sleep(0.05)


def _obstacle(folder: Path, descriptor: int, this_job: Holder, stale: str) -> StrettoError | None:
    """Return why the lease cannot be taken, or None if it can; then the lock on its file is held.

    Args:
        descriptor: the lease's open file.
        stale: last sign of life from a job of another machine that has given no other for STALE_S.
    """
    locks = _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    holder = read_lease(folder)
    if locks is False:
        return _in_use(folder, holder)
    try:
        status = os.stat(folder / LEASE)
    except FileNotFoundError:  # its holder has just ended
        return _in_use(folder, None)
    if (status.st_dev, status.st_ino) != ((opened := os.fstat(descriptor)).st_dev, opened.st_ino):
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
    if holder is None or this_job.starts_again(holder):
        return None
    if holder.machine == this_job.machine:
        gone = locks is True or not is_running(holder.process)
        return None if gone else _in_use(folder, holder)
    sign = f"{holder.token} {status.st_mtime_ns}"
    return None if sign == stale else _Elsewhere(_in_use(folder, holder), sign)


class _Ending(StrettoError):
    """The launcher of the job that held the folder is gone; its ranks still save, and end."""


class _Elsewhere(StrettoError):
    """A job of another machine may hold the folder; `sign` changes when it renews its lease."""

    def __init__(self, refusal: StrettoError, sign: str) -> None:
        super().__init__(refusal.message, hint=refusal.hint)
        self.sign = sign


def _in_use(folder: Path, holder: Holder | None) -> StrettoError:
    who = "another job" if holder is None else holder.text
    hint = "wait until it has ended, or give another run.name"
    return StrettoError(f"{folder} is in use by {who}", hint=hint)


def _unusable(folder: Path, error: OSError) -> StrettoError:
    reason = error.strerror or str(error)
    return StrettoError(f"run folder {folder} cannot be written to: {reason}", hint="give another run.dir")


def _lock(descriptor: int, operation: int) -> bool | None:
    """Return whether the lock is now held, or None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def this_machine() -> str:
    """Return this host's name, with its boot id if it has one."""
    machine = socket.gethostname()
    with contextlib.suppress(OSError):
        machine += "/" + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return machine


def local_launcher(folder: Path) -> int | None:
    """Return the process of this machine that holds the folder, by which the job can be asked to stop, or
    None if there is none. The lock on the lease tells its holder from a later process of the same number.
    """
    holder = read_lease(folder)
    if holder is None or holder.machine != this_machine() or not is_running(holder.process):
        return None
    try:
        descriptor = os.open(folder / LEASE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return None if _lock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB) else holder.process
    finally:
        os.close(descriptor)


def read_lease(folder: Path) -> Holder | None:
    """Return the job that holds the folder, or None if there is none or its lease cannot be read."""
    path = folder / LEASE
    try:
        record: Any = json.loads(path.read_bytes()[:4096]) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    types = {"machine": str, "process": int, "since": str, "job": str | None, "starts": int, "token": str}
    if not isinstance(record, dict):
        return None
    record = cast("dict[str, Any]", record)
    if set(record) != set(types) or not all(isinstance(record[name], kind) for name, kind in types.items()):
        return None
    return Holder(**record)


def _renew(folder: Path, this_job: Holder, ended: threading.Event) -> None:
    """Renew the file's modification time until the job ends or another job has the lease. A lease that cannot
    be read for a moment counts as this job's.
    """
    while not ended.wait(BEAT_S) and read_lease(folder) in (this_job, None):
        with contextlib.suppress(OSError):
            os.utime(folder / LEASE)


def is_running(process: int) -> bool:
    """True if a process of this machine may still run, or if the system does not report it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
