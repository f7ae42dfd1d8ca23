"""A synthetic click log of any size, whose samples are generated on access from (seed, sample number)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.index import LookupHistogram
from stretto.recommender.clicks.synthetic.draws import (
    PowerLaw,
    RankSampler,
    Uint64,
    power_law,
    random_bits,
    stream,
    uniform,
)
from stretto.recommender.clicks.synthetic.spec import SyntheticSpec
from stretto.recommender.clicks.synthetic.truth import (
    BayesOptimal,
    BayesOptimalTally,
    Effects,
    Numbers,
    best_bias,
    probability,
)
from stretto.recommender.tables.jagged import Jagged

Integers = NDArray[np.int64]
Split = Literal["train", "valid"]
CHUNK_IDS = 1 << 20  # ids per chunk
_CACHED = 1 << 15  # ids per block, so that intermediate arrays stay in the CPU cache
_BIAS_SAMPLES = 1 << 16  # samples used to fit the bias
_BIAS_START = 1 << 62  # index of the first, beyond the samples of any log


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """Samples of the log, including the ground truth behind them.

    Attributes:
        slots: [numbers, n] int64, index of each dense value in `Numbers.values`.
        ranks: [columns, n] int64, popularity rank of each id; a feature has one column per id that a sample
            can have.
        ids: [columns, n] int64.
        lengths: [features, n] int64, number of ids per feature and sample; only the first columns are valid.
        logits: [n] float64, true logits.
        labels: [n] bool.
    """

    slots: Integers
    ranks: Integers
    ids: Integers
    lengths: Integers
    logits: NDArray[np.float64]
    labels: NDArray[np.bool_]


class SyntheticLog:
    """All samples of a spec, numbered from 0; the last ones form the `valid` split."""

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        features, seed = spec.features, spec.seed
        # features with equal rows and skew share one law
        laws = {(feature.rows, feature.skew): power_law(feature.rows, feature.skew) for feature in features}
        self.popularity: list[PowerLaw] = [laws[feature.rows, feature.skew] for feature in features]
        self.numbers = Numbers(spec)
        self._effects = Effects(spec, self.popularity)
        self.first_column = [0, *np.cumsum([feature.max_hot for feature in features]).tolist()]
        columns = [(i, j) for i, feature in enumerate(features) for j in range(feature.max_hot)]
        self._sampler = RankSampler([self.popularity[i] for i, _ in columns])
        self._starts = np.array([stream(seed, "id", i, j) for i, j in columns], np.uint64)
        self._feature = np.array([i for i, _ in columns])
        self._position = np.array([j for _, j in columns])
        self._rows = np.array([feature.rows for feature in features], np.uint64)[self._feature][:, None]
        # the bijection rank -> (factor rank + shift) mod rows scatters popular ids over the table
        scatter = list[tuple[int, int]]()
        for i, feature in enumerate(features):
            bits = random_bits(np.array([stream(seed, "renaming", i)]), np.arange(2, dtype=np.uint64))[0]
            factor, shift = int(bits[0]) % feature.rows, int(bits[1]) % feature.rows
            while np.gcd(factor, feature.rows) != 1:
                factor += 1
            scatter.append((factor, shift))
        self._factor, self._shift = (
            np.array([pair[k] for pair in scatter], np.uint64)[self._feature][:, None] for k in (0, 1)
        )
        self._length_starts = np.array([stream(seed, "length", i) for i in range(len(features))], np.uint64)
        self._number_starts = np.array([stream(seed, "value", i) for i in range(spec.dense)], np.uint64)
        self._label_start = np.array([stream(seed, "label")], np.uint64)
        self._chunk = max(1, CHUNK_IDS // len(columns))
        self._bias = 0.0
        fitted = self.chunks(_BIAS_START, _BIAS_START + _BIAS_SAMPLES)
        self._bias = best_bias(np.concatenate([clicks.logits for _, clicks in fitted]), spec.base_rate)

    @property
    def bias(self) -> float:
        """Logit of a sample without any effects."""
        return self._bias

    def clicks(self, first: int, count: int) -> Clicks:
        """Samples [first, first + count)."""
        index = np.arange(first, first + count, dtype=np.uint64)
        ranks, ids = (np.empty((len(self._starts), count), np.int64) for _ in range(2))
        step = max(1, _CACHED // max(1, count))
        for start in range(0, len(ranks), step):
            block = slice(start, start + step)
            ranks[block] = self._sampler(random_bits(self._starts[block], index), block)
            scattered = ranks[block].view(np.uint64) * self._factor[block]
            scattered += self._shift[block]
            scattered %= self._rows[block]
            ids[block] = scattered.view(np.int64)
        lengths = self._draw_lengths(index)
        slots = (random_bits(self._number_starts, index) >> np.uint64(56)).view(np.int64)
        logits = self._logits(ranks, lengths, slots)
        draws = uniform(random_bits(self._label_start, index)[0])
        return Clicks(
            slots=slots,
            ranks=ranks,
            ids=ids,
            lengths=lengths,
            logits=logits,
            labels=draws < probability(logits),
        )

    def batch(self, first: int, count: int) -> ClickBatch:
        """Samples [first, first + count) as model input."""
        return self.as_batch(self.clicks(first, count))

    def as_batch(self, clicks: Clicks) -> ClickBatch:
        """Model input, without the ground truth."""
        dense = np.take_along_axis(self.numbers.values, clicks.slots, 1).T
        ids = list[Integers]()
        for i, feature in enumerate(self.spec.features):
            feature_ids = clicks.ids[self.first_column[i] : self.first_column[i + 1]].T
            if feature.varying:
                feature_ids = feature_ids[np.arange(feature_ids.shape[1]) < clicks.lengths[i][:, None]]
            ids.append(feature_ids.reshape(-1))
        fixed = not any(feature.varying for feature in self.spec.features)
        jagged = Jagged(
            torch.from_numpy(np.concatenate(ids)),
            torch.from_numpy(clicks.lengths),
            hot=tuple(feature.max_hot for feature in self.spec.features) if fixed else None,
        )
        labels = torch.from_numpy(clicks.labels.astype(np.float32))
        return ClickBatch(torch.from_numpy(np.ascontiguousarray(dense)), jagged, labels)

    def raw_numbers(self, clicks: Clicks) -> Integers:
        """Dense features [n, numbers] before the log transform; MISSING marks missing values."""
        return np.take_along_axis(self.numbers.raw, clicks.slots, 1).T

    def span(self, split: Split) -> tuple[int, int]:
        """First and one-past-last sample number of a split."""
        cut = self.spec.samples - self.spec.held_out
        return (0, cut) if split == "train" else (cut, self.spec.samples)

    def best(self, split: Split, progress: Callable[[int], None] | None = None) -> BayesOptimal:
        """The best reachable quality on a split. Generates all of its samples.

        Args:
            progress: called with the number of samples done.
        """
        tally = BayesOptimalTally()
        for offset, clicks in self.chunks(*self.span(split)):
            tally.add(clicks.logits, clicks.labels)
            if progress is not None:
                progress(offset + len(clicks.labels))
        return tally.result()

    def chunks(self, first: int, last: int) -> Iterator[tuple[int, Clicks]]:
        """Samples [first, last) in chunks, each with its offset from `first`."""
        chunk = self._chunk
        for start in range(first, last, chunk):
            yield start - first, self.clicks(start, min(chunk, last - start))

    def _draw_lengths(self, index: Uint64) -> Integers:
        lengths = np.empty((len(self.spec.features), len(index)), np.int64)
        for i, feature in enumerate(self.spec.features):
            if not feature.varying:
                lengths[i] = feature.max_hot
                continue
            # high half: uniform on 0 to 2 floor(hot); low half: one more with the fractional part of hot as
            # its probability
            bits = random_bits(self._length_starts[i : i + 1], index)[0]
            floor = int(feature.hot)
            even = ((bits >> np.uint64(32)) * np.uint64(2 * floor + 1)) >> np.uint64(32)
            extra = (bits & np.uint64(0xFFFFFFFF)) < np.uint64(round((feature.hot - floor) * 2.0**32))
            lengths[i] = even.view(np.int64) + extra
        return lengths

    def _logits(self, ranks: Integers, lengths: Integers, slots: Integers) -> NDArray[np.float64]:
        """True logits [n], summed row by row so that a sample's result does not depend on the slice."""
        effects, features = self._effects, self.spec.features
        entries = np.minimum(ranks, effects.last[self._feature][:, None])
        entries += effects.bases[self._feature][:, None]
        valid = None  # of the columns, those within a sample's length
        if any(feature.varying for feature in features):
            valid = self._position[:, None] < lengths[self._feature]
        total = np.full(ranks.shape[1], self._bias)
        for row in _take_valid(effects.values[0], entries, valid):
            total += row
        for left, right in effects.pairs:
            sums = np.zeros((2, len(total)))
            for side, i in enumerate((left, right)):
                columns = slice(self.first_column[i], self.first_column[i + 1])
                column_valid = None if valid is None else valid[columns]
                for row in _take_valid(effects.values[1], entries[columns], column_valid):
                    sums[side] += row
            total += sums[0] * sums[1]
        for row, slot in zip(self.numbers.effects, slots, strict=True):
            total += row[slot]
        return total


def _take_valid(
    values: NDArray[np.float32], entries: Integers, valid: NDArray[np.bool_] | None
) -> NDArray[np.float32]:
    """Values of entries [columns, n]; 0 in columns beyond a sample's length."""
    entry_values = values.take(entries)
    return entry_values if valid is None else entry_values * valid


_NOMINAL_LOOKUPS = 1 << 24  # stated number of lookups behind the exact histograms


class SyntheticClicks:
    """A split of a synthetic log: a ClickSource without files.

    Sample numbers wrap around at `len`. Samples come in log order, without shuffling: they are independent.
    """

    def __init__(self, spec: SyntheticSpec, split: Split = "train", log: SyntheticLog | None = None) -> None:
        """Open a split of `log`, an existing log of this spec, or of a new one.

        Raises:
            StrettoError: the split has no samples.
        """
        self.spec = spec
        self.split: Split = split
        self.log = SyntheticLog(spec) if log is None else log
        first, last = self.log.span(split)
        if first == last:
            raise StrettoError(
                f"synthetic clicks: {spec.samples} samples with {spec.valid:g} held out: none for {split!r}",
                hint="more samples, or a larger share held out",
            )
        self.range = range(first, last)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self.range)

    def batch(self, first: int, count: int, part: tuple[int, int] | None = None) -> ClickBatch:
        """See ClickSource."""
        start, stop = part or (0, count)
        assert first >= 0, "sample numbers start at 0"
        assert 0 <= start <= stop <= count, f"part {part} of {count} samples"
        return self.log.as_batch(self.clicks(first + start, stop - start))

    def clicks(self, first: int, count: int) -> Clicks:
        """Samples [first, first + count) with their ground truth."""
        pieces = list[Clicks]()
        while not pieces or count:
            offset = first % len(self)
            length = min(count, len(self) - offset)
            pieces.append(self.log.clicks(self.range.start + offset, length))
            first, count = first + length, count - length
        if len(pieces) == 1:
            return pieces[0]
        names = ("slots", "ranks", "ids", "lengths", "logits", "labels")
        return Clicks(**{n: np.concatenate([getattr(p, n) for p in pieces], axis=-1) for n in names})

    def best(self) -> BayesOptimal:
        """The best reachable quality on this split. Generates all of its samples."""
        return self.log.best(self.split)

    def table_rows(self) -> dict[str, int | None]:
        """Rows of each feature's table, as `ClickFolder` reports them."""
        return {feature.name: feature.rows for feature in self.spec.features}

    def popularity(self) -> dict[str, LookupHistogram]:
        """Histogram of each feature's lookups, as `ClickFolder` reports it, but exact instead of counted."""
        return {
            feature.name: LookupHistogram(feature.hot, feature.rows, _NOMINAL_LOOKUPS, law.buckets())
            for feature, law in zip(self.spec.features, self.log.popularity, strict=True)
        }

    @property
    def base_rate(self) -> float:
        """Click-through rate that the spec asks for."""
        return self.spec.base_rate
