"""The step loop of one rank: sample, step, agree, update, report, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.optim.rate import Rate
from stretto.engine.pipeline import Recorder
from stretto.run.config.schema import TrainConfig
from stretto.run.data.dataset import Samples
from stretto.run.data.token_folder import TokenFolder
from stretto.run.train import trace
from stretto.run.train.batches import Batches
from stretto.run.train.faults import TrainingFailed
from stretto.run.train.loop import Outcome, StepReport, TrainingLoop, agree
from stretto.run.train.metrics import EvalRecord, Metrics
from stretto.run.train.optimizer import scales, update_numbers
from stretto.run.train.position import TextPosition, save_run
from stretto.run.train.prediction import Forecast
from stretto.run.train.replica import Replica
from stretto.run.train.speed import Speed, expert_report
from stretto.run.train.stop import StopRequest
from stretto.spec.program import stage_times

_LONGEST_NAME = 200


@dataclass(frozen=True, kw_only=True)
class TextOutcome(Outcome):
    """How a language model's session ended."""

    tokens_per_s: float | None  # median; None where this session has made no step


class Session(TrainingLoop[TrainConfig, TextPosition]):
    """One rank of a run.

    Args:
        replica: this rank's model.
        folder: the token folder of the text.
        position: where the run is.
        saved: the checkpoint that it has come from.
        metrics: on rank 0 only.
    """

    def __init__(
        self,
        config: TrainConfig,
        replica: Replica,
        folder: TokenFolder,
        position: TextPosition,
        saved: Path | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        super().__init__(config, position, saved, metrics)
        self.replica = replica
        self.mesh = replica.mesh
        self._folder = folder
        self._rate = Rate.of(config.optim.settings(), config.train.steps)
        left = config.train.steps - position.step
        self._traced = position.step + min(config.metrics.trace, left) if config.metrics.trace else 0
        self._speed = Speed(config, replica)
        self._forecast = None if metrics is None else Forecast(config)
        self._batches = Batches(config, replica)
        self._update_numbers = update_numbers(replica.pipeline.program)
        split = config.data.split
        sequence = config.data.sequence
        seed = config.train.seed
        self._samples = Samples(folder, "train", sequence, seed, ratio=split)
        self._held_out = (
            Samples(folder, "valid", sequence, seed, ratio=split, shuffle=False)
            if config.eval.every
            else None
        )

    def run(self, stop: StopRequest) -> TextOutcome:
        """Train to the last step, or to the step at which a rank was asked to stop; then save."""
        stopped = self.train(stop)
        if self._forecast is not None and (summary := self._forecast.end()):
            self.note(summary)
        return TextOutcome(
            step=self.position.step,
            loss=self.position.loss,
            tokens_per_s=self._speed.median,
            stopped=stopped,
            checkpoint=str(self.saved),
        )

    def _step(self, stop: StopRequest) -> bool:
        """One global batch; returns whether any rank was asked to stop."""
        started, position = time.perf_counter(), self.position
        where = f"step {position.step + 1}"
        (inputs, targets), counts = self._batches.take(self._samples, position.samples, keyed=True)
        rate = self._rate(position.step)
        tokens = sum(counts)
        recorder = trace.start(self.mesh) if position.step + 1 == self._traced else None
        self.replica.set_rate(rate)
        if self.replica.asynchronous:
            losses = self.replica.step(inputs, targets, scales(self._update_numbers, counts), recorder)
            loss, asked = self._agree(losses, tokens, where, stop, updated=True)
            norm = None
        else:
            losses = self.replica.step(inputs, targets, 1.0 / tokens, recorder)
            loss, asked = self._agree(losses, tokens, where, stop)
            norm = self._update(rate, where)
        position.step += 1
        skipped = norm is not None and not isfinite(norm)
        position.weight_updates += 0 if skipped else max(self._update_numbers) + 1
        position.samples += self.config.batch.global_size
        position.tokens += int(tokens)
        position.loss = loss
        seconds = time.perf_counter() - started
        if recorder is not None:
            self._trace(recorder)
        record = self._speed.record(
            step=position.step,
            loss=loss,
            norm=norm,
            rate=rate,
            seen=position.tokens,
            tokens=int(tokens),
            seconds=seconds,
        )
        if (scale := self.replica.loss_scale) is not None:
            record = replace(record, loss_scale=scale.value, skipped=scale.skipped)
        if (experts := expert_report(self.replica, tokens)) is not None:
            record = replace(
                record,
                expert_loss=experts.loss,
                expert_dropped=experts.dropped,
                expert_busiest=experts.busiest,
            )
        if self.metrics is not None:
            self.metrics.step(record)
        if self._forecast is not None:
            self._forecast.add(seconds)
        return asked

    def _trace(self, recorder: Recorder) -> None:
        """Bring together what all ranks recorded, and report it beside the replay."""
        pipelines = trace.gather(recorder, self.mesh)
        if pipelines is not None:
            program = self.replica.pipeline.program
            again = self.config.recompute.mode
            shares = stage_times(self.replica.shape, self.config.data.sequence, program.depth, again)
            report = trace.write(self.config.run.folder, self.position.step, program, pipelines, shares)
            self.note(f"traced step {self.position.step}: {report.trace}, {report.page}\n{report.text}")

    def _update(self, rate: float, where: str) -> float:
        """Apply the gradients of the step; returns their norm, not finite where they overflowed in float16
        and the update was left out.
        """
        norm, scale = float(self.replica.update(rate)), self.replica.loss_scale
        if isfinite(norm):
            return norm
        if scale is not None and not scale.exhausted:
            self.note(f"{where}: gradients overflow, no update; the loss scale is {scale.value:g} now")
            return norm
        bad = self._bad({f.name: f.gradient for f in self.replica.fragments})
        also = "" if scale is None else " at the smallest loss scale"
        raise TrainingFailed(f"{where}: the gradient norm is {norm}{also}; the first bad gradient {bad}")

    def _agree(
        self,
        losses: Tensor | None,
        tokens: float,
        where: str,
        stop: StopRequest | None = None,
        updated: bool = False,
    ) -> tuple[float, bool]:
        """The loss of the global batch and whether to stop, the same on every rank.

        Args:
            updated: the step has updated the weights, which are looked at too: nobody looks at a norm.

        Raises:
            TrainingFailed: a loss or a weight is not finite; on all ranks, naming the step, rank and
                microbatch or parameter.
        """
        bad_microbatch, total = None, 0.0
        if losses is not None:
            bad = (~losses.isfinite()).nonzero()
            if len(bad):
                bad_microbatch = self._microbatches(len(losses))[int(bad[0])]
            elif self.mesh.index("tp") == 0:  # all tp ranks have the loss
                total = float(losses.double().sum())
        report = StepReport(
            loss=total,
            bad_microbatch=bad_microbatch,
            bad_weights=updated and not self._sound(),
            stop=stop is not None and stop.signal is not None,
            memory_gib=self._speed.memory(),
        )
        agreed = agree(report, self.mesh.device)
        for rank, microbatch in agreed.bad_microbatches.items():
            raise TrainingFailed(f"{where}: the loss of microbatch {microbatch} on rank {rank} is not finite")
        if agreed.bad_weights:
            first_bad = self._bad(self.replica.parameters)
            raise TrainingFailed(
                f"{where}: its updates left weights that are not finite; the first bad one {first_bad}"
            )
        self._speed.fullest = agreed.memory_gib
        return agreed.loss / tokens, agreed.stop

    def _microbatches(self, losses: int) -> Sequence[int]:
        """Those whose losses this rank has: in training not all where the model has copies."""
        pipeline = self.replica.pipeline
        copies = [s // pipeline.program.depth for s in pipeline.stages if pipeline.program.is_last(s)]
        own = [i for i, copy in enumerate(pipeline.program.copy_of) if copy in copies]
        return own if len(own) == losses else range(losses)

    @torch.no_grad()
    def _sound(self) -> bool:
        """Whether all weights of this rank are finite."""
        weights = [p.detach() for p in self.replica.parameters.values() if p.numel()]
        return not weights or bool(torch.stack(torch._foreach_norm(weights)).isfinite().all())

    def _bad(self, tensors: Mapping[str, Tensor | None]) -> str:
        """The first rank with a tensor that is not finite, and its name."""
        rows = torch.zeros(self.mesh.layout.world, _LONGEST_NAME, dtype=torch.int32)
        for name, tensor in tensors.items():
            if tensor is not None and not bool(tensor.isfinite().all()):
                told = name.encode()[:_LONGEST_NAME]
                rows[self.mesh.rank, : len(told)] = torch.tensor(list(told))
                break
        # all ranks come here: they have one norm
        if len(rows) > 1:
            rows = rows.to(self.mesh.device)
            dist.all_reduce(rows)
            rows = rows.cpu()
        for rank, row in enumerate(rows.tolist()):
            if row[0]:
                name = bytes(row).rstrip(b"\0").decode()
                return f"on rank {rank} is that of {name}"
        return "is on no rank"

    def evaluate(self) -> float:
        """Loss on the first `eval.batches` global batches of the held-out split."""
        assert self._held_out is not None
        started = time.perf_counter()
        total = 0.0
        count = 0.0
        for batch in range(self.config.eval.batches):
            first = batch * self.config.batch.global_size
            (inputs, targets), counts = self._batches.take(self._held_out, first, keyed=False)
            tokens = sum(counts)
            losses = self.replica.pipeline.evaluate(inputs, targets)
            loss, _ = self._agree(losses, tokens, f"evaluation after step {self.position.step}")
            total, count = total + loss * tokens, count + tokens
        record = EvalRecord(self.position.step, total / count, int(count), time.perf_counter() - started)
        if self.metrics is not None:
            self.metrics.evaluation(record)
        return record.loss

    def _write_checkpoint(self) -> Path:
        return save_run(self.config, self.replica, self._folder, self.position)
