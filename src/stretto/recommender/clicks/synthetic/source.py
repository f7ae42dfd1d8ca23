"""Synthetic clicks as a source of batches: drawn as they are read, with the best possible result known."""

from __future__ import annotations

import numpy as np

from stretto.errors import StrettoError
from stretto.recommender.clicks.batch import ClickBatch
from stretto.recommender.clicks.index import Popularity
from stretto.recommender.clicks.synthetic.best import Best
from stretto.recommender.clicks.synthetic.log import Clicks, Split, SyntheticLog
from stretto.recommender.clicks.synthetic.spec import ClickFeature, SyntheticSpec, spread

__all__ = ["Best", "ClickFeature", "Clicks", "SyntheticClicks", "SyntheticLog", "SyntheticSpec", "spread"]

_COUNTED = 1 << 24  # lookups that popularity speaks of


class SyntheticClicks:
    """One part of a synthetic log: a ClickSource without files.

    Sample number `len` is number 0 again; the order is that of the log, whose samples are independent.
    """

    def __init__(self, spec: SyntheticSpec, split: Split = "train", log: SyntheticLog | None = None) -> None:
        """Of a log that is there already, or one made for it.

        Raises:
            StrettoError: the part has no samples.
        """
        self.spec = spec
        self.split: Split = split
        self.log = SyntheticLog(spec) if log is None else log
        first, last = self.log.span(split)
        if first == last:
            raise StrettoError(
                f"synthetic clicks: {spec.samples} samples with {spec.valid:g} held out: none for {split!r}",
                hint="more samples, or a larger part held out",
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
        """Samples [first, first + count) with what is true of them."""
        pieces = list[Clicks]()
        while not pieces or count:
            at = first % len(self)
            here = min(count, len(self) - at)
            pieces.append(self.log.clicks(self.range.start + at, here))
            first, count = first + here, count - here
        return pieces[0] if len(pieces) == 1 else _joined(pieces)

    def best(self) -> Best:
        """What is possible on this part: all of it is drawn for it."""
        return self.log.best(self.split)

    def table_rows(self) -> dict[str, int | None]:
        """Rows of each feature's table, as a click folder says them."""
        return {feature.name: feature.rows for feature in self.spec.features}

    def popularity(self) -> dict[str, Popularity]:
        """How often the ids of each feature are looked up, as a click folder says it; here it is exact."""
        return {
            feature.name: Popularity(feature.hot, feature.rows, _COUNTED, popular.buckets())
            for feature, popular in zip(self.spec.features, self.log.popularity, strict=True)
        }

    @property
    def base_rate(self) -> float:
        """Part of the samples that are clicked, as it was asked for."""
        return self.spec.base_rate


def _joined(pieces: list[Clicks]) -> Clicks:
    names = ("slots", "ranks", "ids", "lengths", "logits", "labels")
    whole = {name: np.concatenate([getattr(piece, name) for piece in pieces], axis=-1) for name in names}
    return Clicks(**whole)
