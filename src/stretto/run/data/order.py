"""The order of samples, computed from a seed, and what of a source at a URL is fetched ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.data.permutation import WINDOW, block_order, positions
from stretto.run.data.split import ALL, SPLITS, check_split, range_of
from stretto.run.data.token_source import RemoteElements, TokenSource

_RUN = 1 << 10


class ChunkedFunction:
    """A function of sample numbers, computed for runs of 1,024 of them: many cost hardly more than one.

    Args:
        function: takes consecutive numbers, int64 [n], and gives an int64 array of n rows.
    """

    def __init__(self, function: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        self._function = function
        self._known = dict[int, NDArray[np.int64]]()

    def __call__(self, numbers: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Its values, in rows."""
        if isinstance(numbers, range) and len(numbers) and numbers.step == 1:
            run, place = divmod(numbers.start, _RUN)
            if place + len(numbers) <= _RUN:  # as nearly always
                return self._run(run)[place : place + len(numbers)]
        runs, places = np.divmod(np.asarray(numbers, dtype=np.int64), _RUN)
        row = self._run(int(runs[0]) if len(runs) else 0).shape[1:]
        values = np.empty((len(runs), *row), dtype=np.int64)
        for run in {*runs.tolist()}:
            here = runs == run
            values[here] = self._run(run)[places[here]]
        return values

    def _run(self, run: int) -> NDArray[np.int64]:
        assert run >= 0, "sample numbers start at 0"
        known = self._known.get(run)
        if known is None:
            known = self._function(np.arange(run * _RUN, (run + 1) * _RUN))
            known.flags.writeable = False
            # only neighbours are needed again; a new dict, for a thread may be reading the other
            self._known = {run: known, **dict(list(self._known.items())[:3])}
        return known


class Ordered:
    """Samples of one split of a token source, by index; it keeps no position.

    Index k is sample k % len of epoch k // len; each epoch has an order of its own, a pure function of (seed,
    epoch). With `shuffle=False` every epoch is in the order of the stream; with `within` samples are shuffled
    within so many tokens (see `permutation.positions`), without it over the whole split.
    """

    whole = False  # whether the split may be all of the stream

    def __init__(
        self,
        source: TokenSource,
        split: str,
        sequence: int,
        seed: int,
        *,
        ratio: str,
        shuffle: bool,
        within: int,
    ) -> None:
        check_split(split, (*SPLITS, ALL) if self.whole else SPLITS)
        check_sequence(sequence)
        self.source = source
        self.split = split
        self.sequence = sequence
        self.seed = seed
        self.shuffle = shuffle
        self.range = range_of(source, split, ratio)
        self._length, self._within = 0, within
        self._each = sequence  # tokens from one sample to the next
        # runs, counted over the epochs: the first of the window that is read, and up to which blocks come
        self._window = self._ahead = -1
        self._order = ChunkedFunction(self._ordered)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    def positions(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the samples within the stream: int64 [len(indices)]."""
        return self._order(indices)

    def _ordered(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, numbers = np.divmod(indices, self._length)
        if not self.shuffle:
            return numbers
        for epoch in {*epochs.tolist()}:
            here = epochs == epoch
            numbers[here] = positions(numbers[here], self._length, self.seed, epoch, self.block)
        return numbers

    @property
    def block(self) -> int:
        """Neighbouring samples that are moved as one; 0: every sample for itself."""
        block = max(1, self._within // WINDOW // self._each) if self._within else 0
        return block if 2 * block <= self._length else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of a source at a URL that the cache has to hold so that each block is fetched once: those of
        the window that is read and of the next, which are fetched meanwhile, or all of a smaller source.
        """
        parts = self._stretches(self.block * self._each + 1)
        whole = sum(array.remote_bytes for array, _ in parts)
        window = 2 * WINDOW * sum(array.stretch_bytes(length) for array, length in parts)
        return min(whole, window) if self.block else whole

    def _stretches(self, tokens: int) -> list[tuple[RemoteElements, int]]:
        """The arrays that are read over a network, and how many elements of each belong to so many tokens."""
        return [(array, tokens) for array in self.source.cached]

    def _tokens(self, samples: range) -> range:
        """The tokens of neighbouring samples, by their numbers within the stream."""
        raise NotImplementedError

    def fetch_ahead(self, index: int) -> None:
        """Have the blocks of the window of sample `index` fetched, and until its middle those of the next."""
        if not self.source.cached or not self.block:
            return
        each = -(-self._length // self.block)  # blocks of an epoch
        epoch, place = divmod(index, self._length)
        at = epoch * each + place // self.block
        first = at - place // self.block % WINDOW
        here = min(first + WINDOW, (epoch + 1) * each)
        if first != self._window:  # those that were asked for before have to outlast the window before
            self._window = self._ahead = first
        for number in range(self._ahead, here + min(WINDOW, 2 * (at - first))):
            of, turn = divmod(number, each)
            block = int(block_order(np.array([turn]), self._length, self.seed, of, self.block)[0])
            samples = range(block * self.block, min((block + 1) * self.block, self._length))
            tokens = self._tokens(samples)
            for array in self.source.cached:
                array.fetch_ahead(tokens.start, tokens.stop)
            self._ahead = number + 1


def check_sequence(sequence: int) -> None:
    """Raise StrettoError for a length that none is."""
    if sequence < 1:
        raise StrettoError(
            f"sequence {sequence}: must be at least 1", hint="the usual lengths are 128 to 8192"
        )
