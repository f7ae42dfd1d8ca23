"""The step loop of one rank: sample, step, agree, update, report, evaluate, save."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.checkpoint.folder import is_checkpoint
from stretto.checkpoint.load import latest, load
from stretto.checkpoint.save import save
from stretto.config.schema import TrainConfig
from stretto.data.dataset import Samples
from stretto.data.indexed import TokenFolder
from stretto.data.sampler import indices_after
from stretto.errors import StrettoError
from stretto.optim.build import build_rate
from stretto.parallel.collectives import all_sum
from stretto.train.assemble import Replica
from stretto.train.faults import TrainingFailed
from stretto.train.metrics import EvalRecord, Metrics, StepRecord
from stretto.train.speed import Speed
from stretto.train.state import prepare_optimizer, random_state, set_random_state, tensors_of
from stretto.train.stop import StopRequest

_RANK_RADIX = 1 << 24  # microbatches that a failure code has room for


@dataclass
class Position:
    """How far the run is; with the seed it says which samples come next."""

    step: int = 0  # updates made
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a session ended."""

    step: int
    loss: float
    tokens_per_s: float
    stopped: bool  # by a signal, before the last step
    checkpoint: str | None


class Session:
    """One rank of a run.

    Args:
        replica: this rank's model.
        folder: the token folder of the text.
        run_dir: where the run writes; the same on all ranks.
        metrics: on rank 0 only.
    """

    def __init__(
        self,
        config: TrainConfig,
        replica: Replica,
        folder: TokenFolder,
        run_dir: Path,
        metrics: Metrics | None,
    ) -> None:
        self.config, self.replica, self.run_dir, self.metrics = config, replica, run_dir, metrics
        self.mesh = replica.mesh
        self.position = Position()
        self._rate = build_rate(config)
        self._speed = Speed(config, replica)
        split, sequence, seed = config.data.split, config.data.sequence, config.train.seed
        self._samples = Samples(folder, "train", sequence, seed, ratio=split)
        self._held_out = (
            Samples(folder, "valid", sequence, seed, ratio=split, shuffle=False) if config.eval.every else None
        )
        self._tokenizer = folder.index.tokenizer
        self._saved: Path | None = None
        self._loss = float("nan")

    # ------------------------------------------------------------------ the run

    def run(self, stop: StopRequest) -> Outcome:
        """Train to the last step, or to the step at which a rank was asked to stop; then save."""
        steps = self.config.train.steps
        stopped = False
        while self.position.step < steps and not stopped:
            stopped = self._step(stop)
            self._after(self.position.step)
        if self._saved is None or self._saved.name != f"step-{self.position.step:08d}":
            self.save()
        stopped = stopped and self.position.step < steps
        return Outcome(self.position.step, self._loss, self._speed.median, stopped, str(self._saved))

    def _after(self, step: int) -> None:
        every, save_every = self.config.eval.every, self.config.checkpoint.every
        if every and (step % every == 0 or step == self.config.train.steps):
            self.evaluate()
        if save_every and step % save_every == 0:
            self.save()

    def _step(self, stop: StopRequest) -> bool:
        """One update; returns whether any rank was asked to stop."""
        started = time.perf_counter()
        inputs, targets = self._batch(self._samples, self.position.samples, keyed=True)
        tokens = self._count(targets)
        losses = self.replica.pipeline.step(inputs, targets, 1.0 / tokens)
        loss, asked = self._agree(losses, tokens, stop)
        rate = self._rate(self.position.step)
        norm = float(self.replica.update(rate))
        if norm != norm or norm == float("inf"):
            raise TrainingFailed(f"step {self.position.step + 1}: gradient norm is {norm}{self._bad_gradient()}")
        position = self.position
        position.step += 1
        position.samples += self.config.batch.global_size
        position.tokens += int(tokens)
        self._loss = loss
        seconds = time.perf_counter() - started
        record = self._speed.record(position.step, loss, norm, rate, position.tokens, int(tokens), seconds)
        if self.metrics is not None:
            self.metrics.step(record)
        return asked

    def _batch(self, samples: Samples, seen: int, keyed: bool) -> tuple[list[Tensor], list[Tensor]]:
        """This replica's microbatches of the global batch after `seen` samples, on the device."""
        m, size = self.config.microbatches, self.config.batch.micro_size
        dp, d = self.mesh.size("dp"), self.mesh.index("dp")
        indices = [indices_after(seen, j, d, dp, size, m) for j in range(m)]
        if keyed:
            self.replica.samples[:] = indices
        pairs = [samples.batch(i) for i in indices]
        device = self.mesh.device
        return [x.to(device, non_blocking=True) for x, _ in pairs], [y.to(device) for _, y in pairs]

    def _count(self, targets: list[Tensor]) -> float:
        """Tokens of the global batch that count; every rank of a replica has the targets."""
        count = torch.stack([(t != -100).sum() for t in targets]).sum().double()
        return float(all_sum(count, self.mesh.group("dp")))

    def _agree(self, losses: Tensor | None, tokens: float, stop: StopRequest) -> tuple[float, bool]:
        """The loss of the global batch and whether to stop, the same on every rank.

        Raises:
            TrainingFailed: a loss is not finite; on all ranks, naming the step, rank and microbatch.
        """
        facts = torch.zeros(2, dtype=torch.float64)
        bad = torch.zeros(1, dtype=torch.float64)
        if losses is not None:
            if self.mesh.index("tp") == 0:
                facts[0] = losses.double().sum()
            finite = losses.isfinite()
            if not bool(finite.all()):
                first = int((~finite).nonzero()[0])
                bad[0] = self.mesh.rank * _RANK_RADIX + first + 1
                facts[0] = 0.0
        facts[1] = float(stop.signal is not None)
        if dist.is_initialized() and dist.get_world_size() > 1:
            both = torch.zeros(dist.get_world_size(), dtype=torch.float64)
            both[self.mesh.rank] = bad[0]
            message = torch.cat([facts, both]).to(self.mesh.device)
            dist.all_reduce(message)
            facts, both = message[:2].cpu(), message[2:].cpu()
            bad = both[both > 0][:1]
        if bad.numel() and bad[0] > 0:
            rank, microbatch = divmod(int(bad[0]) - 1, _RANK_RADIX)
            raise TrainingFailed(
                f"step {self.position.step + 1}: the loss of microbatch {microbatch} on rank {rank} is not finite"
            )
        return float(facts[0]) / tokens, bool(facts[1] > 0)

    def _bad_gradient(self) -> str:
        for name, parameter in self.replica.parameters.items():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return f"; first bad gradient on rank {self.mesh.rank}: {name}"
        return ""

    # ------------------------------------------------------------------ evaluation

    def evaluate(self) -> float:
        """Loss on the first `eval.batches` global batches of the held-out split."""
        assert self._held_out is not None
        started, total, count = time.perf_counter(), 0.0, 0.0
        for batch in range(self.config.eval.batches):
            inputs, targets = self._batch(self._held_out, batch * self.config.batch.global_size, keyed=False)
            tokens = self._count(targets)
            losses = self.replica.pipeline.evaluate(inputs, targets)
            loss, _ = self._agree(losses, tokens, StopRequest())
            total, count = total + loss * tokens, count + tokens
        record = EvalRecord(self.position.step, total / count, int(count), time.perf_counter() - started)
        if self.metrics is not None:
            self.metrics.evaluation(record)
        return record.loss

    # ------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Write a checkpoint of this step."""
        meta: dict[str, Any] = {
            **asdict(self.position),
            "seed": self.config.train.seed,
            "shape": asdict(self.replica.shape),
            "layout": self.mesh.layout.describe(),
            "schedule": self.replica.pipeline.program.name,
            "tokenizer": self._tokenizer,
            "config": self.config.model_dump(mode="json"),
        }
        self._saved = save(
            self.run_dir / "checkpoints",
            self.position.step,
            tensors_of(self.replica),
            meta,
            random_state(self.mesh.device),
            self.config.checkpoint.keep,
        )
        if self.metrics is not None:
            self.metrics.note(f"saved {self._saved}")

    def find_checkpoint(self) -> Path | None:
        """What `checkpoint.resume` names: a checkpoint, the newest whole one of a run, or none.

        Raises:
            StrettoError: a named place without a whole checkpoint.
        """
        wanted = self.config.checkpoint.resume
        if wanted == "never":
            return None
        report = self.metrics.note if self.metrics is not None else print
        if wanted == "auto":
            return latest(self.run_dir / "checkpoints", report)
        named = Path(wanted)
        if is_checkpoint(named):
            return named
        inside = named / "checkpoints" if (named / "checkpoints").is_dir() else named
        found = latest(inside, report)
        if found is None:
            raise StrettoError(
                f"checkpoint.resume is {wanted}: no whole checkpoint there",
                hint="name a run's folder, its checkpoints folder, or one step-... folder; or use auto",
            )
        return found

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, whatever layout wrote it."""
        manifest_step = int(path.name.rpartition("-")[2]) if path.name.rpartition("-")[2].isdigit() else 0
        prepare_optimizer(self.replica, manifest_step)
        loaded = load(path, tensors_of(self.replica))
        prepare = loaded.meta
        if prepare["tokenizer"] != self._tokenizer:
            raise StrettoError(
                f"checkpoint {path} was trained with another tokenizer",
                hint="train on the same text and data.vocab, or give its tokenizer.json as data.tokenizer",
            )
        self.position = Position(prepare["step"], prepare["samples"], prepare["tokens"])
        set_random_state(loaded.per_rank, self.mesh.device)
        self._saved = path
        if self.metrics is not None:
            self.metrics.note(f"resumed from {path} at step {self.position.step}")


__all__ = ["Outcome", "Session", "StepRecord"]
