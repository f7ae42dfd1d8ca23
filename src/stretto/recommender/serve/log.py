"""New clicks as a trained model reads them: a raw log through training's transform, or a click folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.build import bytes_read
from stretto.recommender.clicks.files import find_files, open_reader_like
from stretto.recommender.clicks.folder import ClickFolder
from stretto.recommender.clicks.index import TRANSFORM
from stretto.recommender.clicks.raw import Parsed, ParsedBlock
from stretto.recommender.clicks.transform import RARE, ClickTransform
from stretto.recommender.config.schema import ClickDataConfig
from stretto.recommender.train.clicks import rank_slice
from stretto.run.config.sources import is_click_folder

OnError = Literal["fatal", "nan"]


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """Consecutive samples of a log.

    Attributes:
        batch: this rank's samples.
        good: which samples of all ranks can be read, bool [samples]; the others have no probability. If none
            can be, `batch` is None.
        unknown: number of this rank's ids without a row of their own: training saw them rarely, or never.
        ids: number of this rank's ids, without missing values.
        done: bytes (or samples) of the log read so far.
    """

    batch: ClickBatch | None
    good: NDArray[np.bool_]
    unknown: int
    ids: int
    done: int


class ClickLog(Protocol):
    """A log to be read once, in order, the same on every rank.

    Attributes:
        labelled: whether samples have labels.
        total: what `LogPart.done` reaches.
    """

    labelled: bool
    total: int

    def parts(self, size: int, rank: int, world: int) -> Iterator[LogPart]:
        """Yield the log in parts of up to `size` samples, of which each rank has its share."""
        ...


class RawLog:
    """Files of a click log.

    Args:
        on_error: `fatal`: a malformed line is an error; `nan`: its probability is not a number.
    """

    def __init__(
        self, sources: Sequence[str], transform: ClickTransform, data: ClickDataConfig, on_error: OnError
    ) -> None:
        """Look at the first file.

        Raises:
            StrettoError: no such files, or other columns than the model's log had.
        """
        self._files, self._transform = find_files(sources), transform
        self._reader = open_reader_like(self._files, transform.columns, data.format, data.columns.label)
        self._on_error = on_error
        self.total = sum(file.size for file in self._files)
        if self._reader.columns != transform.columns:
            raise StrettoError(
                f"{self._files[0].path} has other columns than the log that the model was trained on, or "
                "other types of them",
                hint="give a log of the format that it was trained on",
            )
        self.labelled = self._has_labels()

    def _has_labels(self) -> bool:
        for piece in self._reader.read(self._files[0].path):
            return piece.parsed.chunk.labels is not None
        return False

    def parts(self, size: int, rank: int, world: int) -> Iterator[LogPart]:
        """See ClickLog; raises StrettoError for a malformed line if that is fatal."""
        before = 0
        for file in self._files:
            for piece in self._reader.read(file.path):
                good = self._good(file.path, piece)
                places = np.flatnonzero(good)
                done = before + min(file.size, bytes_read(file, piece.start))
                start = 0
                for first in range(0, max(1, len(places)), size):
                    count = min(size, len(places) - first)
                    # samples that cannot be read belong to the part before them
                    last = first + count == len(places)
                    stop = len(good) if last else int(places[first + count])
                    share = tuple(first + index for index in rank_slice(count, rank, world))
                    yield self._part(piece.parsed, good[start:stop], share, done)
                    start = stop
            before += file.size

    def _part(self, parsed: Parsed, good: NDArray[np.bool_], share: tuple[int, ...], done: int) -> LogPart:
        """Return the samples `share` of a piece, which are this rank's."""
        if not good.any():
            return LogPart(batch=None, good=good, unknown=0, ids=0, done=done)
        chosen = np.zeros(parsed.chunk.samples, bool)
        chosen[share[0] : share[1]] = True
        chunk = parsed.chunk.select(chosen)
        batch = self._transform.batch(chunk)
        ids = int((~chunk.missing).sum())
        unknown = int((batch.ids.ids == RARE).sum()) if self._transform.kind == "vocabulary" else 0
        return LogPart(batch=batch, good=good, unknown=unknown, ids=ids, done=done)

    def _good(self, path: Path, piece: ParsedBlock) -> NDArray[np.bool_]:
        """Return which samples of a piece can be read."""
        parsed = piece.parsed
        if not parsed.faults:
            return np.ones(parsed.chunk.samples, bool)
        line, reason = parsed.faults[0]
        if self._on_error == "fatal":
            raise StrettoError(
                f"{path}, line {line}: {reason}",
                hint="fix it, or give such lines no probability: --on-error nan",
            )
        if parsed.blank:
            raise StrettoError(
                f"{path}: blank lines among malformed ones, such as line {line}: {reason}",
                hint="remove the blank lines, so that it is clear which probability is whose",
            )
        first = piece.line - parsed.lines
        good = np.ones(parsed.lines, bool)
        good[[at - first for at, _ in parsed.faults]] = False
        return good


class FolderLog:
    """The samples of a click folder, in the order of the log.

    Args:
        transform: that of training, or None for synthetic clicks.
    """

    labelled = True

    def __init__(self, path: Path, transform: ClickTransform | None) -> None:
        """Open and check.

        Raises:
            StrettoError: a damaged folder, or one of another transform than the model's.
        """
        self._folder = ClickFolder(path)
        saved = self._folder.transform
        expected = None if transform is None else transform.to_files()[TRANSFORM]
        if expected != (None if saved is None else saved.to_files()[TRANSFORM]):
            raise StrettoError(
                f"{path}: its ids are not those that the model was trained on: another transform made them",
                hint="name the files of the log, which are transformed as in training",
            )
        self._vocabulary = transform is not None and transform.kind == "vocabulary"
        self.total = self._folder.samples

    def parts(self, size: int, rank: int, world: int) -> Iterator[LogPart]:
        """See ClickLog."""
        for first in range(0, self.total, size):
            count = min(size, self.total - first)
            start, stop = rank_slice(count, rank, world)
            batch = self._folder.arrays.gather(np.arange(first + start, first + stop))
            ids = batch.ids.ids
            yield LogPart(
                batch=batch,
                good=np.ones(count, bool),
                unknown=int((ids == RARE).sum()) if self._vocabulary else 0,
                ids=int((ids != 0).sum()) if self._vocabulary else len(ids),
                done=first + count,
            )


def open_log(
    sources: Sequence[str], transform: ClickTransform | None, data: ClickDataConfig, on_error: OnError
) -> ClickLog:
    """Return the log that a user names: files, or a click folder.

    Raises:
        StrettoError: it cannot be read, or does not fit the model.
    """
    if len(sources) == 1 and is_click_folder(path := Path(sources[0]).expanduser()):
        return FolderLog(path, transform)
    if transform is None:
        raise StrettoError(
            f"{sources[0]}: the model was trained on synthetic clicks, which no files are like",
            hint="name a click folder that stretto data synth-clicks wrote",
        )
    return RawLog(sources, transform, data, on_error)
