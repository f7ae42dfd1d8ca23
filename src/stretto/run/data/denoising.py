"""Samples of an encoder-decoder: windows of text with spans cut out, which the decoder restores.

Span corruption (T5: Raffel et al. 2020, section 3.1.4): each span leaves a sentinel of its own in the input,
and the targets are the spans, each after its sentinel. A window begins with tokens that are kept and ends
with a span, between these the lengths of both are a uniformly random partition, as in T5's own pipeline.

Infilling (BART: Lewis et al. 2020, section 2.2): each span leaves one mask, and the targets are the whole
window. Lengths of spans are of a Poisson distribution, 0 among them, which inserts a mask; given their sum
that is a multinomial distribution, so that the lengths of samples are fixed here too. At least one token lies
between two spans. BART's permutation of sentences is not done.

What is cut out is a function of (seed, number of the sample): any rank of any layout, and a run that is
resumed, sees the same samples; another epoch has other spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.engine.models.language import IGNORED
from stretto.errors import StrettoError
from stretto.run.config.denoising import Corruption, Denoising
from stretto.run.data.dataset import Batch, WholeSplit
from stretto.run.data.permutation import random_bits
from stretto.run.data.sentinels import SentinelIds
from stretto.run.data.token_source import TokenSource

Ints = NDArray[np.int64]


class Windows(Protocol):
    """Windows of text by index, such as `dataset.Samples`."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Samples whose inputs are the windows."""
        ...


W = TypeVar("W", bound=Windows)


class Denoised(Generic[W]):
    """Samples of a denoising objective.

    Args:
        windows: of `lengths.window` tokens.
        targets: tokens of the decoder's samples; what is left of them after the end has no target.
    """

    def __init__(
        self, windows: W, *, lengths: Denoising, marks: SentinelIds, seed: int, targets: int
    ) -> None:
        assert targets >= lengths.targets
        self.windows = windows
        self.lengths, self.marks = lengths, marks
        self._key, self._targets = f"{lengths.corruption}/{seed}", targets
        self._marks = np.array(marks.spans, dtype=np.int64)
        assert len(self._marks) == lengths.spans

    def batch(self, indices: Sequence[int]) -> Batch:
        """Samples with the decoder's inputs: its targets, one later, after the token that starts it."""
        text: Ints = self.windows.batch(indices).inputs.numpy()
        inputs, restored = self._corrupt(text, np.asarray(indices, dtype=np.int64))
        rows, length = restored.shape
        targets = np.full((rows, self._targets), IGNORED, dtype=np.int64)
        targets[:, :length], targets[:, length] = restored, self.marks.end
        decoder = np.full_like(targets, self.marks.start)
        decoder[:, 1 : length + 1] = restored
        ends = np.full((rows, 1), self.marks.end, dtype=np.int64)
        return Batch(
            inputs=torch.from_numpy(np.concatenate([inputs, ends], axis=1)),
            targets=torch.from_numpy(targets),
            decoder=torch.from_numpy(decoder),
        )

    def _corrupt(self, text: Ints, numbers: Ints) -> tuple[Ints, Ints]:
        """Inputs and targets without their ends, of windows [samples, window]."""
        lengths = self.lengths
        draw = _poisson_spans if lengths.corruption == "infilling" else _partitioned_spans
        before, spans = draw(lengths, random_bits(self._key, numbers, lengths.window))
        return corrupt(lengths.corruption, text, before=before, spans=spans, marks=self._marks)


def corrupt(
    corruption: Corruption, text: Ints, *, before: Ints, spans: Ints, marks: Ints
) -> tuple[Ints, Ints]:
    """Cut spans out of windows: the encoder's inputs and the decoder's targets, without ends.

    Args:
        text: [samples, window].
        before: how many of the kept tokens lie before each span, increasing, [samples, spans].
        spans: their lengths, alike in sum for all samples, [samples, spans].
        marks: what each span leaves in the input, [spans].
    """
    noise = _covered(before, spans, text.shape[1])
    inputs = _marked(text[~noise], before, marks)
    if corruption == "infilling":
        return inputs, text
    return inputs, _marked(text[noise], np.cumsum(spans, axis=1) - spans, marks)


class DenoisedSplit(Denoised[WholeSplit]):
    """The windows of a split in the order of the stream, each once, for evaluation; fewer tokens than a
    window at the end of the split are left out. Samples from `len` on have no targets.

    Raises:
        StrettoError: the split has not one window.
    """

    def __init__(self, windows: WholeSplit, *, lengths: Denoising, marks: SentinelIds, targets: int) -> None:
        super().__init__(windows, lengths=lengths, marks=marks, seed=0, targets=targets)
        self.source: TokenSource = windows.source
        self.split, self.range = windows.split, windows.range
        if not len(self):
            raise StrettoError(
                f"{windows.split} split of {self.source.name}: {len(self.range)} tokens, and one sample is "
                f"made of {lengths.window}",
                hint=f"a shorter data.sequence, more text, or more of it for {windows.split} in data.split",
            )

    def __len__(self) -> int:
        """Whole windows."""
        return len(self.range) // self.lengths.window

    def targets(self, samples: int) -> range | None:
        """None: what is predicted is no run of the stream."""
        return None

    def batch(self, indices: Sequence[int]) -> Batch:
        """As those of training."""
        batch = super().batch(indices)
        batch.targets[torch.tensor(indices) >= len(self)] = IGNORED
        return batch


def _partitioned_spans(lengths: Denoising, bits: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Kept tokens before each span, and the lengths of the spans: int64 [samples, spans] each."""
    kept = _partition(bits[:, : lengths.kept - 1], lengths.spans)
    return np.cumsum(kept, axis=1), _partition(bits[:, lengths.kept : -1], lengths.spans)


def _partition(bits: NDArray[np.uint64], parts: int) -> Ints:
    """One item more than there are columns of `bits` in runs of one or more, each way equally likely: int64
    [samples, parts].
    """
    cuts = 1 + _choice(bits, parts - 1)
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=0)
    edges[:, -1] = bits.shape[1] + 1
    return np.diff(edges, axis=1)


def _poisson_spans(lengths: Denoising, bits: NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """As `_partitioned_spans`; spans may be empty, and each lies before another of the kept tokens, or after
    the last.
    """
    before = _choice(bits[:, : lengths.kept + 1], lengths.spans)
    rows = len(bits)
    more = random_bits("lengths", bits[:, 0].view(np.int64), lengths.noise)
    bins = (more % np.uint64(lengths.spans)).astype(np.int64) + lengths.spans * np.arange(rows)[:, None]
    counts = np.bincount(bins.ravel(), minlength=rows * lengths.spans)
    return before, counts.reshape(rows, lengths.spans)


def _choice(bits: NDArray[np.uint64], number: int) -> Ints:
    """`number` of the columns of `bits`, each set equally likely, in order: int64 [samples, number]."""
    if number == bits.shape[1]:
        return np.broadcast_to(np.arange(number), bits.shape)
    return np.sort(np.argpartition(bits, number, axis=1)[:, :number], axis=1)


def _covered(before: Ints, spans: Ints, window: int) -> NDArray[np.bool_]:
    """Which tokens of the windows lie in spans: bool [samples, window].

    Args:
        before: kept tokens before each span.
        spans: their lengths.
    """
    ends = before + np.cumsum(spans, axis=1)
    change = np.zeros((len(spans), window + 1), dtype=np.int8)
    rows = np.arange(len(spans))[:, None]
    change[rows, ends - spans] += 1  # no two spans begin, or end, at one place
    change[rows, ends] -= 1
    return np.cumsum(change[:, :-1], axis=1, dtype=np.int8).view(np.bool_)


def _marked(rest: Ints, before: Ints, marks: Ints) -> Ints:
    """Tokens with marks between them: int64 [samples, tokens + marks].

    Args:
        rest: the tokens of all samples.
        before: of the tokens of a sample, how many lie before each mark.
    """
    rows, spans = before.shape
    whole = np.empty((rows, len(rest) // rows + spans), dtype=np.int64)
    is_mark = np.zeros(whole.shape, dtype=np.bool_)
    is_mark[np.arange(rows)[:, None], before + np.arange(spans)] = True
    whole[is_mark], whole[~is_mark] = np.tile(marks, rows), rest
    return whole
