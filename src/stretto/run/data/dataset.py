"""Samples for a language model: windows of one split's token stream or single documents, in an order computed
from a seed.

Of windows, sample k of an epoch is [p * sequence, (p + 1) * sequence + 1) of the split, where p(k) is a
permutation for each seed and epoch: the last token of a window is the first of the next, so every token but
the first is predicted exactly once an epoch (fewer than `sequence` tokens at the end of the split are left
out).

Where documents are kept apart, the windows are the same, each says where its documents begin, and the first
token of a document is not predicted. What a window has of a document that began before it is taken for a
whole one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.run.config.data import DataConfig, Packing
from stretto.run.data.order import Ordered, check_sequence
from stretto.run.data.split import ALL, SPLITS, check_split, range_of
from stretto.run.data.token_source import RemoteElements, TokenSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some samples.

    inputs, targets: int64 [samples, sequence] on the CPU; targets of -100 do not count.
    begins: of the same shape, for each position the one in its sample at which its document begins; None
        where attention does not end at a document's.
    decoder: of a model with an encoder, which reads `inputs`, what its decoder reads, of the shape of
        `targets`.
    lengths: how many of the inputs are real, int64 [samples], the rest being padding; None: all of them.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    begins: torch.Tensor | None = None
    decoder: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Another value for each field that there is."""
        changed = dict[str, Any]()
        for one in fields(self):
            value = getattr(self, one.name)
            changed[one.name] = None if value is None else change(value)
        return Batch(**changed)

    def take(self, rows: slice | list[int]) -> Batch:
        """Some of the samples."""
        return self.each(lambda values: values[rows])

    def pinned(self) -> Batch:
        """A copy in page-locked memory, from which a GPU copies while the host goes on. Such memory is used
        anew only when the copies from it are done: torch's allocator keeps an event of each.
        """
        return self.each(torch.Tensor.pin_memory)

    @classmethod
    def scattered(cls, batches: Sequence[Batch], rows: Sequence[NDArray[np.int64]]) -> Batch:
        """The samples of all of them, those of each in these rows: all have the same fields."""
        count = sum(map(len, rows))

        def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            whole = parts[0].new_empty(count, *parts[0].shape[1:])
            for part, here in zip(parts, rows, strict=True):
                whole.numpy()[here] = part.numpy()
            return whole

        return cls._joined(batches, together)

    @classmethod
    def concatenated(cls, batches: Sequence[Batch]) -> Batch:
        """The samples of all of them: all have the same fields."""
        return cls._joined(batches, torch.cat)

    @classmethod
    def _joined(cls, batches: Sequence[Batch], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Batch:
        parts: dict[str, list[Any]] = {
            one.name: [part for batch in batches if (part := getattr(batch, one.name)) is not None]
            for one in fields(cls)
        }
        joined: dict[str, Any] = {name: join(of) if of else None for name, of in parts.items()}
        return cls(**joined)


def microbatch_indices(
    step: int, microbatch: int, dp_rank: int, dp: int, micro_batch: int, microbatches: int
) -> range:
    """Global sample indices of microbatch `microbatch` of data-parallel rank `dp_rank` at `step` (from 0).

    `micro_batch` is the number of samples in a microbatch, `microbatches` their number per rank and step.
    """
    seen = step * dp * micro_batch * microbatches
    return indices_after(
        seen=seen,
        microbatch=microbatch,
        dp_rank=dp_rank,
        dp=dp,
        micro_batch=micro_batch,
        microbatches=microbatches,
    )


def indices_after(
    seen: int, microbatch: int, dp_rank: int, dp: int, micro_batch: int, microbatches: int
) -> range:
    """As `microbatch_indices`, for the step after `seen` samples, for runs whose batch size has changed."""
    assert seen >= 0
    assert 0 <= dp_rank < dp, f"dp rank {dp_rank} of {dp}"
    assert 0 <= microbatch < microbatches, f"microbatch {microbatch} of {microbatches}"
    assert micro_batch > 0
    first = seen + (microbatch * dp + dp_rank) * micro_batch
    return range(first, first + micro_batch)


class WindowSamples(Ordered):
    """Windows of the stream of one split."""

    def __init__(
        self,
        source: TokenSource,
        split: str,
        sequence: int,
        seed: int = 0,
        *,
        ratio: str = "949,50,1",
        shuffle: bool = True,
        within: int = 0,
        apart: bool = False,
    ) -> None:
        """Take `split` ("train", "valid" or "test") of `source` cut by `ratio`; `sequence` in tokens. With
        `apart` the documents of a window are kept apart.

        Raises:
            StrettoError: no such split, malformed ratio, fewer than `sequence + 1` tokens.
        """
        super().__init__(source, split, sequence, seed, ratio=ratio, shuffle=shuffle, within=within)
        self.apart = apart
        self._length = (len(self.range) - 1) // sequence
        if self._length < 1:
            raise _too_short(source, split, len(self.range), sequence, ratio)

    def _tokens(self, samples: range) -> range:
        start = self.range.start
        return range(start + samples.start * self.sequence, start + samples.stop * self.sequence + 1)

    def _stretches(self, tokens: int) -> list[tuple[RemoteElements, int]]:
        parts, offsets = super()._stretches(tokens), self.source.offsets
        if self.apart and parts and isinstance(offsets, RemoteElements):
            parts.append((offsets, tokens * self.source.documents // self.source.size + 1))
        return parts

    def starts(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """First tokens of the samples within the source: int64 [len(indices)]."""
        return self.range.start + self.positions(indices) * self.sequence

    def sample(self, index: int) -> NDArray[np.int64]:
        """Token ids of sample `index`: int64 [sequence + 1]."""
        (start,) = self.starts([index]).tolist()
        return self.source.tokens[start : start + self.sequence + 1].astype(np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        """As `windows`."""
        self.fetch_ahead(max(indices, default=0))
        starts = self.starts(indices).tolist()
        return windows([self.source] * len(starts), starts, self.sequence, apart=self.apart)


def windows(sources: Sequence[TokenSource], starts: Sequence[int], sequence: int, *, apart: bool) -> Batch:
    """Inputs, and targets shifted by one token, -100 where a source's mask says so, or where a document
    begins that is kept apart.

    Args:
        sources: of each sample.
        starts: the first tokens of the samples within their sources.
    """
    shape = (len(starts), sequence + 1)
    for one in {*sources}:
        if one.cached:
            at = [start for source, start in zip(sources, starts, strict=True) if source is one]
            one.need([range(start, start + shape[1]) for start in at])
    rows = [source.tokens[at : at + shape[1]] for source, at in zip(sources, starts, strict=True)]
    ids = np.concatenate(rows).reshape(shape) if rows else np.empty(shape)
    inputs, targets = ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)
    for row, source, start in zip(targets, sources, starts, strict=True):
        if source.mask is not None:
            row[source.mask[start + 1 : start + shape[1]] == 0] = IGNORED
    batch = Batch(inputs=torch.from_numpy(inputs), targets=torch.from_numpy(targets))
    return keep_apart(sources, starts, batch) if apart else batch


def keep_apart(sources: Sequence[TokenSource], starts: Sequence[int], batch: Batch) -> Batch:
    """The samples with where their documents begin, and without targets that begin one: predicting them would
    take another document's tokens. Arguments as `windows`.
    """
    length = batch.inputs.shape[1]
    begins = np.zeros((len(starts), length + 1), dtype=np.int64)
    for row, source, start in zip(begins, sources, starts, strict=True):
        first = bisect_right(source.offsets, start)
        last = bisect_right(source.offsets, start + length, lo=first)
        inside = np.asarray(source.offsets[first:last]) - start
        row[inside] = inside
    begins = np.maximum.accumulate(begins, axis=1)
    targets = batch.targets.masked_fill(torch.from_numpy(begins[:, 1:] != begins[:, :-1]), IGNORED)
    return Batch(inputs=batch.inputs, targets=targets, begins=torch.from_numpy(begins[:, :-1].copy()))


class DocumentSamples(Ordered):
    """Single documents, such as conversations: each sample is one, padded or cut to `sequence`.

    A document belongs to the split in which it begins. One without a target in its first `sequence + 1`
    tokens is left out.

    Attributes:
        total: documents that begin in the split.
        too_long: those of more than `sequence + 1` tokens, which are cut off or left out.
        untrained: those that are left out because they have no target.
    """

    def __init__(
        self,
        source: TokenSource,
        split: str,
        sequence: int,
        seed: int = 0,
        *,
        ratio: str = "949,50,1",
        shuffle: bool = True,
        within: int = 0,
        drop: bool = False,
    ) -> None:
        """Take `split` of `source` cut by `ratio`; `drop` leaves out what is too long.

        Raises:
            StrettoError: no such split, malformed ratio, no document in the split that can be trained on.
        """
        super().__init__(source, split, sequence, seed, ratio=ratio, shuffle=shuffle, within=within)
        first = bisect_left(source.offsets, self.range.start, hi=source.documents)
        last = bisect_left(source.offsets, self.range.stop, hi=source.documents)
        starts, lengths = source.offsets[first:last], np.diff(source.offsets[first : last + 1])
        long = lengths > sequence + 1
        self._drop = drop
        kept = ~long if drop else np.ones(len(lengths), dtype=bool)
        trained = _has_target(source, starts, np.minimum(lengths, sequence + 1))
        self.total, self.too_long = len(lengths), int(long.sum())
        self.untrained = int((kept & ~trained).sum())
        chosen = kept & trained
        self._starts, self._lengths = starts[chosen], np.minimum(lengths[chosen], sequence + 1)
        self._length = len(self._starts)
        if self._length < 1:
            raise self._none(ratio)
        self._each = max(1, len(self.range) // self._length)

    def _tokens(self, samples: range) -> range:
        last = samples.stop - 1
        return range(int(self._starts[samples.start]), int(self._starts[last] + self._lengths[last]))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Inputs, padded with the end of text, and targets shifted by one token, -100 where the mask says so
        and on padding.
        """
        self.fetch_ahead(max(indices, default=0))
        size = (len(indices), self.sequence)
        inputs = np.full(size, self.source.padding, dtype=np.int64)
        targets = np.full(size, IGNORED, dtype=np.int64)
        for row, document in enumerate(self.positions(indices)):
            start, length = int(self._starts[document]), int(self._lengths[document])
            ids = self.source.tokens[start : start + length].astype(np.int64)
            following = ids[1:].copy()
            if self.source.mask is not None:
                following[self.source.mask[start + 1 : start + length] == 0] = IGNORED
            inputs[row, : length - 1], targets[row, : length - 1] = ids[:-1], following
        return Batch(inputs=torch.from_numpy(inputs), targets=torch.from_numpy(targets))

    def describe(self) -> str:
        """Such as `train: 950 documents; 12 longer than 512 tokens are cut off`."""
        does = "are left out" if self._drop else "are cut off"
        parts = [f"{self.split}: {self.total} documents"]
        if self.too_long:
            parts.append(f"{self.too_long} longer than {self.sequence} tokens {does}")
        if self.untrained:
            parts.append(f"{self.untrained} with nothing to train on in these are left out")
        return "; ".join(parts)

    def _none(self, ratio: str) -> StrettoError:
        if not self.total:
            return StrettoError(
                f"{self.split} split of {self.source.name}: no document of {self.source.documents}",
                hint=f"give {self.split} a larger share of the split {ratio!r}, or more data",
            )
        return StrettoError(
            f"{self.split} split of {self.source.name}: of {self.total} documents {self.too_long} are longer"
            f" than sequence {self.sequence}, and no other has a token to train on",
            hint="use a longer data.sequence, or data.too_long=truncate",
        )


_SUMMED = 1 << 14  # documents whose masks are read together


def _has_target(
    source: TokenSource, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether documents have a token after their first that counts; bool [len(starts)]."""
    if source.mask is None:
        return lengths > 1
    counts = list[NDArray[np.int64]]()
    for block in range(0, len(starts), _SUMMED):
        first, length = starts[block : block + _SUMMED], lengths[block : block + _SUMMED]
        base = int(first[0])
        mask = np.append(source.mask[base : int(first[-1] + length[-1])], np.uint8(0))
        edges = np.stack([first + 1, first + length], axis=1) - base
        sums = np.add.reduceat(mask, edges.ravel(), dtype=np.int64)[::2]
        counts.append(np.where(length > 1, sums, 0))  # of an empty range reduceat gives one element
    return np.concatenate([np.zeros(0, dtype=np.int64), *counts]) > 0


def samples_of(
    source: TokenSource, data: DataConfig, split: str, seed: int, shuffle: bool = True
) -> WindowSamples | DocumentSamples:
    """The samples of a split as a config has them: windows of the stream, or single documents.

    Raises:
        StrettoError: the split is too short, or conversations are configured and the source holds text.
    """
    packing = packing_of(source, data)
    order: dict[str, Any] = {
        "ratio": data.split,
        "shuffle": shuffle,
        "within": shuffled_within(source, data),
    }
    if packing != "none":
        return WindowSamples(source, split, data.sequence, seed, **order, apart=packing == "documents")
    return DocumentSamples(source, split, data.sequence, seed, **order, drop=data.too_long == "drop")


def shuffled_within(source: TokenSource, data: DataConfig) -> int:
    """The tokens among which samples of a source are shuffled; 0: all of the split."""
    usual = "window" if source.cached else "global"
    return data.shuffle_window if (data.shuffle or usual) == "window" else 0


def whole_split_of(source: TokenSource, data: DataConfig, split: str) -> WholeSplit | WholeDocuments:
    """As `samples_of`, each sample once, for evaluation; the split may be "all".

    Raises:
        StrettoError: the split has nothing to predict, or conversations are configured and the source holds
            text.
    """
    packing = packing_of(source, data)
    if packing != "none":
        apart = packing == "documents"
        return WholeSplit(source, split, data.sequence, ratio=data.split, apart=apart)
    drop = data.too_long == "drop"
    return WholeDocuments(source, split, data.sequence, ratio=data.split, shuffle=False, drop=drop)


def packing_of(source: TokenSource, data: DataConfig) -> Packing:
    """How documents fill samples: as `data.packing` says, and where it does not, as is usual for the source.

    Raises:
        StrettoError: conversations are configured and the source holds text.
    """
    if data.chat is not None and source.mask is None:
        raise StrettoError(
            f"{source.name}: holds the tokens of text, but data.chat is {data.chat}",
            hint="build it with stretto data build --chat, or name the conversations as data.source",
        )
    return data.packing or ("stream" if source.mask is None else "none")


class WholeSplit:
    """Every token of a split in the order of the stream, for evaluation: each but the first is a target once.

    Sample k is the window [k * sequence, (k + 1) * sequence + 1) of the split. The last may be shorter, and
    samples from `len` on are empty: positions without a token have the target `IGNORED`, which losses leave
    out, and the end of text as input.
    """

    def __init__(
        self,
        source: TokenSource,
        split: str,
        sequence: int,
        *,
        ratio: str = "949,50,1",
        apart: bool = False,
    ) -> None:
        """Take `split` ("train", "valid", "test", or "all" of the stream) of `source` cut by `ratio`;
        `sequence` in tokens. With `apart` the documents of a window are kept apart, and the first token of
        each is no target.

        Raises:
            StrettoError: no such split, malformed ratio, no token to predict.
        """
        check_split(split, (*SPLITS, ALL))
        check_sequence(sequence)
        self.source = source
        self.split = split
        self.sequence = sequence
        self._apart = apart
        self.range = range_of(source, split, ratio)
        if len(self.range) < 2:
            part = "" if split == ALL else f"the {split} split (data.split={ratio}) of "
            why = "is empty" if not self.range else "has one token, and nothing before it to predict it from"
            fix = "give more text" if split == ALL else "name another split, or give more text"
            raise StrettoError(f"{part}the {source.size} tokens of {source.name} {why}", hint=fix)

    def __len__(self) -> int:
        """Samples, the last of which may be incomplete."""
        return -(-(len(self.range) - 1) // self.sequence)

    def targets(self, samples: int) -> range | None:
        """The tokens of the source that the first `samples` samples predict; None where a mask chooses, or
        documents are kept apart.
        """
        if self.source.mask is not None or self._apart:
            return None
        first = self.range.start + 1
        return range(first, min(first + samples * self.sequence, self.range.stop))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Inputs, and targets shifted by one token."""
        size = (len(indices), self.sequence)
        inputs = torch.full(size, self.source.padding, dtype=torch.int64)
        targets = torch.full(size, IGNORED, dtype=torch.int64)
        for row, index in enumerate(indices):
            start = self.range.start + index * self.sequence
            ids = self.source.tokens[start : min(start + self.sequence + 1, self.range.stop)]
            if len(ids) > 1:
                window = torch.from_numpy(ids.astype(np.int64))
                inputs[row, : len(ids) - 1] = window[:-1]
                targets[row, : len(ids) - 1] = window[1:]
                if self.source.mask is not None:
                    mask = torch.from_numpy(self.source.mask[start + 1 : start + len(ids)] == 0)
                    targets[row, : len(ids) - 1][mask] = IGNORED
        batch = Batch(inputs=inputs, targets=targets)
        starts = [self.range.start + index * self.sequence for index in indices]
        return keep_apart([self.source] * len(starts), starts, batch) if self._apart else batch


class WholeDocuments(DocumentSamples):
    """Every document of a split once in the order of the stream, for evaluation; samples from `len` on are
    empty, as those of `WholeSplit`.
    """

    whole = True

    def targets(self, samples: int) -> range | None:
        """None: some tokens of a document may be cut off or not count."""
        return None

    def batch(self, indices: Sequence[int]) -> Batch:
        """As `DocumentSamples.batch`."""
        there = [index for index in indices if index < len(self)]
        missing = (len(indices) - len(there), self.sequence)
        inputs, targets = torch.full(missing, self.source.padding), torch.full(missing, IGNORED)
        return Batch.concatenated([super().batch(there), Batch(inputs=inputs, targets=targets)])


def _too_short(source: TokenSource, split: str, tokens: int, sequence: int, ratio: str) -> StrettoError:
    fits = tokens - 1
    fixes = [f"use sequence {fits} or less"] if fits > 0 else []
    fixes += ["give more text", f"give {split} a larger share of the split {ratio!r}"]
    return StrettoError(
        f"{split} split of {source.name}: {tokens} tokens of {source.size},"
        f" one sample of sequence {sequence} needs {sequence + 1}",
        hint=", ".join(fixes[:-1]) + f", or {fixes[-1]}",
    )
