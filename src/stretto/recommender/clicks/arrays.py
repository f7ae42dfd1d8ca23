"""The memory-mapped arrays of a click folder, and gathering samples from them into a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks import index as names
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.index import ClickIndex
from stretto.recommender.tables.jagged import Jagged


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
