"""Quality of a recommender on held-out samples, and the best possible quality if that is known."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.device import carrier
from stretto.errors import StrettoError
from stretto.recommender.clicks.folder import ClickSamples
from stretto.recommender.clicks.ranking import DISTINCT, Ranking
from stretto.recommender.clicks.synthetic.log import SyntheticClicks
from stretto.recommender.clicks.synthetic.truth import BayesOptimal, BayesOptimalTally
from stretto.recommender.train.clicks import ClickData, rank_slice
from stretto.recommender.train.engine import Recommender
from stretto.recommender.train.report import ClickEval

_SUMS = 5  # samples, clicks, NaN logits, loss, predicted clicks


@dataclass(frozen=True, kw_only=True)
class QualityResult:
    """The quality of predictions on a set of samples.

    Attributes:
        auc: area under the ROC curve of the logits, equal ones counting half; 0.5 is chance. None if all
            samples have one label, or a logit is NaN.
        auc_error: bound on the error of `auc`: 0 unless there are more distinct logits than can be counted.
        logloss: mean of -log(probability of what happened), in nats. NaN if a logit is.
        entropy: logloss over that of predicting the click rate for every sample (normalised entropy: He
            et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", section 2); 1 is what
            one constant reaches, 0 perfect. None if all samples have one label.
        calibration: predicted clicks over clicks, 1 is right (same source). None without clicks.
        samples, positives: their number, and how many were clicked.
    """

    auc: float | None
    auc_error: float
    logloss: float
    entropy: float | None
    calibration: float | None
    samples: int
    positives: int

    def as_dict(self) -> dict[str, float | int | None]:
        """Return all fields by name, for JSON."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


class Quality:
    """Accumulates logits and labels batch by batch; `result` covers all of them on all ranks.

    Sums are in float64. Memory is bounded by `distinct` distinct logits on each rank, 24 bytes each, and
    twice that while counts are merged: see `Ranking`.
    """

    def __init__(self, distinct: int = DISTINCT) -> None:
        self._ranking = Ranking(distinct)
        self._sums = np.zeros(_SUMS)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add samples: their logits [n] and labels [n], 0 or 1, on any device and in any floating type.

        Raises:
            StrettoError: sizes differ, or a label is neither 0 nor 1.
        """
        if logits.shape != labels.shape or logits.ndim != 1:
            raise StrettoError(
                f"logits of shape {list(logits.shape)} and labels of shape {list(labels.shape)}",
                hint="one logit and one label a sample: both [samples]",
            )
        values = logits.detach().to("cpu", torch.float64).numpy()
        marks = labels.detach().to("cpu", torch.float64).numpy()
        clicked = marks == 1
        if not np.all(clicked | (marks == 0)):
            wrong = marks[~(clicked | (marks == 0))][0]
            raise StrettoError(f"a label is {wrong:g}", hint="labels are 0 or 1")
        valid = ~np.isnan(values)
        lost = len(values) - int(valid.sum())
        values, clicked = values[valid], clicked[valid]
        loss = np.logaddexp(0.0, np.where(clicked, -values, values)).sum()
        probabilities = np.exp(-np.logaddexp(0.0, -values)).sum()
        self._sums += (len(valid), clicked.sum(), lost, loss, probabilities)
        self._ranking.add(values, clicked)

    def result(self, group: dist.ProcessGroup | None = None) -> QualityResult:
        """Return the quality on the samples of all ranks of `group`, by default all ranks of the job, or this
        process alone. Collective; every rank gets the same result, and may add more samples later.
        """
        ranking, sums = Ranking(self._ranking.distinct), self._sums.copy()
        ranking.merge(*self._ranking.state())
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            area = _merge_ranks(ranking, sums, group)
        else:
            area = _area(ranking)
        return _result(area, sums)


def _area(ranking: Ranking) -> np.ndarray:
    value, error = ranking.area()
    return np.array((math.nan if value is None else value, error))


def _result(area: np.ndarray, sums: np.ndarray) -> QualityResult:
    samples, clicks, lost = (int(value) for value in sums[:3])
    loss, predicted = (float(value) for value in sums[3:])
    logloss = loss / samples if samples and not lost else math.nan
    base = 0.0
    if 0 < clicks < samples:
        rate = clicks / samples
        base = -rate * math.log(rate) - (1 - rate) * math.log1p(-rate)
    auc = float(area[0])
    return QualityResult(
        auc=None if math.isnan(auc) or lost else auc,
        auc_error=float(area[1]),
        logloss=logloss,
        entropy=logloss / base if base else None,
        calibration=predicted / clicks if clicks else None,
        samples=samples,
        positives=clicks,
    )


def _merge_ranks(ranking: Ranking, sums: np.ndarray, group: dist.ProcessGroup | None) -> np.ndarray:
    """Merge the counts of all ranks in a binary tree and broadcast the area and the sums. No rank holds
    more than two rankings at a time.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    device = carrier(group)
    step = 1
    while step < world:
        if rank % (2 * step) == step:
            _send(ranking, sums, rank - step, group, device)
            break
        if rank + step < world:
            sums += _receive(ranking, rank + step, group, device)
        step *= 2
    merged = torch.from_numpy(np.concatenate((_area(ranking), sums))).to(device)
    dist.broadcast(merged, group=group, group_src=0)
    values = merged.cpu().numpy()
    sums[:] = values[2:]
    return values[:2]


def _send(
    ranking: Ranking, sums: np.ndarray, to: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    dropped, keys, counts = ranking.state()
    head = torch.tensor((dropped, len(keys)), device=device)
    body = torch.from_numpy(np.concatenate((keys, counts.reshape(-1)))).to(device)
    for tensor in (head, body, torch.from_numpy(sums).to(device)):
        if tensor.numel():
            dist.send(tensor, group=group, group_dst=to)


def _receive(
    ranking: Ranking, source: int, group: dist.ProcessGroup | None, device: torch.device
) -> np.ndarray:
    """Merge the counts of rank `source` into `ranking`, and return its sums."""

    def receive(size: int, dtype: torch.dtype) -> np.ndarray:
        tensor = torch.empty(size, dtype=dtype, device=device)
        if size:
            dist.recv(tensor, group=group, group_src=source)
        return tensor.cpu().numpy()

    dropped, count = (int(value) for value in receive(2, torch.int64))
    body = receive(3 * count, torch.int64)
    ranking.merge(dropped, body[:count], body[count:].reshape(2, count))
    return receive(_SUMS, torch.float64)


_DRAWN_AT_ONCE = 1 << 14  # samples


class ClickEvaluation:
    """Evaluations of a model on the same samples: a split in the log's order, or its first global batches.

    Args:
        batch: samples of a global batch.
        limit: global batches, or None for the whole split.
    """

    def __init__(
        self,
        data: ClickData,
        recommender: Recommender,
        *,
        batch: int,
        split: str = "valid",
        limit: int | None = None,
    ) -> None:
        self._recommender, self._batch = recommender, batch
        self._source = data.open(split, shuffle=False)
        self._split = split
        size = len(self._source)
        self._samples = size if limit is None else min(size, limit * batch)
        self._rank, self._world = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        self._best: BayesOptimal | None = None

    @property
    def batches(self) -> int:
        """Global batches of an evaluation."""
        return -(-self._samples // self._batch)

    def run(self, step: int, progress: Callable[[int, int], object] | None = None) -> ClickEval:
        """Evaluate after `step` updates. Collective; every rank gets the result.

        Args:
            progress: called with the batches and the samples that are done.
        """
        started = time.perf_counter()
        size, quality = self._batch, Quality()
        for first in range(0, self._samples, size):
            count = min(size, self._samples - first)
            batch = self._source.batch(first, count, rank_slice(count, self._rank, self._world))
            quality.add(self._recommender.predict(batch), batch.labels)
            if progress is not None:
                progress(first // size + 1, first + count)
        measured, best = quality.result(), self._best_possible()
        return ClickEval(
            step=step,
            auc=measured.auc,
            logloss=measured.logloss,
            entropy=measured.entropy,
            calibration=measured.calibration,
            samples=measured.samples,
            positives=measured.positives,
            seconds=time.perf_counter() - started,
            split=self._split,
            auc_error=measured.auc_error,
            best_auc=best.auc if best is not None else None,
            best_logloss=best.logloss if best is not None else None,
            best_entropy=best.entropy if best is not None else None,
        )

    def _best_possible(self) -> BayesOptimal | None:
        """Return the best possible quality on these samples; on rank 0, which reports it."""
        source = self._source
        if self._split != "valid" or self._rank != 0 or self._best is not None:
            return self._best
        if isinstance(source, SyntheticClicks):  # their true probabilities are recomputed
            tally = BayesOptimalTally()
            for first in range(0, self._samples, _DRAWN_AT_ONCE):
                clicks = source.clicks(first, min(_DRAWN_AT_ONCE, self._samples - first))
                tally.add(clicks.logits, clicks.labels)
            self._best = tally.result()
        elif isinstance(source, ClickSamples):  # if synthetic, its index has it for the whole split
            record: dict[str, Any] = source.folder.index.extra.get("best", {}).get("valid") or {}
            if record.get("samples") == self._samples == len(source):
                self._best = BayesOptimal(**record)
        return self._best
