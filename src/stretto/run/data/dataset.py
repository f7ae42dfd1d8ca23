"""Samples for a language model: windows of one split's token stream or single documents, in an order computed
from a seed.

Of windows, sample k of an epoch is [p * sequence, (p + 1) * sequence + 1) of the split, where p(k) is a
permutation for each seed and epoch: the last token of a window is the first of the next, so every token but
the first is predicted exactly once an epoch (fewer than `sequence` tokens at the end of the split are left
out).

If documents are isolated, the windows are the same, each says where its documents begin, and the first token
of a document is not predicted. The part of a document that began before its window counts as a whole one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.run.config.data import DEFAULT_RATIO, DataConfig, Packing
from stretto.run.data.permutation import WINDOW, block_order, positions
from stretto.run.data.split import ALL, SPLITS, check_split, split_range
from stretto.run.data.token_source import RemoteElements, TokenSource

_RUN = 1 << 10
_SUMMED = 1 << 14  # documents whose masks are read together


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some samples.

    inputs, targets: int64 [samples, sequence] on the CPU; targets of -100 do not count.
    begins: of the same shape, for each position the one in its sample at which its document begins; None
        if attention crosses the ends of documents.
    decoder: inputs of the decoder, of the shape of `targets`, for a model whose encoder reads `inputs`.
    lengths: number of inputs that are not padding, int64 [samples]; None if none are padding.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    begins: torch.Tensor | None = None
    decoder: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch with every field changed."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            name: None if value is None else change(value) for name, value in values.items()
        }
        return Batch(**changed)

    def take(self, rows: slice | list[int]) -> Batch:
        """Return some of the samples."""
        return self.each(lambda values: values[rows])

    def pinned(self) -> Batch:
        """Return a copy in page-locked memory, from which a GPU copies while the host continues. Such memory
        is used anew only when the copies from it are done: torch's allocator keeps an event of each.
        """
        return self.each(torch.Tensor.pin_memory)

    @classmethod
    def concatenated(cls, batches: Sequence[Batch], rows: Sequence[NDArray[np.int64]] | None = None) -> Batch:
        """Return the samples of all batches, which have the same fields, one batch after another.

        rows: the row of each sample of each batch in the result; None if they are in order.
        """
        order = None if rows is None else torch.from_numpy(np.argsort(np.concatenate(rows)))
        joined = dict[str, Any]()
        for field in fields(cls):
            parts = [part for batch in batches if (part := getattr(batch, field.name)) is not None]
            values = torch.cat(parts) if parts else None
            joined[field.name] = values if order is None or values is None else values[order]
        return cls(**joined)


def indices_after(
    samples_before: int, microbatch: int, dp_rank: int, dp: int, micro_batch: int, microbatches: int
) -> range:
    """Return the indices of the samples in one microbatch of a data-parallel rank, in the step that follows
    the first `samples_before` samples.

    Args:
        micro_batch: samples in a microbatch.
        microbatches: microbatches per rank and step.
    """
    assert samples_before >= 0
    assert 0 <= dp_rank < dp, f"dp rank {dp_rank} of {dp}"
    assert 0 <= microbatch < microbatches, f"microbatch {microbatch} of {microbatches}"
    assert micro_batch > 0
    first = samples_before + (microbatch * dp + dp_rank) * micro_batch
    return range(first, first + micro_batch)


class ChunkedFunction:
    """A function of sample indices, computed for runs of 1,024 of them: many cost hardly more than one.

    Args:
        function: maps consecutive indices, int64 [n], to an int64 array of n rows.
    """

    def __init__(self, function: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> None:
        self._function = function
        self._cache = dict[int, NDArray[np.int64]]()

    def __call__(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the function's values, in rows."""
        if isinstance(indices, range) and len(indices) and indices.step == 1:
            run, start = divmod(indices.start, _RUN)
            if start + len(indices) <= _RUN:  # as nearly always
                return self._run(run)[start : start + len(indices)]
        runs, offsets = np.divmod(np.asarray(indices, dtype=np.int64), _RUN)
        row = self._run(int(runs[0]) if len(runs) else 0).shape[1:]
        values = np.empty((len(runs), *row), dtype=np.int64)
        for run in {*runs.tolist()}:
            inside = runs == run
            values[inside] = self._run(run)[offsets[inside]]
        return values

    def _run(self, run: int) -> NDArray[np.int64]:
        assert run >= 0, "sample indices start at 0"
        values = self._cache.get(run)
        if values is None:
            values = self._function(np.arange(run * _RUN, (run + 1) * _RUN))
            values.flags.writeable = False
            # only neighbours are needed again; a new dict, because a thread may be reading the other
            self._cache = {run: values, **dict(list(self._cache.items())[:3])}
        return values


class OrderOptions(TypedDict, total=False):
    """The arguments of `SplitSamples` by name."""

    ratio: str | None
    shuffle: bool
    within: int
    once: bool


class SplitSamples:
    """Samples of one split of a token source, by index, without a position of its own.

    Index k is sample k % len of epoch k // len; each epoch has an order of its own, a pure function of (seed,
    epoch). With `shuffle=False` every epoch is in the order of the stream; with `within` samples are shuffled
    within that many tokens (see `permutation.positions`), without it over the whole split.

    With `once`, for evaluation, the samples are in the order of the stream, and those from `len` on are
    empty: positions without a token have the target `IGNORED`, which losses leave out, and the end of text as
    input. The split may then be "all".
    """

    def __init__(
        self,
        source: TokenSource,
        split: str,
        sequence: int,
        seed: int = 0,
        *,
        ratio: str | None = None,
        shuffle: bool = True,
        within: int = 0,
        once: bool = False,
    ) -> None:
        check_split(split, (*SPLITS, ALL) if once else SPLITS)
        if sequence < 1:
            raise StrettoError(
                f"sequence {sequence}: must be at least 1", hint="the usual lengths are 128 to 8192"
            )
        self.source = source
        self.split = split
        self.sequence = sequence
        self.seed = seed
        named = ratio is None and source.named_splits
        self.ratio = "names of files" if named else ratio or DEFAULT_RATIO
        self.shuffle = shuffle and not once
        self.once = once
        self.range = split_range(source, split, ratio)
        self._length, self._within = 0, within
        self._stride = sequence  # tokens from one sample to the next
        # blocks, counted over the epochs: the first of the window that is read, and the end of those fetched
        self._window = self._fetched = -1
        self._order = ChunkedFunction(self._ordered)

    def __len__(self) -> int:
        """Number of samples in an epoch."""
        return self._length

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return several samples."""
        raise NotImplementedError

    def targets(self, samples: int) -> range | None:
        """Return the tokens of the source that the first `samples` samples predict, or None if only some of
        the tokens are predicted.
        """
        raise NotImplementedError

    def positions(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions of samples within the split's order of the stream: int64 [len(indices)]."""
        return self._order(indices)

    def _ordered(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.once:
            return indices
        epochs, numbers = np.divmod(indices, self._length)
        if not self.shuffle:
            return numbers
        for epoch in {*epochs.tolist()}:
            inside = epochs == epoch
            numbers[inside] = positions(numbers[inside], self._length, self.seed, epoch, self.block)
        return numbers

    @property
    def block(self) -> int:
        """Neighbouring samples that are moved as one; 0 if each is moved on its own."""
        block = max(1, self._within // WINDOW // self._stride) if self._within else 0
        return block if 2 * block <= self._length else 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of a source at a URL that the cache has to hold so that each block is fetched once: those of
        the window that is read and of the next, which are fetched meanwhile, or all of a smaller source.
        """
        parts = self._remote_runs(self.block * self._stride + 1)
        total = sum(array.remote_bytes for array, _ in parts)
        window = 2 * WINDOW * sum(array.stretch_bytes(length) for array, length in parts)
        return min(total, window) if self.block else total

    def _remote_runs(self, tokens: int) -> list[tuple[RemoteElements, int]]:
        """Return the arrays that are read over a network, and how many elements of each go with `tokens`
        tokens.
        """
        return [(array, tokens) for array in self.source.cached]

    def _tokens(self, samples: range) -> range:
        """Return the tokens of neighbouring samples, by their positions."""
        raise NotImplementedError

    def fetch_ahead(self, index: int) -> None:
        """Fetch the blocks of the window of sample `index`, and up to its middle those of the next."""
        if not self.source.cached or not self.block:
            return
        blocks = -(-self._length // self.block)  # of an epoch
        epoch, position = divmod(index, self._length)
        current = epoch * blocks + position // self.block
        first = current - position // self.block % WINDOW
        end = min(first + WINDOW, (epoch + 1) * blocks)
        if first != self._window:  # those that were asked for before have to outlast the window before
            self._window = self._fetched = first
        for number in range(self._fetched, end + min(WINDOW, 2 * (current - first))):
            of_epoch, turn = divmod(number, blocks)
            block = int(block_order(np.array([turn]), self._length, self.seed, of_epoch, self.block)[0])
            samples = range(block * self.block, min((block + 1) * self.block, self._length))
            tokens = self._tokens(samples)
            for array in self.source.cached:
                array.fetch_ahead(tokens.start, tokens.stop)
            self._fetched = number + 1


class WindowSamples(SplitSamples):
    """Windows of the stream of one split.

    With `isolate` documents are isolated. With `once` the last window may be shorter than the others.

    Raises:
        StrettoError: no such split, malformed ratio, fewer than `sequence + 1` tokens (`once`: 2).
    """

    def __init__(
        self,
        source: TokenSource,
        split: str,
        sequence: int,
        seed: int = 0,
        *,
        isolate: bool = False,
        **order: Unpack[OrderOptions],
    ) -> None:
        super().__init__(source, split, sequence, seed, **order)
        self.isolate = isolate
        tokens = len(self.range)
        self._length = -(-(tokens - 1) // sequence) if self.once else (tokens - 1) // sequence
        if self._length >= 1:
            return
        if self.once:
            part = "" if split == ALL else f"the {split} split (data.split={self.ratio}) of "
            problem = "has one token, and nothing before it to predict it from" if tokens else "is empty"
            raise StrettoError(
                f"{part}the {source.size} tokens of {source.name} {problem}",
                hint="give more text" if split == ALL else "name another split, or give more text",
            )
        shorter = f"use sequence {tokens - 1} or less, " if tokens > 1 else ""
        raise StrettoError(
            f"{split} split of {source.name}: {tokens} tokens of {source.size},"
            f" one sample of sequence {sequence} needs {sequence + 1}",
            hint=f"{shorter}give more text, or give {split} a larger share of the split {self.ratio!r}",
        )

    def _tokens(self, samples: range) -> range:
        start = self.range.start
        return range(start + samples.start * self.sequence, start + samples.stop * self.sequence + 1)

    def _remote_runs(self, tokens: int) -> list[tuple[RemoteElements, int]]:
        parts, offsets = super()._remote_runs(tokens), self.source.offsets
        if self.isolate and parts and isinstance(offsets, RemoteElements):
            parts.append((offsets, tokens * self.source.documents // self.source.size + 1))
        return parts

    def starts(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first tokens of samples within the source: int64 [len(indices)]."""
        return self.range.start + self.positions(indices) * self.sequence

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return several samples; see `windows`."""
        self.fetch_ahead(max(indices, default=0))
        starts = self.starts(indices).tolist()
        stop = self.range.stop if self.once else None
        return windows([self.source] * len(starts), starts, self.sequence, isolate=self.isolate, stop=stop)

    def targets(self, samples: int) -> range | None:
        """See `SplitSamples.targets`; None if a mask chooses tokens, or documents are isolated."""
        if self.source.mask is not None or self.isolate:
            return None
        first = self.range.start + 1
        return range(first, min(first + samples * self.sequence, self.range.stop))


def windows(
    sources: Sequence[TokenSource],
    starts: Sequence[int],
    sequence: int,
    *,
    isolate: bool,
    stop: int | None = None,
) -> Batch:
    """Return inputs, and targets shifted by one token, -100 if a source's mask excludes the token or it
    begins an isolated document.

    Args:
        sources: the source of each sample.
        starts: the first tokens of the samples within their sources.
        stop: the end of the tokens, of one source; a sample that reaches further is padded.
    """
    shape = (len(starts), sequence + 1)

    def end_of(start: int) -> int:
        return start + shape[1] if stop is None else min(start + shape[1], stop)

    for source in {*sources}:
        if source.cached:
            firsts = [start for owner, start in zip(sources, starts, strict=True) if owner is source]
            source.need([range(start, end_of(start)) for start in firsts])
    rows = [source.tokens[start : end_of(start)] for source, start in zip(sources, starts, strict=True)]
    if stop is None:
        ids = np.concatenate(rows).reshape(shape) if rows else np.empty(shape)
    else:
        ids = np.full(shape, sources[0].padding if sources else 0, dtype=np.int64)
        for padded, row in zip(ids, rows, strict=True):
            if len(row) > 1:
                padded[: len(row)] = row
    inputs, targets = ids[:, :-1].astype(np.int64), ids[:, 1:].astype(np.int64)
    for i, (source, start, row) in enumerate(zip(sources, starts, rows, strict=True)):
        if len(row) <= sequence:
            last = max(0, len(row) - 1)
            inputs[i, last:], targets[i, last:] = source.padding, IGNORED
        if source.mask is not None and len(row) > 1:
            excluded = source.mask[start + 1 : start + len(row)] == 0
            targets[i, : len(row) - 1][excluded] = IGNORED
    batch = Batch(inputs=torch.from_numpy(inputs), targets=torch.from_numpy(targets))
    return isolate_documents(sources, starts, batch) if isolate else batch


def isolate_documents(sources: Sequence[TokenSource], starts: Sequence[int], batch: Batch) -> Batch:
    """Return the samples with where their documents begin, and without targets that begin one: predicting
    them would take another document's tokens. Arguments as `windows`.
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


class DocumentSamples(SplitSamples):
    """Single documents, such as conversations: each sample is one, padded or cut to `sequence`.

    A document belongs to the split in which it begins. One without a target in its first `sequence + 1`
    tokens is left out; with `drop` also one that is longer.

    Attributes:
        total: documents that begin in the split.
        too_long: those of more than `sequence + 1` tokens, which are cut off or left out.
        untrained: those that are left out because they have no target.

    Raises:
        StrettoError: no such split, malformed ratio, no document in the split that can be trained on.
    """

    def __init__(
        self,
        source: TokenSource,
        split: str,
        sequence: int,
        seed: int = 0,
        *,
        drop: bool = False,
        **order: Unpack[OrderOptions],
    ) -> None:
        super().__init__(source, split, sequence, seed, **order)
        first = bisect_left(source.offsets, self.range.start, hi=source.documents)
        last = bisect_left(source.offsets, self.range.stop, hi=source.documents)
        starts, lengths = source.offsets[first:last], np.diff(source.offsets[first : last + 1])
        long = lengths > sequence + 1
        self._drop = drop
        fitting = ~long if drop else np.ones(len(lengths), dtype=bool)
        trained = _has_target(source, starts, np.minimum(lengths, sequence + 1))
        self.total, self.too_long = len(lengths), int(long.sum())
        self.untrained = int((fitting & ~trained).sum())
        chosen = fitting & trained
        self._starts, self._lengths = starts[chosen], np.minimum(lengths[chosen], sequence + 1)
        self._length = len(self._starts)
        if self._length >= 1:
            self._stride = max(1, len(self.range) // self._length)
        elif not self.total:
            raise StrettoError(
                f"{split} split of {source.name}: no document of {source.documents}",
                hint=f"give {split} a larger share of the split {self.ratio!r}, or more data",
            )
        else:
            raise StrettoError(
                f"{split} split of {source.name}: of {self.total} documents {self.too_long} are longer"
                f" than sequence {sequence}, and no other has a token to train on",
                hint="use a longer data.sequence, or data.too_long=truncate",
            )

    def _tokens(self, samples: range) -> range:
        last = samples.stop - 1
        return range(int(self._starts[samples.start]), int(self._starts[last] + self._lengths[last]))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return inputs, padded with the end of text, and targets shifted by one token, -100 on padding and
        if the mask excludes the token.
        """
        self.fetch_ahead(max(indices, default=0))
        size = (len(indices), self.sequence)
        inputs = np.full(size, self.source.padding, dtype=np.int64)
        targets = np.full(size, IGNORED, dtype=np.int64)
        for row, document in enumerate(self.positions(indices).tolist()):
            if document >= self._length:  # `once`
                continue
            start, length = int(self._starts[document]), int(self._lengths[document])
            ids = self.source.tokens[start : start + length].astype(np.int64)
            following = ids[1:].copy()
            if self.source.mask is not None:
                following[self.source.mask[start + 1 : start + length] == 0] = IGNORED
            inputs[row, : length - 1], targets[row, : length - 1] = ids[:-1], following
        return Batch(inputs=torch.from_numpy(inputs), targets=torch.from_numpy(targets))

    def targets(self, samples: int) -> range | None:
        """Return None: some tokens of a document may be cut off or not count."""
        return None

    def describe(self) -> str:
        """Return a line such as `train: 950 documents; 12 longer than 512 tokens are cut off`."""
        parts = [f"{self.split}: {self.total} documents"]
        if self.too_long:
            fate = "are left out" if self._drop else "are cut off"
            parts.append(f"{self.too_long} longer than {self.sequence} tokens {fate}")
        if self.untrained:
            parts.append(f"{self.untrained} with nothing to train on in these are left out")
        return "; ".join(parts)


def _has_target(
    source: TokenSource, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return for each document whether a token after its first counts; bool [len(starts)]."""
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
    source: TokenSource,
    data: DataConfig,
    split: str,
    seed: int = 0,
    *,
    shuffle: bool = True,
    once: bool = False,
) -> WindowSamples | DocumentSamples:
    """Return the samples of a split as configured: windows of the stream, or single documents.

    Raises:
        StrettoError: the split is too short, or conversations are configured and the source holds text.
    """
    packing = packing_of(source, data)
    within = 0 if once else shuffled_within(source, data)
    order = OrderOptions(ratio=data.split, shuffle=shuffle, within=within, once=once)
    if packing != "none":
        return WindowSamples(source, split, data.sequence, seed, **order, isolate=packing == "documents")
    return DocumentSamples(source, split, data.sequence, seed, **order, drop=data.too_long == "drop")


def shuffled_within(source: TokenSource, data: DataConfig) -> int:
    """Return the number of tokens among which samples of a source are shuffled; 0 for all of the split."""
    default = "window" if source.cached else "global"
    return data.shuffle_window if (data.shuffle or default) == "window" else 0


def packing_of(source: TokenSource, data: DataConfig) -> Packing:
    """Return how documents fill samples: `data.packing`, or the default for the source.

    Raises:
        StrettoError: conversations are configured and the source holds text.
    """
    if data.chat is not None and source.mask is None:
        raise StrettoError(
            f"{source.name}: holds the tokens of text, but data.chat is {data.chat}",
            hint="build it with stretto data build --chat, or name the conversations as data.source",
        )
    return data.packing or ("stream" if source.mask is None else "none")
