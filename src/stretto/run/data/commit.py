"""A folder that appears complete or not at all: written under another name, then renamed."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from stretto.engine.checkpoint.files import sync_folder
from stretto.errors import StrettoError

_STALE_SECONDS = 24 * 3600
_TRIES = 8


class PartialFolder:
    """`with PartialFolder(target) as partial:` write into `partial.path`, then `partial.commit(...)`.

    Several processes may write one target at once, each in a folder of its own. Without a commit nothing is
    left behind. Leftovers of a killed process are removed a day later.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.{secrets.token_hex(6)}.partial"

    def __enter__(self) -> PartialFolder:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            for folder in self.target.parent.glob(f".{self.target.name}.*.partial"):
                with suppress(OSError):
                    newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
                    if time.time() - newest > _STALE_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            raise StrettoError(
                f"{self.target}: cannot be written: {error.strerror}",
                hint="name a directory you may write to",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def commit(self, is_as_good: Callable[[Path], bool]) -> None:
        """Rename the folder to its target; an existing one stays if it `is_as_good`, else it is replaced."""
        sync_folder(self.path)
        for _ in range(_TRIES):
            try:
                self.path.rename(self.target)
                sync_folder(self.target.parent)
                return
            except OSError:
                if not self.target.is_dir():
                    raise
            if is_as_good(self.target):
                return
            # renamed away, then deleted: readers see the old folder, none, or the new one
            aside = self.path.with_name(f"{self.path.name}.old.partial")
            with suppress(FileNotFoundError):
                self.target.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
        raise StrettoError(
            f"{self.target}: other processes keep writing it", hint="give each of them another --out"
        )
