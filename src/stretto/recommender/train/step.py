"""The training step of one rank of a recommender, for a run and for `stretto verify` alike: read the samples,
set the learning rates, step, agree on the loss.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist

from stretto.engine.checkpoint.background import BackgroundSave
from stretto.engine.device import on_accelerator, peak_memory
from stretto.engine.optim.rate import LearningRate
from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.memory_check import MemoryCheck
from stretto.engine.progress import PROGRESS, label
from stretto.recommender.clicks.batch import ClickBatch, ClickSource
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.train.clicks import rank_slice
from stretto.recommender.train.engine import SUMMED, Recommender, StepResult
from stretto.run.config.schema import GuardConfig
from stretto.run.launch.stop import StopRequest
from stretto.run.train.guard import BadStep, Guard
from stretto.run.train.loop import StepAgreement, StepReport, agree
from stretto.run.watch.slow import BUSY

_LOADING, _COMPUTING = label("loading data"), label("forward, backward and update")
_AGREEING = label("agreement on the step")


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A step that was made.

    Attributes:
        agreed: the loss of the global batch and what else all ranks agree on.
        norm: of all gradients; None where it is not computed.
        ratio: of the learning rates to their peaks.
        bad: why the update was not applied, where `guard` passes over such a step.
    """

    agreed: StepAgreement
    norm: float | None
    ratio: float
    bad: BadStep | None = None


class TrainingStep:
    """Steps on the samples of a source, of which each rank reads its share.

    Args:
        device: where reports of ranks are summed.
        guard: what becomes of bad steps; by default they raise.
        memory: looks for weights and states that change between two updates.

    Attributes:
        reader: reads the batch after the next one meanwhile; None: samples are read when they are used.
    """

    def __init__(
        self,
        config: RecommenderConfig,
        recommender: Recommender,
        source: ClickSource,
        device: torch.device,
        guard: Guard | None = None,
        memory: MemoryCheck | None = None,
    ) -> None:
        self._memory = memory or MemoryCheck()
        self._guard = guard or Guard(GuardConfig(), [])
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.reader: ThreadPoolExecutor | None = None
        self._recommender = recommender
        self.source = source
        self._device = device
        self._size, self._steps = config.batch.global_size, config.train.steps
        self._world, self._part = world, rank_slice(self._size, rank, world)
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
            seen: samples before it.
            stop: whether this rank was asked to stop.
            saving: what this rank saves in the background.

        Raises:
            TrainingFailed: a loss or a gradient is not finite, on all ranks, and the guard stops there.
        """
        PROGRESS.mark(_LOADING)
        batch = self._batch(seen)
        following = None if step + 1 == self._steps else self._batch(seen + self._size)
        ratio = self._rate(step)
        self._recommender.factor = ratio
        PROGRESS.mark(_COMPUTING)
        made: TrainedStep | None = None

        def permit(result: StepResult) -> bool:
            nonlocal made
            agreed = self._agreed(result, stop, saving)
            bad = self._judged(agreed, result, step, seen)
            made = TrainedStep(agreed=agreed, norm=result.norm, ratio=ratio, bad=bad)
            return bad is None

        self._recommender.step(batch, following, permit)
        assert made is not None, "every step asks"
        return made

    def _agreed(
        self, result: StepResult, stop: StopRequest | None, saving: BackgroundSave | None
    ) -> StepAgreement:
        """What all ranks report of a step. Collective."""
        total, finite = float(result.loss_sum), bool(result.loss_sum.isfinite())
        report = StepReport(
            loss=total if finite else 0.0,
            bad_microbatch=0.0 if finite else 1.0,
            overflow=result.bad_gradient is not None,
            memory_changed=self._memory.changed(self._device),
            stop=stop is not None and stop.signal is not None,
            memory_gib=peak_memory(self._device),
            busy_s=0.0 if on_accelerator(self._device) else BUSY.report(),
            written=saving is not None and saving.written,
            write_failed=saving is not None and saving.failed,
        )
        PROGRESS.mark(_AGREEING)
        return agree(report, self._device)

    def _judged(self, agreed: StepAgreement, result: StepResult, step: int, seen: int) -> BadStep | None:
        """Why the update of a step is not to be applied; None: it is. Collective, and the same on every rank.

        Raises:
            TrainingFailed: the guard stops here.
        """
        whole = range(seen, seen + self._size)
        suspects = [whole]
        spike, reason = False, None
        if agreed.memory_changed:
            named = gather_json(self._memory.first())
            place = next((f"{name} on rank {rank}" for rank, name in enumerate(named) if name), None)
            return self._guard.changed(step, place, seen)
        if agreed.bad_microbatches:
            parts = [rank_slice(self._size, rank, self._world) for rank in agreed.bad_microbatches]
            suspects = [range(seen + first, seen + end) for first, end in parts]
            reason = f"the loss on rank {next(iter(agreed.bad_microbatches))} is not finite"
        elif agreed.overflow or not (result.norm is None or isfinite(result.norm)):
            named = gather_json(result.bad_gradient)
            bad = [(rank, name) for rank, name in enumerate(named) if name]
            bad.sort(key=lambda one: one[1].endswith(SUMMED))  # where it arose, if a rank knows
            first = f"{bad[0][1]}, on rank {bad[0][0]}" if bad else "on no rank"
            reason = f"a gradient is not finite, first that {first}"
        else:
            reason = self._guard.spike(agreed.loss, result.norm)
            spike = reason is not None
            if reason is None:
                self._guard.good(step + 1, agreed.loss, result.norm)
        if reason is None:
            return None
        return self._guard.refuse(step + 1, reason, spike=spike, samples=whole, suspects=suspects)

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


def rate_of(config: RecommenderConfig) -> LearningRate:
    """The schedule of both learning rates, with a peak of 1."""
    return LearningRate(config.optim.rate, 1.0, config.train.steps)
