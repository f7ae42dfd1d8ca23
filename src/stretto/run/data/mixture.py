"""Several token sources by weights: what `data.source: {web: 0.7, code: 0.3}` names.

The source of each sample is computed from the sample's index alone. Samples go in blocks of 65,536, of which
every source has its share to the integer. Within a block the samples of a source are spread evenly, each at a
random place within its even slot, so that any run of samples has the weights to within a few samples. A
source's samples follow one another in its own order: none is lost or repeated until all have been seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import Problem, StrettoError
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.run.config.data import DataConfig
from stretto.run.config.denoising import Denoising
from stretto.run.data.block_cache import block_cache
from stretto.run.data.dataset import (
    Batch,
    ChunkedFunction,
    DocumentSamples,
    WindowSamples,
    packing_of,
    samples_of,
    shuffled_within,
    windows,
)
from stretto.run.data.denoising import DenoisedSamples
from stretto.run.data.permutation import uniform
from stretto.run.data.sentinels import SentinelIds, sentinel_ids
from stretto.run.data.token_source import TokenData, TokenSource, check_boundaries
from stretto.run.data.tokenizer import Tokenizer

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
        seed: seed of the places within slots.

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
        """Return how many of the first `samples` samples each source has: int64 [sources]."""
        return self._drawn(bisect_right(self._starts, samples) - 1, samples)

    def __call__(
        self, samples: Sequence[int] | NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and which sample of it: two int64 arrays [len(samples)]."""
        numbers = np.asarray(samples, dtype=np.int64)
        assert (numbers >= 0).all(), "sample numbers start at 0"
        phases = np.searchsorted(self._starts, numbers, side="right") - 1
        sources, positions = np.empty_like(numbers), np.empty_like(numbers)
        blocks, places = np.divmod(numbers - np.asarray(self._starts)[phases], BLOCK)
        for phase, block in {*zip(phases.tolist(), blocks.tolist(), strict=True)}:
            inside = (phases == phase) & (blocks == block)
            sources[inside], positions[inside] = self._at(phase, block, places[inside])
        return sources, positions

    def _at(
        self, phase: int, block: int, places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sources and samples of some places of a block."""
        arranged, ranks = self._block(phase, block)
        sources = arranged[places]
        return sources, (self._before[phase] + block * self._shares[phase])[sources] + ranks[places]

    def _drawn(self, phase: int, samples: int) -> NDArray[np.int64]:
        """Return `drawn` if the last of the samples is of this phase or the first of the next."""
        block, place = divmod(samples - self._starts[phase], BLOCK)
        shares = self._shares[phase]
        part = np.bincount(self._block(phase, block)[0][:place], minlength=len(shares)) if place else 0
        return self._before[phase] + block * shares + part

    def _arranged(self, phase: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample of a block, and its rank in that source: int64 [BLOCK] each."""
        shares = self._shares[phase]
        sources = np.repeat(np.arange(len(shares)), shares)
        ranks = np.arange(BLOCK) - np.repeat(np.cumsum(shares) - shares, shares)
        places = (ranks + uniform(f"{self.seed}/{phase}/{block}", BLOCK)) / shares[sources]
        order = np.argsort(places, kind="stable")
        return sources[order], ranks[order]


def _shares(weights: Sequence[float]) -> NDArray[np.int64]:
    """Return how many samples of a block each source has, by largest remainders: they sum to BLOCK."""
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


class Mixture(TokenData):
    """Streams with tokens of one tokenizer.

    Attributes:
        weights: weight of each stream, by name, as configured.

    Raises:
        StrettoError: streams of different tokenizers.
    """

    def __init__(self, streams: Mapping[str, TokenSource], weights: Mapping[str, float]) -> None:
        assert streams.keys() == weights.keys()
        self._streams, self.weights = dict(streams), dict(weights)
        self.name = ", ".join(streams)
        sources = list(streams.values())
        named = [source for source in sources if source.fingerprint is not None]
        for other in named[1:]:
            if other.fingerprint != named[0].fingerprint:
                raise StrettoError(
                    "data.source mixes tokens of different tokenizers: those of "
                    f"{named[0].name} and of {other.name}",
                    hint="build them with the same --tokenizer, or name the texts themselves",
                )
            check_boundaries(named[0], other)
        self._first = (named or sources)[0]
        self.vocab = max(source.vocab for source in sources)
        self.endoftext, self.begin_of_text = self._first.endoftext, self._first.begin_of_text
        self.fingerprint = self._first.fingerprint
        trained = [source.size if source.trained is None else source.trained for source in sources]
        self.trained = None if all(source.trained is None for source in sources) else sum(trained)

    def __reduce__(self) -> tuple[object, ...]:
        return Mixture, (self._streams, self.weights)

    @property
    def streams(self) -> Mapping[str, TokenSource]:
        return self._streams

    @property
    def size(self) -> int:
        return sum(source.size for source in self._streams.values())

    @property
    def documents(self) -> int:
        return sum(source.documents for source in self._streams.values())

    def identity(self) -> dict[str, Any]:
        total = sum(self.weights.values())
        parts = [
            {**source.identity(), "weight": self.weights[name] / total}
            for name, source in self._streams.items()
        ]
        return {"tokens": self.size, "documents": self.documents, "mixture": parts}

    def tokenizer(self) -> Tokenizer:
        return self._first.tokenizer()

    def companions(self) -> Mapping[str, bytes]:
        return self._first.companions()


SplitPart = WindowSamples | DocumentSamples


class MixedSamples:
    """Samples of several sources in one order; see `mixture`.

    Attributes:
        parts: the samples of each source.
    """

    def __init__(self, parts: Mapping[str, SplitPart], order: MixtureOrder) -> None:
        self.parts = dict(parts)
        self._order = order
        self._placements = ChunkedFunction(self._place)
        self._windows = all(isinstance(part, WindowSamples) for part in parts.values())

    def drawn(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples each source has."""
        return self._order.drawn(samples).tolist()

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return several samples."""
        parts, placements = list(self.parts.values()), self._placements(indices)
        if self._windows:
            if any(part.source.cached for part in parts):
                for part, count in zip(parts, self.drawn(max(indices, default=0) + 1), strict=True):
                    part.fetch_ahead(max(0, count - 1))
            first = cast(WindowSamples, parts[0])
            sources = [parts[part].source for part in placements[:, 0].tolist()]
            return windows(sources, placements[:, 1].tolist(), first.sequence, isolate=first.isolate)
        rows = {part: np.flatnonzero(placements[:, 0] == part) for part in {*placements[:, 0].tolist()}}
        batches = [parts[part].batch(placements[inside, 1].tolist()) for part, inside in rows.items()]
        return batches[0] if len(batches) == 1 else Batch.concatenated(batches, list(rows.values()))

    def _place(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the source of each sample, and which of its samples it is, or the first token if all are
        windows: int64 [samples, 2].
        """
        sources, positions = self._order(indices)
        for number, part in enumerate(self.parts.values()) if self._windows else ():
            inside = sources == number
            positions[inside] = cast(WindowSamples, part).starts(positions[inside])
        return np.stack([sources, positions], axis=1)


CausalSamples = WindowSamples | DocumentSamples | MixedSamples
TrainingSamples = CausalSamples | DenoisedSamples[CausalSamples]


def training_samples(source: TokenData, data: DataConfig, job: Job, seed: int) -> TrainingSamples:
    """Return the samples that a run trains on, in its order.

    Args:
        job: its model has the source's vocabulary.
        seed: of the order.

    Raises:
        StrettoError: a source is too short, or holds text although conversations are configured; the cache
            has no room for what is read of sources at URLs; an encoder's samples cannot be made of it.
    """
    lengths, sentinels = _denoising(source, data, job.shape)
    if lengths is not None:
        data = replace(data, sequence=lengths.window)
    parts = {name: samples_of(stream, data, "train", seed) for name, stream in source.streams.items()}
    _check_cache(parts, data)
    samples: CausalSamples
    if isinstance(source, Mixture):
        phases = [WeightPhase(0, tuple(source.weights[name] for name in parts))]
        phases += [
            WeightPhase(
                phase.from_step * job.global_batch, tuple(phase.weights.get(name, 0.0) for name in parts)
            )
            for phase in data.phases
        ]
        samples = MixedSamples(parts, MixtureOrder(phases, seed))
    else:
        (samples,) = parts.values()
    if lengths is None or sentinels is None:
        return samples
    return DenoisedSamples(
        samples, lengths=lengths, sentinels=sentinels, seed=seed, targets=job.target_sequence
    )


def _denoising(
    source: TokenData, data: DataConfig, shape: ModelShape
) -> tuple[Denoising, SentinelIds] | tuple[None, None]:
    """Return the lengths of an encoder-decoder's samples and the ids that stand for spans of the text, if
    spans are cut out.

    Raises:
        StrettoError: the source has no windows of text, or no room in the vocabulary.
    """
    lengths = data.denoising(shape.encoder_layers > 0)
    if lengths is None:
        return None, None
    for stream in source.streams.values():
        if packing_of(stream, data) != "stream":
            rule = f"objective {lengths.corruption} cuts spans out of windows of a stream of text"
            reason = "" if stream.mask is None else f", and {stream.name} holds conversations"
            raise Problem("data.packing", data.packing, rule + reason, "data.packing=stream")
    return lengths, sentinel_ids(source, data, lengths, shape.vocab)


def _check_cache(parts: Mapping[str, SplitPart], data: DataConfig) -> None:
    """Check that the cache holds what sources at URLs have to keep there."""
    needed = sum(part.cache_bytes for part in parts.values())
    cache = block_cache(data)
    if needed <= cache.capacity:
        return

    def gib(size: float) -> str:  # rounded up to three digits
        digits = 2 - floor(log10(size / 2**30))
        return f"{ceil(size / 2**30 * 10**digits) / 10**digits:.{max(0, digits)}f}"

    room = f"data.cache_gib={gib(needed * cache.limit / cache.capacity)}"
    smaller = f"a data.shuffle_window smaller than {data.shuffle_window}"
    windows = any(shuffled_within(part.source, data) for part in parts.values())
    raise StrettoError(
        f"data.cache_gib is {data.cache_gib:g}, and {gib(needed)} GiB of the sources at URLs are kept: "
        + ("the windows that are read, and the next" if windows else "any sample may come next"),
        hint=f"{room}, or {smaller if windows else 'data.shuffle=window'}",
    )


def parts_of(samples: TrainingSamples) -> Mapping[str, SplitPart]:
    """Return the samples of each source by its name."""
    samples = samples.windows if isinstance(samples, DenoisedSamples) else samples
    return samples.parts if isinstance(samples, MixedSamples) else {samples.source.name: samples}


def epochs(samples: TrainingSamples, count: int) -> dict[str, float]:
    """Return the number of epochs of each source in the first `count` samples."""
    parts = parts_of(samples)
    samples = samples.windows if isinstance(samples, DenoisedSamples) else samples
    drawn = samples.drawn(count) if isinstance(samples, MixedSamples) else [count]
    return {name: n / len(part) for (name, part), n in zip(parts.items(), drawn, strict=True)}


class HeldOut(NamedTuple):
    """A split of one source to evaluate on; `weight` is its share of a mixture's loss, of 1 in all."""

    name: str
    weight: float
    split: SplitPart | DenoisedSamples[WindowSamples]


def held_out(source: TokenData, data: DataConfig, job: Job, split: str) -> list[HeldOut]:
    """Return the split of every source, by the weights with which training starts; those of weight 0 are left
    out. An encoder's samples have the same spans in every evaluation, whatever the seed.

    Raises:
        StrettoError: a source has nothing to predict there.
    """
    weights = source.weights if isinstance(source, Mixture) else dict.fromkeys(source.streams, 1.0)
    total = sum(weights.values())
    lengths, sentinels = _denoising(source, data, job.shape)
    if lengths is not None:
        data = replace(data, sequence=lengths.window)
    splits = list[HeldOut]()
    for name, stream in source.streams.items():
        if weights[name] > 0:
            samples = samples_of(stream, data, split, once=True)
            if lengths is not None and sentinels is not None:
                assert isinstance(samples, WindowSamples)  # of a stream
                samples = DenoisedSamples(
                    samples, lengths=lengths, sentinels=sentinels, targets=job.target_sequence
                )
            splits.append(HeldOut(name, weights[name] / total, samples))
    return splits
