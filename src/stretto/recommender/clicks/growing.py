"""A folder that is written over several lives of a process, and its files, which grow."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from stretto.errors import StrettoError
from stretto.run.data.checksum import CHUNK, FileSums, RunningSums
from stretto.run.data.commit import PartialFolder

STATE = "state.json"


class GrowingFile:
    """A file that is only added to, and may be opened again where it was durable: what follows is cut off."""

    def __init__(self, path: Path, sums: FileSums | None = None, chunk: int = CHUNK) -> None:
        """Open the file, whose content up to `sums` is kept.

        Raises:
            StrettoError: it is shorter than that.
        """
        sums = sums or FileSums(0)
        if sums.bytes and (not path.is_file() or path.stat().st_size < sums.bytes):
            raise StrettoError(f"{path}: shorter than it was left", hint="the same command begins anew")
        self._file = path.open("r+b" if sums.bytes else "w+b")
        self._file.truncate(sums.bytes)
        self._file.seek(sums.bytes)
        self._sums = RunningSums(sums, chunk)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        data = memoryview(data)
        if not data.nbytes:
            return
        data = data.cast("B")
        self._file.write(data)
        self._sums.add(data)

    def flush(self) -> FileSums:
        """Make all that was written durable; its sums."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._sums.sums()

    def close(self) -> None:
        self._file.close()


class WorkFolder(PartialFolder):
    """A partial folder. With a `key` it is found again by the next process that builds the same.

    `save` and `load` keep a small JSON of how far the work is. One process at a time has it.
    """

    def __init__(self, target: Path, key: str = "") -> None:
        super().__init__(target)
        self.key = key
        if key:
            self.path = target.parent / f".{target.name}.{key[:16]}.build"
        self._lock: int | None = None

    def __enter__(self) -> WorkFolder:
        if not self.key:
            super().__enter__()
            return self
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise StrettoError(
                f"{self.target}: cannot be written: {error.strerror}",
                hint="name a directory you may write to",
            ) from None
        if not _locked(self._lock):
            os.close(self._lock)
            self._lock = None
            raise StrettoError(
                f"{self.target}: another process is building it", hint="wait for it, or name another --out"
            )
        self._remove_others()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # bad input stays bad; whatever else ended the work, the next process goes on from what was saved
        if not self.key or not (self.path / STATE).exists() or isinstance(error, StrettoError):
            super().__exit__(kind, error, trace)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def save(self, state: Mapping[str, Any]) -> None:
        """Keep `state`, durably and whole, in place of what was kept before."""
        body = json.dumps(state)
        new = self.path / f"{STATE}.new"
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"state": body, "crc32": zlib.crc32(body.encode())}))
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path / STATE)

    def load(self) -> dict[str, Any] | None:
        """What was kept last; None where nothing was, or not whole."""
        try:
            parsed = json.loads((self.path / STATE).read_text(encoding="utf-8"))
            body = parsed["state"]
            return (
                cast(dict[str, Any], json.loads(body))
                if zlib.crc32(body.encode()) == parsed["crc32"]
                else None
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def forget(self) -> None:
        """Remove what was kept."""
        (self.path / STATE).unlink(missing_ok=True)

    def _remove_others(self) -> None:
        """What builds of other sources or settings for the same place left, unless they are at it."""
        for folder in self.target.parent.glob(f".{self.target.name}.*.build"):
            if folder == self.path:
                continue
            try:
                other = os.open(folder, os.O_RDONLY)
            except OSError:
                continue
            if _locked(other):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(other)


def sums_to_json(files: Mapping[str, FileSums]) -> dict[str, Any]:
    """Sums as JSON has them."""
    return {name: asdict(sums) for name, sums in files.items()}


def sums_from_json(body: Mapping[str, Any]) -> dict[str, FileSums]:
    """The other way."""
    return {name: FileSums(int(sums["bytes"]), list(sums["crc32"])) for name, sums in body.items()}


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
