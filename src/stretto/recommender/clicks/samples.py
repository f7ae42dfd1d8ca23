"""The training order of a click folder: a function of the sample number and the seed."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError, nearest
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.folder import ClickFolder
from stretto.run.data.permutation import positions

SPLITS = ("train", "valid", "all")
Held = float | Literal["last-part", "named"]


class ClickSamples:
    """The samples of one split of a click folder, stateless: a sample is a function of its number.

    Sample k of the order is sample k % len of epoch k // len; each epoch has an order of its own, a pure
    function of (seed, epoch). With `shuffle=False` every epoch is in the order of the log.
    """

    def __init__(
        self,
        folder: ClickFolder,
        split: str = "train",
        seed: int = 0,
        *,
        held: Held = 0.1,
        shuffle: bool = True,
        block: int = 0,
    ) -> None:
        """Take `split` of `folder`: `train`, `valid` or `all`.

        Args:
            held: what `valid` is: a share of the log, always its end, as clicks of tomorrow are to be
                predicted; `last-part`, the last file, as Criteo's last day; or `named`, the files that are
                held out by their names.
            block: shuffle runs of so many neighbouring samples; 0: every sample for itself (see `positions`).

        Raises:
            StrettoError: no such split, a share outside [0, 1), a split without samples.
        """
        if split not in SPLITS:
            near = nearest(split, SPLITS)
            raise StrettoError(
                f"split {split!r}: allowed are {', '.join(SPLITS)}",
                hint=f"did you mean {near}?" if near else None,
            )
        if block < 0:
            raise StrettoError(f"block {block}: must be at least 0", hint="usual are 0 and 4096")
        self.folder = folder
        self.split = split
        self.seed = seed
        self.shuffle = shuffle
        self.block = block
        cut = cut_of(folder, held)
        self.range = {"train": range(cut), "valid": range(cut, folder.samples), "all": range(folder.samples)}[
            split
        ]
        if not self.range:
            raise StrettoError(
                f"{folder.path}: no samples for {split!r}: {folder.samples} samples, held out is {held}",
                hint="a share between 0 and 1, or a folder of more than one file for last-part",
            )

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self.range)

    def where(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples of the folder at `indices` of the order: int64 [len(indices)]."""
        epochs, offsets = np.divmod(indices, len(self.range))
        for epoch in np.unique(epochs).tolist() if self.shuffle else ():
            here = epochs == epoch
            offsets[here] = positions(offsets[here], len(self.range), self.seed, epoch, self.block)
        return self.range.start + offsets

    def batch(self, first: int, count: int, part: tuple[int, int] | None = None) -> ClickBatch:
        """See ClickSource."""
        assert first >= 0, "sample numbers start at 0"
        start, stop = part or (0, count)
        assert 0 <= start <= stop <= count, f"part {part} of {count} samples"
        return self.folder.arrays.gather(self.where(np.arange(first + start, first + stop)))


def cut_of(folder: ClickFolder, held: Held) -> int:
    """The first sample that is held out.

    Raises:
        StrettoError: a share that is none.
    """
    if isinstance(held, str):
        parts = 1 if held == "last-part" else folder.index.held_parts
        return sum(samples for _, samples in folder.index.parts[: len(folder.index.parts) - parts])
    if not 0 <= held < 1:
        raise StrettoError(f"held out: {held}", hint="a share of the log from 0 to below 1, or last-part")
    return folder.samples - round(held * folder.samples)
