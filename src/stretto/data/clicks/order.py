"""The order in which samples are seen: a function of (seed, position), nothing kept.

Fully shuffled, every sample of a batch lies somewhere else in the files. That is quick while they fit into
memory; from a disk, each sample would be a read of its own. In blocks, runs of neighbouring samples are
shuffled as a whole, and then the samples of `WINDOW` successive ones of them among each other: the disk reads
runs, and the memory that is looked at is that of a window.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from stretto.data.permutation import Permutation

WINDOW = 64
"""Blocks that are shuffled together."""


def positions(
    wanted: NDArray[np.int64], size: int, seed: int, epoch: int, block: int = 0
) -> NDArray[np.int64]:
    """Which of `size` samples stand at positions `wanted` of an epoch: a permutation of range(size).

    block: samples of a run that is moved as one; 0: none, every sample for itself.
    """
    if not block or block * 2 > size:
        return Permutation(size, seed, epoch)(wanted)
    found = wanted.copy()
    span = block * WINDOW
    windows = wanted // span
    for window in np.unique(windows).tolist():
        here = windows == window
        own = min(span, size - window * span)
        inside = Permutation(own, _window_seed(seed, window), epoch)
        found[here] = window * span + inside(wanted[here] - window * span)
    # the last samples that fill no block stay at the end of the order, within the last window
    whole = size // block
    blocks = found // block
    moved = blocks < whole
    shuffled = Permutation(whole, seed, epoch)(blocks[moved])
    found[moved] = shuffled * block + found[moved] % block
    return found


def _window_seed(seed: int, window: int) -> int:
    """A seed for the order within a window, unlike that of the blocks."""
    digest = hashlib.blake2b(f"window {window} of {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
