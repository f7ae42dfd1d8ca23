"""The loss of a replica on the tokens of a split, for evaluations in training and for `stretto evaluate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from stretto.engine.device import peak_memory
from stretto.engine.progress import PROGRESS, label
from stretto.errors import StrettoError
from stretto.run.data.mixture import HeldOut
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.stop import StopRequest
from stretto.run.train.agreement import StepAgreement, agree, describe_bad_loss
from stretto.run.train.batches import Batches, read_ahead
from stretto.run.train.metrics import EvalRecord
from stretto.run.train.rank_model import RankModel

_AGREEING = label("agreement on the step")
Progress = Callable[[int, float, int], object]  # batches done; of the source: summed losses in nats, tokens


class Evaluation:
    """Evaluations of one replica on the same samples: the whole split in its order, each token once, or its
    first global batches. Of a mixture the loss is the mean over its sources by their weights.

    The last batch of a source is filled with empty samples, whose targets are ignored; the loss is a mean
    over the tokens that count. Losses of microbatches are sums over tokens in float32 (float64 for float64
    models), which are added up in float64. So float32 results are bitwise equal under layouts that compute
    each microbatch alike (dp, pp, sharded states), and equal to rounding under those that split products or
    sequences (tp, cp, ep).

    Args:
        batches: loads the microbatches of the model's ranks.
        parts: the split of each source.
        limit: global batches, of which each source of a mixture has its share and at least one, or None for
            the whole split.
    """

    def __init__(
        self, model: RankModel, batches: Batches, parts: Sequence[HeldOut], limit: int | None = None
    ) -> None:
        self._model, self._loader = model, batches
        self._size = model.job.global_batch
        self._parts = list[tuple[HeldOut, int]]()  # with the number of global batches
        for part in parts:
            count = -(-len(part.split) // self._size)
            if limit is not None:
                count = min(max(1, round(limit * part.weight)), count)
            self._parts.append((part, count))
        self._read_ahead = {part.name: read_ahead(part.split, model) for part in parts}
        self.batches = sum(batches for _, batches in self._parts)
        self.memory_gib: float | None = None  # peak of the fullest rank

    @cached_property
    def text_bytes(self) -> int | None:
        """Bytes in UTF-8 of the text that is predicted, or None if its tokenizer is unknown, only some of the
        tokens count, or the loss is a mean over sources.
        """
        if len(self._parts) > 1:
            return None
        ((part, batches),) = self._parts
        targets = part.split.targets(batches * self._size)
        return None if targets is None else part.split.source.text_bytes(targets)

    def run(
        self, after: int, stop: StopRequest | None = None, progress: Progress | None = None
    ) -> EvalRecord | None:
        """Evaluate after `after` updates; return None if any rank was asked to stop. Collective.

        Raises:
            TrainingFailed: a loss is not finite, on all ranks.
        """
        started, losses = time.perf_counter(), dict[str, float]()
        done = evaluated = 0
        for part, batches in self._parts:
            total, tokens = 0.0, 0
            for batch in range(batches):
                agreed, count = self._batch(part, batch * self._size, after, stop)
                if agreed.stop:
                    return None
                self.memory_gib = agreed.memory_gib
                total += agreed.loss
                tokens += count
                done += 1
                if progress is not None:
                    progress(done, total, tokens)
            if not tokens:
                raise StrettoError(
                    f"the samples of the {part.split.split} split of {part.name} have no token that the loss "
                    "counts",
                    hint="raise eval.batches, or give the split a larger share of data.split",
                )
            losses[part.name] = total / tokens
            evaluated += tokens
        return EvalRecord(
            step=after,
            loss=sum(part.weight * losses[part.name] for part, _ in self._parts),
            tokens=evaluated,
            seconds=time.perf_counter() - started,
            split=self._parts[0][0].split.split,
            sources=losses if len(losses) > 1 else None,
        )

    def _batch(
        self, part: HeldOut, first: int, after: int, stop: StopRequest | None
    ) -> tuple[StepAgreement, int]:
        """Return the agreement on one global batch, with its summed loss, and its tokens."""
        (inputs, targets), counts = self._loader.take(self._read_ahead[part.name], first, keyed=False)
        losses, device = self._model.pipeline.evaluate(inputs, targets), self._model.mesh.device
        report = replace(
            self._model.loss_report(losses),
            stop=stop is not None and stop.signal is not None,
            memory_gib=peak_memory(device),
        )
        PROGRESS.mark(_AGREEING)
        agreed = agree(report, device, {"targets": counts.sum()[None]})
        if agreed.bad_microbatches:
            raise TrainingFailed(f"evaluation after step {after}: {describe_bad_loss(agreed)}")
        return agreed, int(agreed.statistic("targets") or 0)
