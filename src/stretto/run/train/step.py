"""One training step of one rank: batch, forward and backward, agreement, update. The training loop runs this
step and the proof of a layout does: there is no second version of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.device import peak_memory
from stretto.engine.models.moe import correct
from stretto.engine.optim.rate import Rate
from stretto.engine.pipeline import Recorder
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.stop import StopRequest
from stretto.run.train import trace
from stretto.run.train.batches import Batches, SampleSource
from stretto.run.train.loop import StepAgreement, StepReport, agree
from stretto.run.train.optimizer import scales, update_numbers
from stretto.run.train.replica import Replica
from stretto.spec.finetune import adjusted

T = TypeVar("T")
_LONGEST_NAME = 200  # characters of a parameter name in a message


def _untimed(label: str, call: Callable[[], T]) -> T:
    """As a recorder's `timed`, without timing."""
    return call()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step has done, the same on every rank.

    Attributes:
        loss: mean over the targets of the global batch, without what layers add (`Replica.auxiliary`); 0
            where it has none.
        tokens: of the global batch.
        targets: tokens that the loss counts, fewer where data are masked or padded.
        norm: of the gradients before clipping; not finite where they overflowed and nothing was updated; None
            for an asynchronous schedule.
        updates: of the weights.
        stop: whether any rank was asked to stop.
        memory_gib: peak of the fullest rank; None where no rank measures it.
    """

    loss: float
    tokens: int
    targets: int
    rate: float
    norm: float | None
    updates: int
    stop: bool
    memory_gib: float | None


class TrainingStep:
    """Steps of one replica.

    Args:
        rate: the learning rate by step.
        note: tells people a line; called on every rank.
    """

    def __init__(self, replica: Replica, rate: Rate, note: Callable[[str], None] | None = None) -> None:
        self.replica, self.mesh = replica, replica.mesh
        self.batches = Batches(replica)
        self._rate, self._note = rate, note
        self._update_numbers = update_numbers(replica.pipeline.program)

    def run(
        self,
        samples: SampleSource,
        *,
        step: int,
        seen: int,
        stop: StopRequest | None = None,
        recorder: Recorder | None = None,
    ) -> StepResult:
        """One global batch: forward and backward, agree, update, correct. Collective over all ranks.

        Args:
            step: its number from 0, by which the learning rate is set.
            seen: samples before it.
            stop: whether this rank was asked to stop.
            recorder: times every call.

        Raises:
            TrainingFailed: a loss, a norm or a weight is not finite, on all ranks.
        """
        replica, timed = self.replica, _untimed if recorder is None else recorder.timed
        where, rate = f"step {step + 1}", self._rate(step)
        (inputs, targets), counts = timed(trace.BATCH, lambda: self.batches.take(samples, seen, keyed=True))
        # of all ranks: a mean over means would weigh the tokens of ranks with few targets more
        counted = sum(counts)
        replica.set_rate(rate)
        # an asynchronous schedule updates within the step, each time by the mean over that update's tokens
        scale = scales(self._update_numbers, counts) if replica.asynchronous else 1.0 / (counted or 1.0)
        losses = replica.step(inputs, targets, scale, recorder)
        agreed = timed(trace.AGREEMENT, lambda: self.agree(losses, where, stop, updated=replica.asynchronous))
        norm = None if replica.asynchronous else timed(trace.UPDATE, lambda: self.update(rate, where))
        skipped = norm is not None and not isfinite(norm)
        if not skipped:
            self.correct()
        return StepResult(
            loss=agreed.loss / (counted or 1.0),
            tokens=replica.job.global_batch * replica.job.sequence,
            targets=int(counted),
            rate=rate,
            norm=norm,
            updates=0 if skipped else max(self._update_numbers) + 1,
            stop=agreed.stop,
            memory_gib=agreed.memory_gib,
        )

    def update(self, rate: float, where: str) -> float:
        """Apply the gradients of the step; returns their norm before clipping. A norm that is not finite says
        that gradients overflowed in float16 and the update was skipped.

        Raises:
            TrainingFailed: the norm is not finite, and no smaller loss scale could mend it.
        """
        norm, scale = float(self.replica.update(rate)), self.replica.loss_scale
        if isfinite(norm):
            return norm
        if scale is not None and not scale.exhausted:
            self._tell(f"{where}: gradients overflow, no update; the loss scale is {scale.value:.10g} now")
            return norm
        place = self._first_not_finite({f.name: f.gradient for f in self.replica.fragments})
        smallest = "" if scale is None else " at the smallest loss scale"
        raise TrainingFailed(
            f"{where}: the gradient norm is {norm}{smallest}; first bad gradient: {place or 'on no rank'}"
        )

    def correct(self) -> None:
        """Move the corrections of the experts' scores by the step's loads. Collective over all ranks."""
        replica, moe = self.replica, self.replica.shape.moe
        if moe is None or not moe.correction or not moe.correction_rate:
            return
        loads = replica.auxiliary.table(replica.shape.layers, moe.experts)
        if self.mesh.layout.world > 1:
            dist.all_reduce(loads)
        for name, parameter in replica.parameters.items():
            if adjusted(name):
                correct(parameter, loads[int(name.split(".")[1])], moe.correction_rate)

    def _tell(self, text: str) -> None:
        if self._note is not None:
            self._note(text)

    def agree(
        self, losses: Tensor | None, where: str, stop: StopRequest | None = None, updated: bool = False
    ) -> StepAgreement:
        """What all ranks report of the step, the same on every rank. Collective.

        Args:
            losses: of this rank's microbatches [m], where it has the last stage.
            stop: whether this rank was asked to stop.
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
            memory_gib=peak_memory(self.mesh.device),
        )
        agreed = agree(report, self.mesh.device)
        for rank, microbatch in agreed.bad_microbatches.items():
            raise TrainingFailed(f"{where}: the loss of microbatch {microbatch} on rank {rank} is not finite")
        if agreed.bad_weights:
            place = self._first_not_finite(self.replica.parameters)
            raise TrainingFailed(
                f"{where}: its updates left weights that are not finite; first {place or 'on no rank'}"
            )
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
