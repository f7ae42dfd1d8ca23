"""A click folder: samples of a click log, transformed, in flat files that are mapped into memory.

dense.bin       float32 [samples, numbers]
labels.bin      uint8 [samples], 0 or 1
ids.bin         uint32, or int64 where a feature's ids may be larger, sample by sample and in a sample
                feature by feature: [samples, ids of a sample]
lengths.bin     uint16 [samples, features] and
offsets.bin     int64 [samples + 1], where each sample's ids begin: only where the number of ids varies
weights.bin     float32, of each id: only where ids have weights
transform.json  how raw lines became these numbers and ids (see transform.py), with
vocabulary.bin  the ids that have rows of their own: neither is there for synthetic clicks
index.json      counts, popularity, sizes, checksums (see index.py)

All are little endian.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks import index as names
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.index import ClickIndex, Feature, Popularity, read_index
from stretto.recommender.tables.jagged import Jagged
from stretto.run.config.sources import is_click_folder
from stretto.run.data.checksum import check_chunks, check_size

if TYPE_CHECKING:
    from stretto.recommender.clicks.transform import ClickTransform


class Arrays:
    """Read-only maps: dense [samples, numbers], labels [samples], ids [samples, width] or, where their number
    varies, [n] with lengths [samples, features] and offsets [samples + 1]; weights as ids, or None."""

    def __init__(self, folder: Path, index: ClickIndex) -> None:
        samples, features = index.samples, len(index.features)
        self.jagged = index.jagged
        self.hot = tuple(feature.hot or 0 for feature in index.features)
        self.dense = _map(folder / names.DENSE, "<f4", (samples, len(index.numbers)))
        self.labels = _map(folder / names.LABELS, "u1", (samples,))
        id_type = np.dtype(index.dtype).newbyteorder("<").str
        self.ids = _map(folder / names.IDS, id_type, (-1,) if self.jagged else (samples, index.width))
        self.weights = _map(folder / names.WEIGHTS, "<f4", self.ids.shape) if index.weighted else None
        self.lengths = self.offsets = None
        if self.jagged:
            self.lengths = _map(folder / names.LENGTHS, "<u2", (samples, features))
            self.offsets = _map(folder / names.OFFSETS, "<i8", (samples + 1,))

    def gather(self, samples: NDArray[np.int64]) -> ClickBatch:
        """The samples of these numbers, in this order."""
        dense = torch.from_numpy(self.dense[samples])
        labels = torch.from_numpy(self.labels[samples].astype(np.float32))
        return ClickBatch(dense, self._jagged(samples) if self.jagged else self._fixed(samples), labels)

    def _fixed(self, samples: NDArray[np.int64]) -> Jagged:
        ids = torch.from_numpy(self._by_feature(self.ids[samples]).astype(np.int64, copy=False))
        weights = None
        if self.weights is not None:
            weights = torch.from_numpy(self._by_feature(self.weights[samples]))
        lengths = torch.tensor(self.hot).unsqueeze(1).expand(len(self.hot), len(samples))
        return Jagged(ids, lengths, weights, self.hot)

    def _by_feature(self, rows: NDArray[Any]) -> NDArray[Any]:
        """[n, width] sample by sample to flat feature by feature."""
        if set(self.hot) == {1}:
            return np.ascontiguousarray(rows.T).reshape(-1)
        cuts = np.cumsum(self.hot)[:-1]
        return np.concatenate([part.reshape(-1) for part in np.split(rows, cuts, axis=1)])

    def _jagged(self, samples: NDArray[np.int64]) -> Jagged:
        assert self.lengths is not None
        assert self.offsets is not None
        lengths = self.lengths[samples].astype(np.int64)
        starts = np.cumsum(lengths, axis=1) - lengths + self.offsets[samples][:, None]
        at = runs(np.ascontiguousarray(starts.T), np.ascontiguousarray(lengths.T))
        ids = torch.from_numpy(self.ids[at].astype(np.int64, copy=False))
        weights = None if self.weights is None else torch.from_numpy(self.weights[at])
        return Jagged(ids, torch.from_numpy(np.ascontiguousarray(lengths.T)), weights)


def runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ..., start + length - 1 of each run, one after another: int64 [sum of lengths]."""
    starts, lengths = starts.reshape(-1), lengths.reshape(-1)
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def by_sample(ids: Jagged) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]:
    """Ids, lengths [samples, features] and weights of a batch, sample by sample."""
    lengths = ids.lengths.numpy().astype(np.int64)
    starts = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
    at = runs(np.ascontiguousarray(starts.T), np.ascontiguousarray(lengths.T))
    weights = None if ids.weights is None else ids.weights.numpy()[at].astype(np.float32, copy=False)
    return ids.ids.numpy()[at], np.ascontiguousarray(lengths.T), weights


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """A map of a file; of an empty one an empty array, which cannot be mapped."""
    try:
        if not path.stat().st_size:
            return np.zeros([max(0, size) for size in shape], dtype)
        mapped = np.memmap(path, dtype=np.dtype(dtype), mode="r")
    except (OSError, ValueError) as error:
        raise StrettoError(f"{path}: cannot be mapped: {error}", hint="check its permissions") from None
    # a plain array over the map: taking samples from it is quicker than through memmap's own class
    return np.asarray(mapped).reshape(shape)


CHECKED_WHOLE = 1 << 28
"""Opening checks every byte of files smaller than this, and the first and last chunk of larger ones."""


class ClickFolder:
    """An open click folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open and check.

        Raises:
            StrettoError: not a click folder, another version, truncated, corrupt.
        """
        self.path = Path(path)
        self.index: ClickIndex = read_index(self.path)
        for name, sums in self.index.files.items():
            check_size(self.path / name, sums)
            few = None if sums.bytes < CHECKED_WHOLE else {0, len(sums.crc32) - 1}
            check_chunks(self.path / name, sums, self.index.chunk, few)
        self.arrays = Arrays(self.path, self.index)
        offsets = self.arrays.offsets
        if offsets is not None and (int(offsets[0]), int(offsets[-1])) != (0, len(self.arrays.ids)):
            raise StrettoError(
                f"{self.path / names.OFFSETS}: does not span the ids", hint="make the folder again"
            )

    def __reduce__(self) -> tuple[object, ...]:
        # other processes map the files again; nothing is copied
        return ClickFolder, (self.path,)

    @property
    def samples(self) -> int:
        return self.index.samples

    @property
    def numbers(self) -> list[str]:
        """Names of the dense columns."""
        return self.index.numbers

    @property
    def features(self) -> list[Feature]:
        return self.index.features

    @property
    def base_rate(self) -> float:
        """Share of samples with label 1."""
        return self.index.positives / self.index.samples

    def table_rows(self) -> dict[str, int | None]:
        """Rows that each feature's table must have; None: its ids are unbounded."""
        return {feature.name: feature.rows for feature in self.features}

    def notes(self) -> list[str]:
        """Lines of text about rows and columns of the log that the folder leaves out."""
        lines, unread = self.index.lines, self.index.extra.get("unread", ())
        notes = list[str]()
        if bad := lines.get("malformed", 0):
            notes.append(
                f"{bad:,} of {lines['read']:,} lines ({bad / lines['read']:.2%}) are malformed, left out"
            )
        if unread:
            more = f" and {len(unread) - 8} more" if len(unread) > 8 else ""
            notes.append(f"columns that are not read: {', '.join(unread[:8])}{more}")
        return notes

    def popularity(self) -> dict[str, Popularity]:
        """How often the ids of each feature are looked up."""
        return self.index.popularity

    @cached_property
    def transform(self) -> ClickTransform | None:
        """What made the samples, for lines to come; None for synthetic clicks."""
        from stretto.recommender.clicks.transform import ClickTransform

        return ClickTransform.load(self.path) if names.TRANSFORM in self.index.files else None

    def verify(self) -> None:
        """Check every byte of every file.

        Raises:
            StrettoError: the first fault found.
        """
        for name, sums in self.index.files.items():
            check_size(self.path / name, sums)
            check_chunks(self.path / name, sums, self.index.chunk)


def open_if_current(path: Path, key: str) -> ClickFolder | None:
    """The click folder at `path` if it is whole and was made for `key`."""
    if not key or not is_click_folder(path):
        return None
    try:
        folder = ClickFolder(path)
    except StrettoError:
        return None
    return folder if folder.index.key == key else None
