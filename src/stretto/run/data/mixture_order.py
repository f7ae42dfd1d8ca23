"""Which source of a mixture each sample is of, computed from the sample's number alone.

Samples go in blocks of 65,536, of which every source has its share to the integer. Within a block the samples
of a source are spread evenly, each at a random place within its even slot, so that any run of samples has
the weights to within a few samples. A source's samples follow one another in its own order: none is lost or
repeated until all have been seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stretto.errors import StrettoError
from stretto.run.data.permutation import uniform

BLOCK = 1 << 16


@dataclass(frozen=True)
class WeightPhase:
    """The weights of all sources from sample `start` on, up to the next phase."""

    start: int
    weights: tuple[float, ...]


class MixtureOrder:
    """The order in which the samples of several sources are taken.

    Args:
        phases: by increasing start, the first at sample 0; the weights are >= 0, and not all 0.
        seed: of the places within slots.

    Raises:
        StrettoError: a positive weight below a 131,072nd of their sum, which would never come up.
    """

    def __init__(self, phases: Sequence[WeightPhase], seed: int) -> None:
        assert phases
        assert phases[0].start == 0
        assert all(a.start < b.start for a, b in pairwise(phases))
        self.seed = seed
        self._starts = [phase.start for phase in phases]
        self._shares = [_shares(phase.weights) for phase in phases]
        self._before = [np.zeros(len(phases[0].weights), dtype=np.int64)]
        self._block = lru_cache(maxsize=4)(self._arranged)  # neighbouring samples share one or two
        for number, start in enumerate(self._starts[1:]):
            self._before.append(self._drawn(number, start))

    def drawn(self, samples: int) -> NDArray[np.int64]:
        """How many of the first `samples` samples each source has: int64 [sources]."""
        return self._drawn(self._phase(samples), samples)

    def __call__(
        self, samples: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each of these samples, and which sample of it: two int64 arrays [len(samples)]."""
        numbers = np.asarray(samples, dtype=np.int64)
        assert (numbers >= 0).all(), "sample numbers start at 0"
        phases = np.searchsorted(self._starts, numbers, side="right") - 1
        sources, positions = np.empty_like(numbers), np.empty_like(numbers)
        blocks, places = np.divmod(numbers - np.asarray(self._starts)[phases], BLOCK)
        for phase, block in {*zip(phases.tolist(), blocks.tolist(), strict=True)}:
            here = (phases == phase) & (blocks == block)
            sources[here], positions[here] = self._at(phase, block, places[here])
        return sources, positions

    def _at(
        self, phase: int, block: int, places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sources and samples of some places of a block."""
        arranged, ranks = self._block(phase, block)
        sources = arranged[places]
        return sources, (self._before[phase] + block * self._shares[phase])[sources] + ranks[places]

    def _phase(self, sample: int) -> int:
        return bisect_right(self._starts, sample) - 1

    def _drawn(self, phase: int, samples: int) -> NDArray[np.int64]:
        """As `drawn`, where the last of the samples is of this phase or the first of the next."""
        block, place = divmod(samples - self._starts[phase], BLOCK)
        shares = self._shares[phase]
        part = np.bincount(self._block(phase, block)[0][:place], minlength=len(shares)) if place else 0
        return self._before[phase] + block * shares + part

    def _arranged(self, phase: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and rank among the samples of that source of each sample of a block: int64 [BLOCK] each."""
        shares = self._shares[phase]
        sources = np.repeat(np.arange(len(shares)), shares)
        ranks = np.arange(BLOCK) - np.repeat(np.cumsum(shares) - shares, shares)
        places = (ranks + uniform(f"{self.seed}/{phase}/{block}", BLOCK)) / shares[sources]
        order = np.argsort(places, kind="stable")
        return sources[order], ranks[order]


def _shares(weights: Sequence[float]) -> NDArray[np.int64]:
    """How many samples of a block each source has, by largest remainders: they sum to BLOCK."""
    ideal = np.asarray(weights, dtype=np.float64) / sum(weights) * BLOCK
    shares = np.floor(ideal).astype(np.int64)
    missing = BLOCK - int(shares.sum())
    shares[np.argsort(shares - ideal, kind="stable")[:missing]] += 1
    never = [weight for weight, share in zip(weights, shares, strict=True) if weight > 0 and not share]
    if never:
        raise StrettoError(
            f"weight {never[0]:g} of {sum(weights):g} is less than one sample in {BLOCK:,}",
            hint="leave that source out, or give it a larger weight",
        )
    return shares
