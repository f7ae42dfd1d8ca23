"""Training a recommender: what `Trainer` asks of its task, on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.checkpoint.folder import is_checkpoint
from stretto.engine.checkpoint.index import MODEL, OPTIM
from stretto.engine.checkpoint.load import load
from stretto.engine.checkpoint.shards import Tensors
from stretto.engine.optim.rate import LearningRate
from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.engine.parallel.replica_check import RankTensors
from stretto.engine.pipeline import Recorder
from stretto.engine.progress import PROGRESS, label
from stretto.recommender.checkpoint.load import load_tables
from stretto.recommender.checkpoint.names import TABLES
from stretto.recommender.checkpoint.save import tensors_to_save
from stretto.recommender.clicks.batch import ClickBatch, ClickSource
from stretto.recommender.placement import Placements, physical_tables
from stretto.recommender.stores.store import DeviceStore
from stretto.recommender.train.clicks import ClickData, rank_slice
from stretto.recommender.train.engine import SUMMED, Recommender
from stretto.recommender.train.evaluate import ClickEvaluation
from stretto.recommender.train.placement import to_json
from stretto.recommender.train.report import ClickEval, ClickStep
from stretto.recommender.train.resume import changed_clicks, check_fits, model_record
from stretto.run.train import trace
from stretto.run.train.agreement import StepAgreement, StepReport
from stretto.run.train.checkpointing import common_meta, log_resumed, restored_progress
from stretto.run.train.resume import checkpoint_path
from stretto.run.train.task import CheckpointContent, Fault, Log, StepResult, TrainProgress

T = TypeVar("T")
_COMPUTING = label("forward and backward")
_WINDOW = 50  # steps of the median speed


@dataclass(kw_only=True)
class ClickProgress(TrainProgress):
    """How far a recommender's run is."""

    skipped_steps: int = 0  # steps without an update


class RecommenderTask:
    """Steps of one rank of a recommender on the samples of a source; a `Task`.

    Args:
        device: where reports of ranks are summed.

    Attributes:
        reader: reads the batch after the next one meanwhile; None to read samples when they are used.
    """

    def __init__(self, recommender: Recommender, source: ClickSource, device: torch.device) -> None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.config, self.recommender = recommender.config, recommender
        config = recommender.config
        self.source, self.device = source, device
        self.global_batch = config.batch.global_size
        self.peer_ranks: Sequence[Sequence[int]] = [[other] for other in range(world)]
        self.log: Log = lambda _: None
        self.recorder: Recorder | None = None
        self.reader: ThreadPoolExecutor | None = None
        self._world, self._slice = world, rank_slice(self.global_batch, rank, world)
        self._rate = LearningRate(config.optim.rate, 1.0, config.train.steps)
        self._norm: float | None = None
        self._speeds = deque[float](maxlen=_WINDOW)
        self._last: tuple[int, ClickBatch] | None = None
        self._coming: tuple[int, Future[ClickBatch]] | None = None

    def timed(self, label: str, call: Callable[[], T]) -> T:
        """Make a call, and mark it in a profile; steps of recommenders are not traced."""
        return call() if self.recorder is None else self.recorder.timed(label, call)

    def batch(self, step: int, samples: int) -> tuple[ClickBatch, ClickBatch | None]:
        """This rank's samples of the step and, unless it is the last, of the next one; see `Task.batch`."""
        epoch = len(self.source)
        if samples <= epoch < samples + self.global_batch:
            self.log(
                f"warning: step {step + 1} begins a second epoch of {epoch:,} training samples: the training "
                "loss is now of samples seen before. Click models overfit from here on (the one-epoch "
                "phenomenon, Zhang et al. 2022): trust the held-out logloss (eval.every)"
            )
        last = step + 1 == self.config.train.steps
        starts = [samples] if last else [samples, samples + self.global_batch]
        batch, *following = self.timed(trace.BATCH, lambda: [self._read(start) for start in starts])
        return batch, following[0] if following else None

    def _read(self, first: int) -> ClickBatch:
        """This rank's samples of the global batch that starts at sample `first`. A step asks for the batch
        after it too, and the next step gets that very object, whose lookups have begun.
        """
        if self._last is not None and self._last[0] == first:
            return self._last[1]

        def read(first: int) -> ClickBatch:
            return self.source.batch(first, self.global_batch, self._slice)

        coming, self._coming = self._coming, None
        batch = coming[1].result() if coming is not None and coming[0] == first else read(first)
        if self.reader is not None:
            following = first + self.global_batch
            self._coming = following, self.reader.submit(read, following)
        self._last = first, batch
        return batch

    def forward_backward(self, batch: tuple[ClickBatch, ClickBatch | None], step: int) -> StepReport:
        """Look up, compute and reduce; see `Task.forward_backward`."""
        PROGRESS.mark(_COMPUTING)
        loss = self.recommender.forward_backward(*batch)
        self._norm = self.recommender.gradient_norm()
        unknown = self._norm is None or not isfinite(self._norm)
        return StepReport(
            loss=torch.where(loss.isfinite(), loss, 0.0),
            bad_microbatch=~loss.isfinite(),
            overflow=~self.recommender.finite_gradients() if unknown else False,
        )

    def statistics(self) -> dict[str, Tensor]:
        """The `norm`, if it is computed; see `Task.statistics`."""
        return {} if self._norm is None else {"norm": torch.tensor([self._norm], dtype=torch.float64)}

    def fault(self, agreed: StepAgreement, norm: float | None, samples: range) -> Fault | None:
        """See `Task.fault`."""
        if agreed.bad_microbatches:
            slices = [rank_slice(self.global_batch, rank, self._world) for rank in agreed.bad_microbatches]
            suspects = [range(samples.start + first, samples.start + end) for first, end in slices]
            return Fault(f"the loss on rank {next(iter(agreed.bad_microbatches))} is not finite", suspects)
        if not agreed.overflow and (norm is None or isfinite(norm)):
            return None
        names = [(rank, n) for rank, n in enumerate(gather_json(self.recommender.bad_gradient())) if n]
        names.sort(key=lambda entry: entry[1].endswith(SUMMED))  # where it arose, if a rank knows
        first = f"{names[0][1]}, on rank {names[0][0]}" if names else "on no rank"
        return Fault(f"a gradient is not finite, first that {first}", [samples])

    def update(self, step: int, norm: float | None, apply: bool) -> None:
        """Clip and apply the gradients, or drop them; see `Task.update`."""
        self.timed(trace.UPDATE, lambda: self.recommender.update(self._rate(step), norm, apply))

    def record(
        self, result: StepResult, progress: TrainProgress, seconds: float, slow: dict[str, float] | None
    ) -> ClickStep:
        """Count a step; see `Task.record`."""
        assert isinstance(progress, ClickProgress)
        progress.skipped_steps += result.bad is not None
        self._speeds.append(self.global_batch / seconds)
        optim, factor = self.config.optim, self._rate(result.step - 1)
        return ClickStep(
            step=result.step,
            loss=result.loss,
            grad_norm=result.norm,
            lr=optim.dense.lr * factor,
            lr_tables=optim.tables.lr * factor,
            samples=result.samples,
            epoch=result.samples / len(self.source),
            samples_per_s=self._speeds[-1],
            step_time_s=seconds,
            memory_gib=result.agreed.memory_gib,
            bad=None if result.bad is None else result.bad.reason,
            slow=slow,
        )

    def tensors(self, purpose: Literal["replicas", "memory"]) -> RankTensors:
        """The dense networks, which every rank has, and tables on the device: those that every rank copies,
        or for `memory` this rank's own too, but none with `ids: hash`, which new ids extend at any time. A
        cache has other rows on each rank, and is left out. See `Task.tensors`.
        """
        tensors = dict[str, tuple[Tensor, ShardPlacement]]()
        for key, name, tensor, placed in self.recommender.dense.tensors():
            tensors[f"{key or 'weights'}.{name}"] = tensor, placed
        tables = self.recommender.tables
        pools = (
            tables.replicated_pools if purpose == "replicas" else (*tables.replicated_pools, *tables.pools)
        )
        for number, pool in enumerate(pools):
            if not isinstance(pool.store, DeviceStore) or (purpose == "memory" and pool.ids is not None):
                continue
            names = "+".join(tables.shard_map.tables[shard.table].name for shard in pool.pool.shards)
            for state, tensor in {"weights": pool.store.weight, **pool.store.states}.items():
                name = f"{state} of tables {names}"
                name = name if purpose == "replicas" else f"{state} of pool {number}, tables {names}"
                tensors[name] = tensor, ShardPlacement.unsharded(name, tuple(tensor.shape))
        return tensors

    def bad_weight(self) -> str | None:
        """The first weight of the dense networks that is not finite; see `Task.bad_weight`."""
        weights = self.recommender.net.named_parameters()
        bad = (name for name, weight in weights if not bool(weight.detach().isfinite().all()))
        name = next(bad, None)
        return None if name is None else f"{name} on all ranks"

    def details(self) -> dict[str, Any]:
        """The median speed in samples per second, or None before the first step."""
        return {"samples_per_s": median(self._speeds) if self._speeds else None}


class ClickRun(RecommenderTask):
    """A recommender's run: steps on the clicks of a config, evaluations, and checkpoints.

    Args:
        placements: of the stored tables.
    """

    def __init__(
        self, recommender: Recommender, data: ClickData, placements: Placements, device: torch.device
    ) -> None:
        super().__init__(recommender, data.open("train"), device)
        self._data, self._placements = data, placements
        # synthetic clicks need no prefetching: computing them would only compete with the step for its core
        self.reader = None if data.path is None else ThreadPoolExecutor(1)
        self._quality: ClickEval | None = None
        self._evaluation: ClickEvaluation | None = None
        if self.config.eval.every:
            self._evaluation = ClickEvaluation(
                data, recommender, batch=self.global_batch, limit=self.config.eval.batches
            )

    def evaluate(self, step: int) -> tuple[float, ClickEval]:
        """The logloss on the first `eval.batches` global batches of the held-out samples; see
        `Task.evaluate`.
        """
        assert self._evaluation is not None
        self._quality = self._evaluation.run(step)
        return self._quality.logloss, self._quality

    def checkpoint(self, progress: TrainProgress) -> CheckpointContent:
        """See `Task.checkpoint`."""
        assert isinstance(progress, ClickProgress)
        config, data = self.config, self._data
        meta = {
            **common_meta(progress, config.train.seed),
            "passed_over": progress.skipped_steps,
            "model": model_record(config.shape(data.tables), data.tables),
            "layout": f"ranks={config.layout.ranks}",
            "placement": to_json(self._placements),
            "clicks": data.identity,
        }
        stored = physical_tables(self.recommender.tables.features)
        tensors = {
            **_dense_tensors(self.recommender),
            **tensors_to_save(self.recommender.local_shards, stored),
        }
        return CheckpointContent(tensors=tensors, meta=meta)

    def restore(self, path: Path, check: bool | None = None) -> ClickProgress:
        """See `Task.restore`. Takes checkpoints of any number of ranks and any placement."""
        config, data = self.config, self._data
        self.recommender.forget_next()
        meta = check_fits(path, config.shape(data.tables), data.tables, config.optim)
        # `latest` has verified every byte; a checkpoint named in the config is verified here
        if check is None:
            check = is_checkpoint(checkpoint_path(config.checkpoint.resume, config.run.folder))
        skipped_steps = meta.get("passed_over", 0)
        load_into(self.recommender, path, meta["step"], check=check, skipped_steps=skipped_steps)
        changed = changed_clicks(meta.get("clicks", {}), data.identity)
        log_resumed(path, meta, config.train.seed, self.log, changed)
        progress = restored_progress(meta, config.batch.global_size)
        return ClickProgress(**progress, skipped_steps=skipped_steps)

    def details(self) -> dict[str, Any]:
        """Also the last evaluation of this session, or None, and the placement of each stored table."""
        return {
            **super().details(),
            "quality": None if self._quality is None else asdict(self._quality),
            "placement": to_json(self._placements),
        }

    def close(self) -> None:
        """Stop reading samples ahead."""
        if self.reader is not None:
            self.reader.shutdown()


def load_into(
    recommender: Recommender, path: Path, updates: int, check: bool, skipped_steps: int = 0
) -> None:
    """Load this rank from a checkpoint of `updates` steps. Collective.

    Args:
        check: read every byte first.
        skipped_steps: how many of the steps made no update.

    Raises:
        StrettoError: no checkpoint there, damaged, or of another model or optimiser.
    """
    recommender.dense.prepare(updates - skipped_steps)
    load(path, _dense_tensors(recommender), ignore=[TABLES], check=check)
    stored = physical_tables(recommender.tables.features)
    load_tables(path, recommender.local_shards, stored, check=False)
    recommender.updates = updates


def load_weights(recommender: Recommender, path: Path, updates: int) -> None:
    """Load this rank's weights from a checkpoint of `updates` updates, and no optimiser states. Collective.

    Raises:
        StrettoError: no checkpoint there, damaged, or of another model.
    """
    dense = {name: each for name, each in _dense_tensors(recommender).items() if name.startswith(MODEL)}
    load(path, dense, ignore=[TABLES, OPTIM])
    stored = physical_tables(recommender.tables.features)
    encode = recommender.rule.encode
    load_tables(path, recommender.local_shards, stored, states=False, encode=encode, check=False)
    recommender.updates = updates


def _dense_tensors(recommender: Recommender) -> Tensors:
    """The dense tensors, equal on every rank; the checkpoint divides their writing among the ranks."""
    return {
        (f"{OPTIM}{key}.{name}" if key else f"{MODEL}{name}"): (tensor, place)
        for key, name, tensor, place in recommender.dense.tensors()
    }
