"""The training step of one rank of a recommender, for a run and for `stretto verify` alike: read the samples,
set the learning rates, step, agree on the loss.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stretto.engine.checkpoint.background import BackgroundSave
from stretto.engine.device import peak_memory
from stretto.engine.optim.rate import Rate
from stretto.recommender.clicks.batch import ClickBatch, ClickSource
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.train.clicks import rank_slice
from stretto.recommender.train.engine import Recommender
from stretto.run.launch.stop import StopRequest
from stretto.run.train.loop import StepAgreement, StepReport, agree


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A step that was made.

    Attributes:
        agreed: the loss of the global batch and what else all ranks agree on.
        norm: of all gradients; None where it is not computed.
        ratio: of the learning rates to their peaks.
    """

    agreed: StepAgreement
    norm: float | None
    ratio: float


class TrainingStep:
    """Steps on the samples of a source, of which each rank reads its share.

    Args:
        device: where reports of ranks are summed.

    Attributes:
        reader: reads the batch after the next one meanwhile; None: samples are read when they are used.
    """

    def __init__(
        self, config: RecommenderConfig, recommender: Recommender, source: ClickSource, device: torch.device
    ) -> None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.reader: ThreadPoolExecutor | None = None
        self._recommender = recommender
        self.source = source
        self._device = device
        self._size, self._steps = config.batch.global_size, config.train.steps
        self._part = rank_slice(self._size, rank, world)
        self._rate = rate_of(config)
        self._last: tuple[int, ClickBatch] | None = None
        self._coming: tuple[int, Future[ClickBatch]] | None = None

    @property
    def epoch(self) -> int:
        """Samples in an epoch."""
        return len(self.source)

    def run(
        self,
        step: int,
        seen: int,
        stop: StopRequest | None = None,
        saving: BackgroundSave | None = None,
    ) -> TrainedStep:
        """Train on one global batch. Collective.

        Args:
            step: number of the step, from 0.
            seen: samples trained on before it.
            stop: whether this rank was asked to stop.
            saving: what this rank saves in the background.
        """
        batch = self._batch(seen)
        following = None if step + 1 == self._steps else self._batch(seen + self._size)
        ratio = self._rate(step)
        self._recommender.factor = ratio
        result = self._recommender.step(batch, following)
        total, finite = float(result.loss_sum), bool(result.loss_sum.isfinite())
        report = StepReport(
            loss=total if finite else 0.0,
            bad_microbatch=0.0 if finite else 1.0,
            stop=stop is not None and stop.signal is not None,
            memory_gib=peak_memory(self._device),
            written=saving is not None and saving.written,
            write_failed=saving is not None and saving.failed,
        )
        return TrainedStep(agreed=agree(report, self._device), norm=result.norm, ratio=ratio)

    def _batch(self, first: int) -> ClickBatch:
        """This rank's samples of the global batch that starts at sample `first`. A step asks for the batch
        after it too, and the next step gets that very object, whose lookups have begun.
        """
        if self._last is None or self._last[0] != first:
            self._last = first, self._read(first)
        return self._last[1]

    def _read(self, first: int) -> ClickBatch:
        """Read a batch, and start to read the one after it where there is a reader."""
        coming, self._coming = self._coming, None
        batch = coming[1].result() if coming is not None and coming[0] == first else self._take(first)
        if self.reader is not None:
            after = first + self._size
            self._coming = after, self.reader.submit(self._take, after)
        return batch

    def _take(self, first: int) -> ClickBatch:
        return self.source.batch(first, self._size, self._part)


def rate_of(config: RecommenderConfig) -> Rate:
    """The schedule of both learning rates, with a peak of 1."""
    return Rate(config.optim.rate.settings(), 1.0, config.train.steps)
