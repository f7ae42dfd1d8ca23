"""Several token sources by weights: what `data.source: {web: 0.7, code: 0.3}` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor, log10
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import Problem, StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.config.schema import TrainConfig
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
from stretto.run.data.mixture_order import MixtureOrder, WeightPhase
from stretto.run.data.sentinels import SentinelIds, sentinel_ids, vocabulary
from stretto.run.data.token_source import TokenData, TokenSource, check_boundaries
from stretto.run.data.tokenizer import Tokenizer


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
    """Samples of several sources in one order; see `mixture_order`.

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


def training_samples(source: TokenData, config: TrainConfig) -> TrainingSamples:
    """Return the samples that a run trains on, in its order.

    Raises:
        StrettoError: a source is too short, or holds text although conversations are configured; the cache
            has no room for what is read of sources at URLs; an encoder's samples cannot be made of it.
    """
    data, seed = config.data, config.train.seed
    lengths, sentinels = config.denoising, _sentinels(source, config)
    if lengths is not None:
        data = replace(data, sequence=lengths.window)
    parts = {name: samples_of(stream, data, "train", seed) for name, stream in source.streams.items()}
    _check_cache(parts, data)
    samples: CausalSamples
    if isinstance(source, Mixture):
        size = config.batch.global_size
        phases = [WeightPhase(0, tuple(source.weights[name] for name in parts))]
        phases += [
            WeightPhase(phase.from_step * size, tuple(phase.weights.get(name, 0.0) for name in parts))
            for phase in data.phases
        ]
        samples = MixedSamples(parts, MixtureOrder(phases, seed))
    else:
        (samples,) = parts.values()
    if lengths is None or sentinels is None:
        return samples
    return DenoisedSamples(
        samples, lengths=lengths, sentinels=sentinels, seed=seed, targets=config.target_sequence
    )


def _sentinels(source: TokenData, config: TrainConfig) -> SentinelIds | None:
    """Return the ids that stand for spans of a source's text, or None if no spans are cut out.

    Raises:
        StrettoError: it has no windows of text, or no room in the vocabulary.
    """
    lengths, data = config.denoising, config.data
    if lengths is None:
        return None
    for stream in source.streams.values():
        if packing_of(stream, data) != "stream":
            rule = f"objective {lengths.corruption} cuts spans out of windows of a stream of text"
            reason = "" if stream.mask is None else f", and {stream.name} holds conversations"
            raise Problem("data.packing", data.packing, rule + reason, "data.packing=stream")
    rows = config.shape(vocabulary(source, config)).vocab
    return sentinel_ids(source, data, lengths, rows)


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


def held_out(source: TokenData, config: TrainConfig, split: str) -> list[HeldOut]:
    """Return the split of every source, by the weights with which training starts; those of weight 0 are left
    out. An encoder's samples have the same spans in every evaluation, whatever the seed.

    Raises:
        StrettoError: a source has nothing to predict there.
    """
    weights = source.weights if isinstance(source, Mixture) else dict.fromkeys(source.streams, 1.0)
    total, data = sum(weights.values()), config.data
    lengths, sentinels = config.denoising, _sentinels(source, config)
    if lengths is not None:
        data = replace(data, sequence=lengths.window)
    splits = list[HeldOut]()
    for name, stream in source.streams.items():
        if weights[name] > 0:
            samples = samples_of(stream, data, split, once=True)
            if lengths is not None and sentinels is not None:
                assert isinstance(samples, WindowSamples)  # of a stream
                samples = DenoisedSamples(
                    samples, lengths=lengths, sentinels=sentinels, targets=config.target_sequence
                )
            splits.append(HeldOut(name, weights[name] / total, samples))
    return splits
