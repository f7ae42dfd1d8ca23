"""The step loop of one rank of a recommender: samples, step, agree, report, evaluate, save."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.parallel.replica_check import RankTensors
from stretto.recommender.config.schema import RecommenderConfig
from stretto.recommender.placement import Placements
from stretto.recommender.train.clicks import ClickData, open_clicks
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.evaluate import Evaluation
from stretto.recommender.train.held import held_by, updated_by
from stretto.recommender.train.placement import to_json
from stretto.recommender.train.position import ClickPosition, resume_from, save_run
from stretto.recommender.train.report import ClickEval, ClickStep
from stretto.recommender.train.step import TrainingStep
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.stop import StopRequest
from stretto.run.train.loop import Outcome, Save, TrainingLoop
from stretto.run.train.metrics import Metrics
from stretto.run.watch.slow import BUSY

_WINDOW = 50  # steps of the median speed


@dataclass(frozen=True, kw_only=True)
class ClickOutcome(Outcome):
    """How a recommender's session ended."""

    samples_per_s: float | None  # median; None where this session has made no step
    quality: dict[str, Any] | None  # of the last evaluation in this session
    placement: dict[str, dict[str, Any]]  # of each stored table


class Session(TrainingLoop[RecommenderConfig, ClickPosition]):
    """One rank of a run.

    Args:
        recommender: this rank's model.
        position: where the run is.
        saved: the checkpoint that it has come from.
        metrics: on rank 0 only.
    """

    def __init__(
        self,
        config: RecommenderConfig,
        recommender: Recommender,
        data: ClickData,
        placements: Placements,
        position: ClickPosition,
        device: torch.device,
        saved: Path | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(config, position, saved, metrics)
        self.recommender = recommender
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._data = data
        self._placements = placements
        self._speeds = deque[float](maxlen=_WINDOW)
        clicks = open_clicks(config, data, "train")
        self._training = TrainingStep(
            config, recommender, clicks, device, guard=self.guard, memory=self._memory
        )
        self._evaluation = (
            Evaluation(config, data, recommender, limit=config.eval.batches) if config.eval.every else None
        )
        self._quality: ClickEval | None = None
        self._fullest: float | None = None

    def run(self, stop: StopRequest) -> ClickOutcome:
        """Train to the last step, or to the step at which a rank was asked to stop; then save."""
        # synthetic clicks need no prefetching: computing them would only compete with the step for its core
        with ThreadPoolExecutor(1) as pool:
            self._training.reader = pool if self._data.path is not None else None
            stopped = self.train(stop)
        return ClickOutcome(
            step=self.position.step,
            loss=self.position.loss,
            samples_per_s=median(self._speeds) if self._speeds else None,
            stopped=stopped,
            checkpoint=None if self.saved is None else str(self.saved),
            warning=self.trend.warning,
            quality=None if self._quality is None else asdict(self._quality),
            placement=to_json(self._placements),
        )

    def _step(self, stop: StopRequest) -> bool:
        """One global batch; returns whether any rank was asked to stop."""
        started = time.perf_counter()
        position = self.position
        size = self.config.batch.global_size
        self._warn_of_second_epoch(position.samples + size)
        BUSY.begin()
        trained = self._training.run(
            step=position.step, seen=position.samples, stop=stop, saving=self.background
        )
        BUSY.end()
        bad = trained.bad
        self._fullest, loss = trained.agreed.memory_gib, trained.agreed.loss
        position.step += 1
        position.samples += size
        if bad is None:
            position.loss = loss
        else:
            position.passed_over += 1
            loss = nan if trained.agreed.bad_microbatches else loss
        seconds = time.perf_counter() - started
        slow = self._slow_ranks(trained.agreed.busy_s, seconds)
        self._speeds.append(size / seconds)
        if self.metrics is not None:
            optim = self.config.optim
            record = ClickStep(
                step=position.step,
                loss=loss,
                grad_norm=trained.norm,
                lr=optim.dense.lr * trained.ratio,
                lr_tables=optim.tables.lr * trained.ratio,
                samples=position.samples,
                epoch=position.samples / self._training.epoch,
                samples_per_s=size / seconds,
                step_time_s=seconds,
                memory_gib=self._fullest,
                bad=None if bad is None else bad.reason,
                slow=slow,
            )
            self.metrics.step(record)
        self.advance_save(trained.agreed.save_ready)
        if bad is not None:
            self._pass_over(bad)
        return trained.agreed.stop

    def _warn_of_second_epoch(self, samples: int) -> None:
        """Warns once in a run: when a step is the first to take training samples that were seen before."""
        if self.position.samples <= self._training.epoch < samples:
            self.note(
                f"warning: step {self.position.step + 1} begins a second epoch of {self._training.epoch:,} "
                "training samples: the training loss is now of samples seen before. Click models overfit "
                "from here on (the one-epoch phenomenon, Zhang et al. 2022): trust the held-out logloss "
                "(eval.every)"
            )

    def evaluate(self) -> float:
        """Quality on the first `eval.batches` global batches of the held-out samples; returns the logloss."""
        assert self._evaluation is not None
        self._quality = self._evaluation.run(self.position.step)
        if self.metrics is not None:
            self.metrics.evaluation(self._quality)
        return self._quality.logloss

    def _held(self) -> RankTensors:
        return held_by(self.recommender)

    def _updated(self) -> Mapping[str, Tensor]:
        return updated_by(self.recommender)

    def _restore(self, path: Path) -> ClickPosition:
        self.recommender.forget_next()
        return resume_from(self.config, self.recommender, self._data, path, self.note, check=False)

    def _write_checkpoint(self, save: Save) -> Path:
        """Write a checkpoint of this step.

        Raises:
            TrainingFailed: weights that every rank has are not finite; then nothing is written.
        """
        for name, weights in self.recommender.net.named_parameters():
            if not bool(weights.detach().isfinite().all()):
                raise TrainingFailed(f"after step {self.position.step}: weights of {name} are not finite")
        return save_run(
            config=self.config,
            recommender=self.recommender,
            data=self._data,
            placements=self._placements,
            position=self.position,
            save=save,
        )
