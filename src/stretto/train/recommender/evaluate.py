"""How good a recommender is on samples that it has not seen, beside the best possible where that is known."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from stretto.config.recommender.schema import RecommenderConfig
from stretto.data.clicks.samples import ClickSamples
from stretto.data.clicks.synthetic import Best, SyntheticClicks
from stretto.data.clicks.synthetic_best import BestTally
from stretto.train.recommender.clicks import ClickData, open_clicks
from stretto.train.recommender.engine import Recommender
from stretto.train.recommender.part import own_part
from stretto.train.recommender.quality import Quality
from stretto.train.recommender.records import ClickEval

_AT_ONCE = 1 << 14  # samples whose true probabilities are drawn at a time


class Evaluation:
    """Of a run: always on the same samples, the first `eval.batches` global batches of the held-out part, or
    all of it where that is less.
    """

    def __init__(self, config: RecommenderConfig, data: ClickData, recommender: Recommender) -> None:
        self._config, self._recommender = config, recommender
        self._source = open_clicks(config, data, "valid")
        self._samples = min(len(self._source), config.eval.batches * config.batch.global_size)
        self._rank, self._world = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        self._best: Best | None = None

    def run(self, step: int) -> ClickEval:
        """After `step` updates. Collective: every rank has its part of each batch, and all get the result."""
        started, size, quality = time.perf_counter(), self._config.batch.global_size, Quality()
        for first in range(0, self._samples, size):
            count = min(size, self._samples - first)
            batch = self._source.batch(first, count, own_part(count, self._rank, self._world))
            quality.add(self._recommender.predict(batch), batch.labels)
        found, best = quality.result(), self._possible()
        return ClickEval(
            step,
            found.auc,
            found.logloss,
            found.entropy,
            found.calibration,
            found.samples,
            found.positives,
            time.perf_counter() - started,
            found.auc_error,
            *((best.auc, best.logloss, best.entropy) if best is not None else ()),
        )

    def _possible(self) -> Best | None:
        """What is possible on these samples; on the first rank, which reports."""
        if self._rank == 0 and self._best is None:
            self._best = self._drawn() if isinstance(self._source, SyntheticClicks) else self._told()
        return self._best

    def _drawn(self) -> Best:
        """Of synthetic clicks, of which the true probabilities are drawn again."""
        assert isinstance(self._source, SyntheticClicks)
        tally = BestTally()
        for first in range(0, self._samples, _AT_ONCE):
            clicks = self._source.clicks(first, min(_AT_ONCE, self._samples - first))
            tally.add(clicks.logits, clicks.labels)
        return tally.result()

    def _told(self) -> Best | None:
        """What a folder of synthetic clicks says of its held-out samples, if it is of just these."""
        if not isinstance(self._source, ClickSamples):
            return None
        facts: dict[str, Any] = self._source.folder.index.extra.get("best", {}).get("valid") or {}
        return Best(**facts) if facts.get("samples") == self._samples == len(self._source) else None
