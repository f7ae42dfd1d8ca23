"""The training step of one rank: sample, forward and backward, agree, update, report; then evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.models.language import IGNORED
from stretto.engine.optim.rate import Rate
from stretto.engine.parallel.collectives import all_sum
from stretto.engine.pipeline import Recorder
from stretto.run.config.schema import TrainConfig
from stretto.run.data.dataset import Samples, indices_after
from stretto.run.data.token_folder import TokenFolder
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.stop import StopRequest
from stretto.run.train import trace
from stretto.run.train.loop import Outcome, StepAgreement, StepReport, TrainingLoop, agree
from stretto.run.train.metrics import EvalRecord, Metrics
from stretto.run.train.optimizer import scales, update_numbers
from stretto.run.train.position import TextPosition, save_run
from stretto.run.train.prediction import Forecast
from stretto.run.train.replica import Replica
from stretto.run.train.speed import Speed, expert_report

T = TypeVar("T")
Pairs = list[tuple[Tensor, Tensor]]  # inputs and targets of microbatches
_LONGEST_NAME = 200  # characters of a parameter name in a message


def _untimed(label: str, call: Callable[[], T]) -> T:
    """As a recorder's `timed`, without timing."""
    return call()


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
        saved: the checkpoint that it was resumed from.
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
        self._rate = Rate.of(replica.job.optimiser, config.train.steps)
        left = config.train.steps - position.step
        self._traced = position.step + min(config.metrics.trace, left) if config.metrics.trace else 0
        self._speed = Speed(replica, config.metrics.peak_tflops)
        self._forecast = None if metrics is None else Forecast(replica.job, config)
        self._batches = Batches(replica)
        self._update_numbers = update_numbers(replica.pipeline.program)
        split = config.data.split
        sequence = replica.job.sequence
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
        """One global batch: sample, forward and backward, agree, update, report. Returns whether any rank was
        asked to stop.
        """
        position, replica = self.position, self.replica
        recorder = trace.start(self.mesh) if position.step + 1 == self._traced else None
        timed = _untimed if recorder is None else recorder.timed
        started = time.perf_counter()
        where = f"step {position.step + 1}"
        rate = self._rate(position.step)

        (inputs, targets), counts = timed(
            trace.BATCH, lambda: self._batches.take(self._samples, position.samples, keyed=True)
        )
        tokens = sum(counts)

        replica.set_rate(rate)
        # an asynchronous schedule updates within the step, each time by the mean over that update's tokens
        scale = scales(self._update_numbers, counts) if replica.asynchronous else 1.0 / tokens
        losses = replica.step(inputs, targets, scale, recorder)

        agreed = timed(
            trace.AGREEMENT, lambda: self._agree(losses, where, stop, updated=replica.asynchronous)
        )

        norm = None if replica.asynchronous else timed(trace.UPDATE, lambda: self._update(rate, where))
        position.step += 1
        skipped = norm is not None and not isfinite(norm)
        position.weight_updates += 0 if skipped else max(self._update_numbers) + 1
        position.samples += self.replica.job.global_batch
        position.tokens += int(tokens)
        position.loss = agreed.loss / tokens

        seconds = time.perf_counter() - started
        if recorder is not None:
            self._trace(recorder)
        self._report(norm=norm, rate=rate, tokens=tokens, seconds=seconds)
        return agreed.stop

    def _report(self, *, norm: float | None, rate: float, tokens: float, seconds: float) -> None:
        """Record the step that `position` now counts. Collective for a model with experts."""
        assert self.position.loss is not None
        record = self._speed.record(
            step=self.position.step,
            loss=self.position.loss,
            norm=norm,
            rate=rate,
            seen=self.position.tokens,
            tokens=int(tokens),
            seconds=seconds,
        )
        if self._forecast is not None and self._forecast.estimate is not None:
            record = replace(record, bubble=self._forecast.estimate.bubble)
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

    def _trace(self, recorder: Recorder) -> None:
        """Bring together what all ranks recorded, and report it beside the replay."""
        pipelines = trace.gather(recorder, self.mesh)
        if pipelines is not None:
            program = self.replica.pipeline.program
            forecast = self._forecast
            report = trace.write(
                folder=self.config.run.folder,
                step=self.position.step,
                program=program,
                pipelines=pipelines,
                expected=None if forecast is None else forecast.estimate,
            )
            why = (
                ""
                if forecast is None or forecast.estimate is not None
                else f"no prediction: {forecast.why}\n"
            )
            self.note(f"traced step {self.position.step}: {report.trace}, {report.page}\n{why}{report.text}")

    def _update(self, rate: float, where: str) -> float:
        """Apply the gradients of the step; returns their norm before clipping. A norm that is not finite says
        that gradients overflowed in float16 and the update was skipped.

        Raises:
            TrainingFailed: the norm is not finite, and no smaller loss scale could mend it.
        """
        norm, scale = float(self.replica.update(rate)), self.replica.loss_scale
        if isfinite(norm):
            return norm
        if scale is not None and not scale.exhausted:
            self.note(f"{where}: gradients overflow, no update; the loss scale is {scale.value:g} now")
            return norm
        place = self._first_not_finite({f.name: f.gradient for f in self.replica.fragments})
        smallest = "" if scale is None else " at the smallest loss scale"
        raise TrainingFailed(
            f"{where}: the gradient norm is {norm}{smallest}; first bad gradient: {place or 'on no rank'}"
        )

    def _agree(
        self, losses: Tensor | None, where: str, stop: StopRequest | None = None, updated: bool = False
    ) -> StepAgreement:
        """What all ranks report of the step, the same on every rank. Collective.

        Args:
            losses: of this rank's microbatches [m], where it has the last stage.
            updated: the step has updated the weights already, so they are checked too: no gradient norm
                follows that would show them.

        Raises:
            TrainingFailed: a loss or a weight is not finite; on all ranks, naming the step, rank and
                microbatch or parameter.
        """
        bad_microbatch, total = None, 0.0
        if losses is not None:
            bad = (~losses.isfinite()).nonzero()
            if len(bad):
                bad_microbatch = self._microbatches(len(losses))[int(bad[0])]
            elif self.mesh.index("tp") == 0:  # every tp rank computes the same loss
                total = float(losses.double().sum())
        report = StepReport(
            loss=total,
            bad_microbatch=bad_microbatch,
            bad_weights=updated and not self._weights_finite(),
            stop=stop is not None and stop.signal is not None,
            memory_gib=self._speed.memory(),
        )
        agreed = agree(report, self.mesh.device)
        for rank, microbatch in agreed.bad_microbatches.items():
            raise TrainingFailed(f"{where}: the loss of microbatch {microbatch} on rank {rank} is not finite")
        if agreed.bad_weights:
            place = self._first_not_finite(self.replica.parameters)
            raise TrainingFailed(
                f"{where}: its updates left weights that are not finite; first {place or 'on no rank'}"
            )
        self._speed.fullest = agreed.memory_gib
        return agreed

    def _microbatches(self, losses: int) -> Sequence[int]:
        """The microbatches whose losses this rank holds: only some of them where a schedule such as dualpipe
        trains two copies of the model.
        """
        pipeline = self.replica.pipeline
        copies = [s // pipeline.program.depth for s in pipeline.stages if pipeline.program.is_last(s)]
        trained = [i for i, copy in enumerate(pipeline.program.copy_of) if copy in copies]
        return trained if len(trained) == losses else range(losses)  # an evaluation uses one copy for all

    @torch.no_grad()
    def _weights_finite(self) -> bool:
        """Whether all weights of this rank are finite."""
        weights = [p.detach() for p in self.replica.parameters.values() if p.numel()]
        return not weights or bool(torch.stack(torch._foreach_norm(weights)).isfinite().all())

    def _first_not_finite(self, tensors: Mapping[str, Tensor | None]) -> str | None:
        """Rank and name of the first tensor that is not finite; None where all are. Collective: every rank
        calls it, for they have decided on the same norm or the same agreement.
        """
        names = torch.zeros(self.mesh.layout.world, _LONGEST_NAME, dtype=torch.int32)  # UTF-8, one row a rank
        for name, tensor in tensors.items():
            if tensor is not None and not bool(tensor.isfinite().all()):
                encoded = name.encode()[:_LONGEST_NAME]
                names[self.mesh.rank, : len(encoded)] = torch.tensor(list(encoded))
                break
        if len(names) > 1:
            names = names.to(self.mesh.device)
            dist.all_reduce(names)
            names = names.cpu()
        for rank, row in enumerate(names.tolist()):
            if row[0]:
                name = bytes(row).rstrip(b"\0").decode()
                return f"{name} on rank {rank}"
        return None

    def evaluate(self) -> float:
        """Loss on the first `eval.batches` global batches of the held-out split."""
        assert self._held_out is not None
        started = time.perf_counter()
        total = 0.0
        count = 0.0
        for batch in range(self.config.eval.batches):
            first = batch * self.replica.job.global_batch
            (inputs, targets), counts = self._batches.take(self._held_out, first, keyed=False)
            tokens = sum(counts)
            losses = self.replica.pipeline.evaluate(inputs, targets)
            total += self._agree(losses, f"evaluation after step {self.position.step}").loss
            count += tokens
        record = EvalRecord(self.position.step, total / count, int(count), time.perf_counter() - started)
        if self.metrics is not None:
            self.metrics.evaluation(record)
        return record.loss

    def _write_checkpoint(self) -> Path:
        return save_run(self.config, self.replica, self._folder, self.position)


class Batches:
    """Global batches of one job.

    With `dp.mode=server` the first of the ranks that hold the same parameters reads the samples of all of
    them and scatters them; otherwise every rank reads its samples itself.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.mesh = replica.mesh
        self._microbatches = replica.pipeline.program.microbatches
        self._served = replica.job.dp.mode == "server" and self.mesh.group("dp") is not None

    def take(
        self, samples: Samples, seen: int, keyed: bool
    ) -> tuple[tuple[list[Tensor], list[Tensor]], list[float]]:
        """This rank's part of its replica's microbatches of the global batch after `seen` samples, on the
        device; and of each microbatch the tokens that count, over all replicas.

        Args:
            keyed: let dropout know the samples.
        """
        mesh, d = self.mesh, self.mesh.index("dp")
        if keyed:
            self.replica.samples[:] = self._indices(seen, d)
        group = mesh.group("dp")
        if self._served and group is not None:
            pairs, counts = self._from_server(samples, seen, group)
        else:
            whole = self._read(samples, seen, d)
            counts = self._count([y for _, y in whole])
            pairs = [self.replica.share(*pair) for pair in whole]
        inputs = [x.to(mesh.device, non_blocking=True) for x, _ in pairs]
        return (inputs, [y.to(mesh.device) for _, y in pairs]), counts

    def _indices(self, seen: int, replica: int) -> list[range]:
        m = self._microbatches
        return [
            indices_after(
                seen=seen,
                microbatch=j,
                dp_rank=replica,
                dp=self.mesh.size("dp"),
                micro_batch=self.replica.job.micro_batch,
                microbatches=m,
            )
            for j in range(m)
        ]

    def _read(self, samples: Samples, seen: int, replica: int) -> Pairs:
        return [samples.batch(i) for i in self._indices(seen, replica)]

    def _count(self, targets: list[Tensor]) -> list[float]:
        """Tokens that count of each microbatch, over all replicas; all ranks of one have the targets."""
        count = torch.stack([(t != IGNORED).sum() for t in targets]).double().to(self.mesh.device)
        return all_sum(count, self.mesh.group("dp")).tolist()

    def _from_server(self, samples: Samples, seen: int, group: ProcessGroup) -> tuple[Pairs, list[float]]:
        m = self._microbatches
        empty = torch.zeros(self.replica.job.micro_batch, self.replica.job.sequence, dtype=torch.int64)
        shape = self.replica.share(empty, empty)[0].shape
        counts = torch.zeros(m, dtype=torch.float64, device=self.mesh.device)
        mine = torch.empty(m, 2, *shape, dtype=torch.int64, device=self.mesh.device)
        parts = list[Tensor]()
        if group.rank() == 0:
            for replica in range(group.size()):
                whole = self._read(samples, seen, replica)
                counts += torch.stack([(y != IGNORED).sum() for _, y in whole]).double().to(counts.device)
                shared = [torch.stack(self.replica.share(*pair)) for pair in whole]
                parts.append(torch.stack(shared).to(mine.device))
        group.scatter([mine], [parts] if parts else []).wait()
        group.broadcast([counts]).wait()
        return [(one[0], one[1]) for one in mine], counts.tolist()
