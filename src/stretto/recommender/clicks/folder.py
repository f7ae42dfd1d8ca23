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
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.recommender.clicks import index as names
from stretto.recommender.clicks.arrays import Arrays
from stretto.recommender.clicks.index import ClickIndex, Feature, Popularity, is_click_folder, read_index
from stretto.run.data.checksum import check_chunks, check_size

if TYPE_CHECKING:
    from stretto.recommender.clicks.transform import ClickTransform

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
