"""Samples of an encoder-decoder: windows of text with spans cut out, which the decoder restores.

Span corruption (T5: Raffel et al. 2020, section 3.1.4): each span leaves a sentinel of its own in the input,
and the targets are the spans, each after its sentinel. A window begins with tokens that remain and ends with
a span; between these the lengths of both are a uniformly random partition, as in T5's own pipeline.

Infilling (BART: Lewis et al. 2020, section 2.2): each span leaves one mask, and the targets are the whole
window. Lengths of spans are of a Poisson distribution, 0 among them, which inserts a mask; given their sum
that is a multinomial distribution, so that the lengths of samples are fixed here too. At least one token lies
between two spans. BART's permutation of sentences is not done.

The spans are a function of (seed, index of the sample): any rank of any layout, and a run that is resumed,
sees the same samples; another epoch has other spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.run.config.denoising import Corruption, Denoising
from stretto.run.data.dataset import Batch, WindowSamples
from stretto.run.data.permutation import random_bits
from stretto.run.data.prefetch import Batched
from stretto.run.data.sentinels import SentinelIds
from stretto.run.data.token_source import TokenSource

Ints = NDArray[np.int64]
W = TypeVar("W", bound=Batched[Batch])


class DenoisedSamples(Generic[W]):
    """Samples of a denoising objective.

    Of windows that are read once, for evaluation, the last counts only if it is complete, and samples from
    `len` on have no targets.

    Args:
        windows: windows of `lengths.window` tokens of text.
        targets: length of the decoder's samples, in tokens; positions after the end have no target.

    Raises:
        StrettoError: the split for evaluation has not one window.
    """

    def __init__(
        self, windows: W, *, lengths: Denoising, sentinels: SentinelIds, seed: int = 0, targets: int
    ) -> None:
        assert targets >= lengths.targets
        assert len(sentinels.spans) == lengths.spans
        self.windows = windows
        self.lengths, self.sentinels = lengths, sentinels
        self._key, self._targets = f"{lengths.corruption}/{seed}", targets
        self._once = isinstance(windows, WindowSamples) and windows.once
        if self._once and not len(self):
            raise StrettoError(
                f"{self.split} split of {self.source.name}: {len(self.range)} tokens, and one sample is "
                f"made of {lengths.window}",
                hint=f"a shorter data.sequence, more text, or more of it for {self.split} in data.split",
            )

    @property
    def source(self) -> TokenSource:
        """The source of the windows of a split."""
        return self._split_windows.source

    @property
    def split(self) -> str:
        """The name of the split."""
        return self._split_windows.split

    @property
    def range(self) -> range:
        """The tokens of the split."""
        return self._split_windows.range

    @property
    def _split_windows(self) -> WindowSamples:
        assert isinstance(self.windows, WindowSamples)
        return self.windows

    def __len__(self) -> int:
        """Number of complete windows of a split."""
        return len(self.range) // self.lengths.window

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return samples with the decoder's inputs: the start token, then its targets but the last."""
        text: Ints = self.windows.batch(indices).inputs.numpy()
        lengths = self.lengths
        draw = _poisson_spans if lengths.corruption == "infilling" else _partitioned_spans
        bits = random_bits(self._key, np.asarray(indices, dtype=np.int64), lengths.window)
        before, spans = draw(lengths, bits)
        marks = np.array(self.sentinels.spans, dtype=np.int64)
        inputs, restored = corrupt(lengths.corruption, text, before=before, spans=spans, marks=marks)
        rows, length = restored.shape
        targets = np.full((rows, self._targets), IGNORED, dtype=np.int64)
        targets[:, :length], targets[:, length] = restored, self.sentinels.end
        decoder = np.full_like(targets, self.sentinels.start)
        decoder[:, 1 : length + 1] = restored
        if self._once:
            targets[np.asarray(indices) >= len(self)] = IGNORED
        ends = np.full((rows, 1), self.sentinels.end, dtype=np.int64)
        return Batch(
            inputs=torch.from_numpy(np.concatenate([inputs, ends], axis=1)),
            targets=torch.from_numpy(targets),
            decoder=torch.from_numpy(decoder),
        )

    def targets(self, samples: int) -> None:
        """Return None: the tokens that are predicted are no run of the stream."""


def corrupt(
    corruption: Corruption, text: Ints, *, before: Ints, spans: Ints, marks: Ints
) -> tuple[Ints, Ints]:
    """Cut spans out of windows; return the encoder's inputs and the decoder's targets, without ends.

    Args:
        text: tokens, [samples, window].
        before: number of remaining tokens before each span, increasing, [samples, spans].
        spans: lengths of the spans, with the same sum for all samples, [samples, spans].
        marks: the id that each span leaves in the input, [spans].
    """
    ends, rows = before + np.cumsum(spans, axis=1), np.arange(len(spans))[:, None]
    change = np.zeros((len(spans), text.shape[1] + 1), dtype=np.int8)
    change[rows, ends - spans] += 1  # no two spans begin, or end, at one place
    change[rows, ends] -= 1
    noise = np.cumsum(change[:, :-1], axis=1, dtype=np.int8).view(np.bool_)  # tokens within spans
    inputs = _marked(text[~noise], before, marks)
    if corruption == "infilling":
        return inputs, text
    return inputs, _marked(text[noise], np.cumsum(spans, axis=1) - spans, marks)


def _partitioned_spans(lengths: Denoising, bits: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Return the number of remaining tokens before each span, and the lengths of the spans: int64 [samples,
    spans] each.
    """
    remaining = _partition(bits[:, : lengths.unmasked - 1], lengths.spans)
    return np.cumsum(remaining, axis=1), _partition(bits[:, lengths.unmasked : -1], lengths.spans)


def _partition(bits: NDArray[np.uint64], parts: int) -> Ints:
    """Divide one item more than `bits` has columns into runs of one or more, each way equally likely: int64
    [samples, parts].
    """
    cuts = 1 + _choice(bits, parts - 1)
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=0)
    edges[:, -1] = bits.shape[1] + 1
    return np.diff(edges, axis=1)


def _poisson_spans(lengths: Denoising, bits: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """See `_partitioned_spans`; spans may be empty, and each lies before another of the remaining tokens, or
    after the last.
    """
    before = _choice(bits[:, : lengths.unmasked + 1], lengths.spans)
    rows = len(bits)
    more = random_bits("lengths", bits[:, 0].view(np.int64), lengths.noise)
    bins = (more % np.uint64(lengths.spans)).astype(np.int64) + lengths.spans * np.arange(rows)[:, None]
    counts = np.bincount(bins.ravel(), minlength=rows * lengths.spans)
    return before, counts.reshape(rows, lengths.spans)


def _choice(bits: NDArray[np.uint64], count: int) -> Ints:
    """Choose `count` of the columns of `bits`, each set equally likely, in order: int64 [samples, count]."""
    if count == bits.shape[1]:
        return np.broadcast_to(np.arange(count), bits.shape)
    return np.sort(np.argpartition(bits, count, axis=1)[:, :count], axis=1)


def _marked(tokens: Ints, before: Ints, marks: Ints) -> Ints:
    """Return tokens with marks between them: int64 [samples, tokens + marks].

    Args:
        tokens: the tokens of all samples.
        before: the number of tokens of the sample before each mark.
    """
    rows, spans = before.shape
    marked = np.empty((rows, len(tokens) // rows + spans), dtype=np.int64)
    is_mark = np.zeros(marked.shape, dtype=np.bool_)
    is_mark[np.arange(rows)[:, None], before + np.arange(spans)] = True
    marked[is_mark], marked[~is_mark] = np.tile(marks, rows), tokens
    return marked
