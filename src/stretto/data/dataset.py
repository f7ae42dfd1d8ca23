"""Samples for a language model: fixed lengths of one split's token stream, in an order that is a function.

Sample k of an epoch is the window [p * sequence, (p + 1) * sequence + 1) of the split, p = permutation(seed,
epoch)(k): the last token of a window is the first of the next, so every token but the first is predicted
exactly once an epoch (fewer than `sequence` tokens at the end of the split are left out).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.data.indexed import TokenFolder
from stretto.data.permutation import Permutation
from stretto.data.split import SPLITS, split_tokens
from stretto.errors import StrettoError, nearest


class Samples:
    """The samples of one split of a token folder; holds no position: an index says all.

    Index k is sample k % len of epoch k // len; each epoch has an order of its own, a pure function of (seed,
    epoch). With `shuffle=False` every epoch is in the order of the stream.
    """

    def __init__(
        self,
        folder: TokenFolder,
        split: str,
        sequence: int,
        seed: int = 0,
        *,
        ratio: str = "949,50,1",
        shuffle: bool = True,
    ) -> None:
        """Take `split` ("train", "valid" or "test") of `folder` cut by `ratio`; `sequence` in tokens.

        Raises:
            StrettoError: no such split, malformed ratio, fewer than `sequence + 1` tokens.
        """
        if split not in SPLITS:
            near = nearest(split, SPLITS)
            raise StrettoError(
                f"split {split!r}: allowed are {', '.join(SPLITS)}",
                hint=f"did you mean {near}?" if near else None,
            )
        if sequence < 1:
            raise StrettoError(
                f"sequence {sequence}: must be at least 1", hint="the usual lengths are 128 to 8192"
            )
        self.folder, self.split, self.sequence, self.seed, self.shuffle = (
            folder,
            split,
            sequence,
            seed,
            shuffle,
        )
        self.range = split_tokens(cast(Sequence[int], folder.offsets), ratio)[split]
        self._length = (len(self.range) - 1) // sequence
        if self._length < 1:
            raise _too_short(folder, split, len(self.range), sequence, ratio)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    def starts(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Where in the folder's tokens the samples begin: int64 [len(indices)]."""
        epochs, positions = np.divmod(np.asarray(indices, dtype=np.int64), self._length)
        assert (epochs >= 0).all(), "sample indices start at 0"
        for epoch in np.unique(epochs) if self.shuffle else ():
            here = epochs == epoch
            positions[here] = Permutation(self._length, self.seed, int(epoch))(positions[here])
        return self.range.start + positions * self.sequence

    def sample(self, index: int) -> NDArray[np.int64]:
        """Token ids of sample `index`: int64 [sequence + 1]."""
        return self._ids([index])[0]

    def batch(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs, and targets one token on: two int64 tensors [len(indices), sequence] on the CPU."""
        ids = self._ids(indices)
        return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(ids[:, 1:].copy())

    def _ids(self, indices: Sequence[int]) -> NDArray[np.int64]:
        within = np.arange(self.sequence + 1)
        return self.folder.tokens[self.starts(indices)[:, None] + within].astype(np.int64)


def _too_short(folder: TokenFolder, split: str, tokens: int, sequence: int, ratio: str) -> StrettoError:
    fits = tokens - 1
    fixes = [f"use sequence {fits} or less"] if fits > 0 else []
    fixes += ["give more text", f"give {split} a larger share of the split {ratio!r}"]
    return StrettoError(
        f"{split} split of {folder.path}: {tokens} tokens of {folder.index.tokens},"
        f" one sample of sequence {sequence} needs {sequence + 1}",
        hint=", ".join(fixes[:-1]) + f", or {fixes[-1]}",
    )
