"""The loss of a replica on the tokens of a split, for evaluations in training and for `stretto evaluate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property

from stretto.errors import StrettoError
from stretto.run.data.dataset import WholeDocuments, WholeSplit
from stretto.run.launch.stop import StopRequest
from stretto.run.train.metrics import EvalRecord
from stretto.run.train.step import TrainingStep

Progress = Callable[[int, float, int], object]  # batches done, sum of their losses in nats, their tokens


class Evaluation:
    """Evaluations of one replica on the same samples: the whole split in its order, each token once, or its
    first global batches.

    The last batch is filled with empty samples, whose targets are ignored; the loss is a mean over the tokens
    that count. Losses of microbatches are sums over tokens in float32 (float64 for float64 models), which are
    added up in float64. So float32 results are bitwise equal under layouts that compute each microbatch alike
    (dp, pp, sharded states), and equal to rounding under those that split products or sequences (tp, cp, ep).

    Args:
        step: the replica's, whose batches and agreement are used; nothing is trained.
        limit: global batches; None: the whole split.
    """

    def __init__(
        self, step: TrainingStep, split: WholeSplit | WholeDocuments, limit: int | None = None
    ) -> None:
        self._step, self._split = step, split
        self._size = step.replica.job.global_batch
        whole = -(-len(split) // self._size)
        self.batches = whole if limit is None else min(limit, whole)
        self.memory_gib: float | None = None  # peak of the fullest rank

    @cached_property
    def text_bytes(self) -> int | None:
        """Bytes in UTF-8 of the text that is predicted; None where its tokenizer is not known, or only some
        of the tokens count.
        """
        targets = self._split.targets(self.batches * self._size)
        return None if targets is None else self._split.source.text_bytes(targets)

    def run(
        self, after: int, stop: StopRequest | None = None, progress: Progress | None = None
    ) -> EvalRecord | None:
        """Evaluate after so many updates; None where any rank was asked to stop. Collective.

        Raises:
            TrainingFailed: a loss is not finite, on all ranks.
        """
        started, pipeline = time.perf_counter(), self._step.replica.pipeline
        total, tokens = 0.0, 0
        for batch in range(self.batches):
            first = batch * self._size
            (inputs, targets), counts = self._step.batches.take(self._split, first, keyed=False)
            losses = pipeline.evaluate(inputs, targets)
            agreed = self._step.agree(losses, f"evaluation after step {after}", stop)
            if agreed.stop:
                return None
            self.memory_gib = agreed.memory_gib
            total += agreed.loss
            tokens += int(sum(counts))
            if progress is not None:
                progress(batch + 1, total, tokens)
        if not tokens:
            raise StrettoError(
                f"the samples of the {self._split.split} split have no token that the loss counts",
                hint="raise eval.batches, or give the split a larger share of data.split",
            )
        return EvalRecord(
            step=after,
            loss=total / tokens,
            tokens=tokens,
            seconds=time.perf_counter() - started,
            split=self._split.split,
        )
