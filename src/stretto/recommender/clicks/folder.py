"""A click folder: samples of a click log, transformed, in flat files that are mapped into memory.

dense.bin       float32 [samples, numbers]
labels.bin      uint8 [samples], 0 or 1
ids.bin         uint32, or int64 if a feature's ids may be larger, sample by sample and in a sample
                feature by feature: [samples, ids of a sample]
lengths.bin     uint16 [samples, features] and
offsets.bin     int64 [samples + 1], the start of each sample's ids: only if the number of ids varies
weights.bin     float32, a weight for each id: only if ids have weights
transform.json  the transform from raw lines to these numbers and ids (see transform.py), with
vocabulary.bin  the ids that have their own rows: synthetic clicks have neither
index.json      counts, lookup histograms, sizes, checksums (see index.py)

All are little endian.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import StrettoError, nearest
from stretto.recommender.clicks import index as names
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.index import CategoricalFeature, ClickIndex, LookupHistogram, read_index
from stretto.recommender.tables.jagged import Jagged
from stretto.run.config.sources import is_click_folder
from stretto.run.data.checksum import check_chunks, check_size
from stretto.run.data.permutation import positions

if TYPE_CHECKING:
    from stretto.recommender.clicks.transform import ClickTransform


class Arrays:
    """Read-only memory maps of a folder's files.

    Attributes:
        dense: [samples, numbers].
        labels: [samples].
        ids: [samples, width], or [n] if the number of ids varies.
        lengths, offsets: [samples, features] and [samples + 1], or None if the number of ids is fixed.
        weights: shaped as `ids`, or None.
    """

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
        """Return the samples with these indices, in this order."""
        hot = None
        if self.jagged:
            assert self.lengths is not None
            assert self.offsets is not None
            by_sample = self.lengths[samples].astype(np.int64)
            starts = np.cumsum(by_sample, axis=1) - by_sample + self.offsets[samples][:, None]
            index = runs(np.ascontiguousarray(starts.T), np.ascontiguousarray(by_sample.T))
            ids = self.ids[index]
            weights = None if self.weights is None else self.weights[index]
            lengths = torch.from_numpy(np.ascontiguousarray(by_sample.T))
        else:
            hot = self.hot
            ids = self._by_feature(self.ids[samples])
            weights = None if self.weights is None else self._by_feature(self.weights[samples])
            lengths = torch.tensor(hot).unsqueeze(1).expand(len(hot), len(samples))
        return ClickBatch(
            torch.from_numpy(self.dense[samples]),
            Jagged(
                torch.from_numpy(ids.astype(np.int64, copy=False)),
                lengths,
                None if weights is None else torch.from_numpy(weights),
                hot,
            ),
            torch.from_numpy(self.labels[samples].astype(np.float32)),
        )

    def _by_feature(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Reorder [n, width], sample by sample, to a flat array, feature by feature."""
        if set(self.hot) == {1}:
            return np.ascontiguousarray(rows.T).reshape(-1)
        cuts = np.cumsum(self.hot)[:-1]
        return np.concatenate([part.reshape(-1) for part in np.split(rows, cuts, axis=1)])


def runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenate the indices [start, start + length) of each run: int64 [sum of lengths]."""
    starts, lengths = starts.reshape(-1), lengths.reshape(-1)
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def by_sample(ids: Jagged) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]:
    """Return ids, lengths [samples, features] and weights of a batch, sample by sample."""
    lengths = ids.lengths.numpy().astype(np.int64)
    starts = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(lengths.shape)
    index = runs(np.ascontiguousarray(starts.T), np.ascontiguousarray(lengths.T))
    weights = None if ids.weights is None else ids.weights.numpy()[index].astype(np.float32, copy=False)
    return ids.ids.numpy()[index], np.ascontiguousarray(lengths.T), weights


def _map(path: Path, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file into memory; an empty file, which cannot be mapped, is an empty array."""
    try:
        if not path.stat().st_size:
            return np.zeros([max(0, size) for size in shape], dtype)
        mapped = np.memmap(path, dtype=np.dtype(dtype), mode="r")
    except (OSError, ValueError) as error:
        raise StrettoError(f"{path}: cannot be mapped: {error}", hint="check its permissions") from None
    # a plain array over the map: taking samples from it is quicker than through memmap's own class
    return np.asarray(mapped).reshape(shape)


FULL_CHECK = 1 << 28
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
            chunks = None if sums.bytes < FULL_CHECK else {0, len(sums.crc32) - 1}
            check_chunks(self.path / name, sums, self.index.chunk, chunks)
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
    def features(self) -> list[CategoricalFeature]:
        return self.index.features

    @property
    def base_rate(self) -> float:
        """Share of samples with label 1."""
        return self.index.positives / self.index.samples

    def table_rows(self) -> dict[str, int | None]:
        """Rows that each feature's table must have; None if its ids are unbounded."""
        return {feature.name: feature.rows for feature in self.features}

    def notes(self) -> list[str]:
        """Lines of text about lines and columns of the log that the folder leaves out."""
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

    def popularity(self) -> dict[str, LookupHistogram]:
        """Histogram of each feature's lookups."""
        return self.index.popularity

    @cached_property
    def transform(self) -> ClickTransform | None:
        """The transform that made the samples, for new lines; None for synthetic clicks."""
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
    """Return the click folder at `path` if it is complete and was made for `key`, else None."""
    if not key or not is_click_folder(path):
        return None
    try:
        folder = ClickFolder(path)
    except StrettoError:
        return None
    return folder if folder.index.key == key else None


SPLITS = ("train", "valid", "all")
HeldOut = float | Literal["last-part", "named"]


class ClickSamples:
    """The samples of one split of a click folder in training's order, a function of the index and the seed.

    Sample k of the order is sample k % len of epoch k // len; the order of each epoch is a pure function of
    (seed, epoch). With `shuffle=False` every epoch is in the order of the log.
    """

    def __init__(
        self,
        folder: ClickFolder,
        split: str = "train",
        seed: int = 0,
        *,
        held_out: HeldOut = 0.1,
        shuffle: bool = True,
        block: int = 0,
    ) -> None:
        """Open the split `train`, `valid` or `all` of `folder`.

        Args:
            held_out: the split `valid`: a share of the log, always its end, since a model is to predict the
                clicks of tomorrow; `last-part`, the last file, such as Criteo's last day; or `named`, the
                files that are held out by their names.
            block: number of neighbouring samples that are shuffled together; 0 shuffles single samples (see
                `positions`).

        Raises:
            StrettoError: no such split, a share outside [0, 1), a split without samples.
        """
        if split not in SPLITS:
            close = nearest(split, SPLITS)
            raise StrettoError(
                f"split {split!r}: allowed are {', '.join(SPLITS)}",
                hint=f"did you mean {close}?" if close else None,
            )
        if block < 0:
            raise StrettoError(f"block {block}: must be at least 0", hint="typical values are 0 and 4096")
        self.folder = folder
        self.split = split
        self.seed = seed
        self.shuffle = shuffle
        self.block = block
        cut = first_held_out(folder, held_out)
        self.range = {"train": range(cut), "valid": range(cut, folder.samples), "all": range(folder.samples)}[
            split
        ]
        if not self.range:
            raise StrettoError(
                f"{folder.path}: no samples for {split!r}: {folder.samples} samples, held out is {held_out}",
                hint="a share between 0 and 1, or a folder of more than one file for last-part",
            )

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self.range)

    def folder_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map indices of the order to sample numbers of the folder: int64 [len(indices)]."""
        epochs, offsets = np.divmod(indices, len(self.range))
        for epoch in np.unique(epochs).tolist() if self.shuffle else ():
            mask = epochs == epoch
            offsets[mask] = positions(offsets[mask], len(self.range), self.seed, epoch, self.block)
        return self.range.start + offsets

    def batch(self, first: int, count: int, part: tuple[int, int] | None = None) -> ClickBatch:
        """See ClickSource."""
        assert first >= 0, "sample numbers start at 0"
        start, stop = part or (0, count)
        assert 0 <= start <= stop <= count, f"part {part} of {count} samples"
        return self.folder.arrays.gather(self.folder_samples(np.arange(first + start, first + stop)))


def first_held_out(folder: ClickFolder, held_out: HeldOut) -> int:
    """Index of the first sample that is held out.

    Raises:
        StrettoError: a share outside [0, 1).
    """
    if isinstance(held_out, str):
        parts = 1 if held_out == "last-part" else folder.index.held_parts
        return sum(samples for _, samples in folder.index.parts[: len(folder.index.parts) - parts])
    if not 0 <= held_out < 1:
        raise StrettoError(f"held out: {held_out}", hint="a share of the log from 0 to below 1, or last-part")
    return folder.samples - round(held_out * folder.samples)
