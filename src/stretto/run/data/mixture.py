"""Several token sources by weights: what `data.source: {web: 0.7, code: 0.3}` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stretto.errors import Problem, StrettoError
from stretto.run.config.data import DataConfig
from stretto.run.config.schema import TrainConfig
from stretto.run.data.block_cache import block_cache
from stretto.run.data.dataset import (
    Batch,
    DocumentSamples,
    WholeDocuments,
    WholeSplit,
    WindowSamples,
    packing_of,
    samples_of,
    shuffled_within,
    whole_split_of,
    windows,
)
from stretto.run.data.denoising import Denoised, DenoisedSplit
from stretto.run.data.mixture_order import MixtureOrder, WeightPhase
from stretto.run.data.order import ChunkedFunction
from stretto.run.data.sentinels import SentinelIds, sentinel_ids, vocabulary
from stretto.run.data.token_source import TokenData, TokenSource, check_boundaries
from stretto.run.data.tokenizer import Tokenizer


class Mixture(TokenData):
    """Streams with tokens of one tokenizer.

    Attributes:
        weights: of each stream, by name, as configured.

    Raises:
        StrettoError: streams of different tokenizers.
    """

    def __init__(self, streams: Mapping[str, TokenSource], weights: Mapping[str, float]) -> None:
        assert streams.keys() == weights.keys()
        self._streams, self.weights = dict(streams), dict(weights)
        self.name = ", ".join(streams)
        every = list(streams.values())
        known = [one for one in every if one.fingerprint is not None]
        for other in known[1:]:
            if other.fingerprint != known[0].fingerprint:
                raise StrettoError(
                    "data.source mixes tokens of different tokenizers: those of "
                    f"{known[0].name} and of {other.name}",
                    hint="build them with the same --tokenizer, or name the texts themselves",
                )
            check_boundaries(known[0], other)
        self._first = (known or every)[0]
        self.vocab = max(one.vocab for one in every)
        self.endoftext, self.begin_of_text = self._first.endoftext, self._first.begin_of_text
        self.fingerprint = self._first.fingerprint
        masked = any(one.trained is not None for one in every)
        self.trained = (
            sum(one.size if one.trained is None else one.trained for one in every) if masked else None
        )

    def __reduce__(self) -> tuple[object, ...]:
        return Mixture, (self._streams, self.weights)

    @property
    def streams(self) -> Mapping[str, TokenSource]:
        return self._streams

    @property
    def size(self) -> int:
        return sum(one.size for one in self._streams.values())

    @property
    def documents(self) -> int:
        return sum(one.documents for one in self._streams.values())

    def identity(self) -> dict[str, Any]:
        total = sum(self.weights.values())
        parts = [
            {**one.identity(), "weight": self.weights[name] / total} for name, one in self._streams.items()
        ]
        return {"tokens": self.size, "documents": self.documents, "mixture": parts}

    def tokenizer(self) -> Tokenizer:
        return self._first.tokenizer()

    def companions(self) -> Mapping[str, bytes]:
        return self._first.companions()


class MixedSamples:
    """Samples of several sources in one order; see `mixture_order`.

    Attributes:
        parts: the samples of each source.
    """

    def __init__(self, parts: Mapping[str, WindowSamples | DocumentSamples], order: MixtureOrder) -> None:
        self.parts = dict(parts)
        self._order = order
        self._placed = ChunkedFunction(self._places)
        self._windows = all(isinstance(part, WindowSamples) for part in parts.values())

    def drawn(self, samples: int) -> list[int]:
        """How many of the first `samples` samples are of each source."""
        return self._order.drawn(samples).tolist()

    def batch(self, indices: Sequence[int]) -> Batch:
        """As those of one source."""
        parts, placed = list(self.parts.values()), self._placed(indices)
        if self._windows:
            self._fetch_ahead(max(indices, default=0))
            several, first = cast(list[WindowSamples], parts), cast(WindowSamples, parts[0])
            sources = [several[part].source for part in placed[:, 0].tolist()]
            return windows(sources, placed[:, 1].tolist(), first.sequence, apart=first.apart)
        rows = {number: np.flatnonzero(placed[:, 0] == number) for number in {*placed[:, 0].tolist()}}
        taken = [parts[number].batch(placed[here, 1].tolist()) for number, here in rows.items()]
        return taken[0] if len(taken) == 1 else Batch.scattered(taken, list(rows.values()))

    def _fetch_ahead(self, index: int) -> None:
        """As `Ordered.fetch_ahead`, for the parts at URLs."""
        if any(one.source.cached for one in self.parts.values()):
            for one, count in zip(self.parts.values(), self.drawn(index + 1), strict=True):
                one.fetch_ahead(max(0, count - 1))

    def _places(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The source of each sample, and which of its samples it is, or the first token where all are
        windows: int64 [samples, 2].
        """
        sources, positions = self._order(indices)
        for number, part in enumerate(self.parts.values()) if self._windows else ():
            here = sources == number
            positions[here] = cast(WindowSamples, part).starts(positions[here])
        return np.stack([sources, positions], axis=1)


Ordinary = WindowSamples | DocumentSamples | MixedSamples
TrainingSamples = Ordinary | Denoised[Ordinary]


def training_samples(source: TokenData, config: TrainConfig) -> TrainingSamples:
    """The samples that a run trains on, in its order.

    Raises:
        StrettoError: a source is too short, or holds text where conversations are configured; the cache has
            no room for what is read of sources at URLs; an encoder's samples cannot be made of it.
    """
    lengths = config.denoising
    if lengths is None:
        return _in_order(source, config, config.data)
    marks = _marks(source, config)
    windows = _in_order(source, config, replace(config.data, sequence=lengths.window))
    return Denoised(
        windows, lengths=lengths, marks=marks, seed=config.train.seed, targets=config.target_sequence
    )


def _marks(source: TokenData, config: TrainConfig) -> SentinelIds:
    """The ids that stand for spans of a source's text.

    Raises:
        StrettoError: it has no windows of text, or no room in the vocabulary.
    """
    lengths, data = config.denoising, config.data
    assert lengths is not None
    for one in source.streams.values():
        if packing_of(one, data) != "stream":
            rule = f"objective {lengths.corruption} cuts spans out of windows of a stream of text"
            held = "" if one.mask is None else f", and {one.name} holds conversations"
            raise Problem("data.packing", data.packing, rule + held, "data.packing=stream")
    rows = config.shape(vocabulary(source, config)).vocab
    return sentinel_ids(source, data, lengths, rows)


def _in_order(source: TokenData, config: TrainConfig, data: DataConfig) -> Ordinary:
    """Windows or documents in the order of training."""
    seed = config.train.seed
    parts = {name: samples_of(one, data, "train", seed) for name, one in source.streams.items()}
    _check_cache(parts, data)
    if not isinstance(source, Mixture):
        (alone,) = parts.values()
        return alone
    names, size = list(parts), config.batch.global_size
    phases = [WeightPhase(0, tuple(source.weights[name] for name in names))]
    phases += [
        WeightPhase(phase.from_step * size, tuple(phase.weights.get(name, 0.0) for name in names))
        for phase in data.phases
    ]
    return MixedSamples(parts, MixtureOrder(phases, seed))


def _check_cache(parts: Mapping[str, WindowSamples | DocumentSamples], data: DataConfig) -> None:
    """Check that the cache holds what sources at URLs have to keep there."""
    needed = sum(part.cache_bytes for part in parts.values())
    cache = block_cache(data)
    if needed <= cache.kept:
        return
    room = f"data.cache_gib={_gib(needed * cache.limit / cache.kept)}"
    smaller = f"a data.shuffle_window smaller than {data.shuffle_window}"
    windows = any(shuffled_within(part.source, data) for part in parts.values())
    raise StrettoError(
        f"data.cache_gib is {data.cache_gib:g}, and {_gib(needed)} GiB of the sources at URLs are kept: "
        + ("the windows that are read, and the next" if windows else "any sample may come next"),
        hint=f"{room}, or {smaller if windows else 'data.shuffle=window'}",
    )


def _gib(size: float) -> str:
    """In GiB, rounded up to three digits."""
    digits = 2 - floor(log10(size / 2**30))
    return f"{ceil(size / 2**30 * 10**digits) / 10**digits:.{max(0, digits)}f}"


def parts_of(samples: TrainingSamples) -> Mapping[str, WindowSamples | DocumentSamples]:
    """The samples of each source by its name."""
    samples = samples.windows if isinstance(samples, Denoised) else samples
    return samples.parts if isinstance(samples, MixedSamples) else {samples.source.name: samples}


def epochs(samples: TrainingSamples, seen: int) -> dict[str, float]:
    """How often each source has been gone through after `seen` samples."""
    parts = parts_of(samples)
    samples = samples.windows if isinstance(samples, Denoised) else samples
    drawn = samples.drawn(seen) if isinstance(samples, MixedSamples) else [seen]
    return {name: count / len(part) for (name, part), count in zip(parts.items(), drawn, strict=True)}


@dataclass(frozen=True)
class HeldOut:
    """A split of one source to evaluate on; `weight` is its part in the loss of a mixture, of 1 in all."""

    name: str
    weight: float
    split: WholeSplit | WholeDocuments | DenoisedSplit


def held_out(source: TokenData, config: TrainConfig, split: str) -> list[HeldOut]:
    """The split of every source, by the weights with which training starts; those of weight 0 are left out.
    Of an encoder's samples the same spans are cut out in every evaluation, whatever the seed.

    Raises:
        StrettoError: a source has nothing to predict there.
    """
    weights = source.weights if isinstance(source, Mixture) else dict.fromkeys(source.streams, 1.0)
    total = sum(weights.values())
    return [
        HeldOut(name, weights[name] / total, _whole_split(source, one, config, split))
        for name, one in source.streams.items()
        if weights[name] > 0
    ]


def _whole_split(
    source: TokenData, stream: TokenSource, config: TrainConfig, split: str
) -> WholeSplit | WholeDocuments | DenoisedSplit:
    """A split of one of the streams of a source."""
    lengths, data = config.denoising, config.data
    if lengths is None:
        return whole_split_of(stream, data, split)
    marks = _marks(source, config)
    windows = whole_split_of(stream, replace(data, sequence=lengths.window), split)
    assert isinstance(windows, WholeSplit)  # of a stream
    return DenoisedSplit(windows, lengths=lengths, marks=marks, targets=config.target_sequence)
