"""One training step of one rank: batch, forward and backward, agreement, update. The training loop runs this
step and the proof of a layout does: there is no second version of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, nan
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.checkpoint.background import BackgroundSave
from stretto.engine.device import moved, on_accelerator, peak_memory
from stretto.engine.models.moe import correct
from stretto.engine.optim.norm import finite
from stretto.engine.optim.rate import LearningRate
from stretto.engine.optim.scale import SMALLEST
from stretto.engine.parallel.memory_check import MemoryCheck
from stretto.engine.pipeline import Recorder
from stretto.engine.progress import PROGRESS, label
from stretto.run.config.schema import GuardConfig
from stretto.run.launch.failure import TrainingFailed
from stretto.run.launch.stop import StopRequest
from stretto.run.train import trace
from stretto.run.train.batches import Batches, SampleSource
from stretto.run.train.guard import BadStep, Guard
from stretto.run.train.loop import Agreement, StepAgreement, StepReport, agree
from stretto.run.train.optimizer import BadGradient, bad_gradient, scales, update_numbers
from stretto.run.train.replica import Replica
from stretto.run.train.speed import ExpertReport, expert_facts
from stretto.run.watch.slow import BUSY
from stretto.spec.finetune import is_router_correction

T = TypeVar("T")
_LOADING, _UPDATING = label("loading data"), label("optimizer step")
_NORM, _AGREEING = label("gradient norm"), label("agreement on the step")
_LONGEST_NAME = 200  # characters of a parameter name in a message


def _untimed(label: str, call: Callable[[], T]) -> T:
    """As a recorder's `timed`, without timing."""
    return call()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step has done, the same on every rank.

    Attributes:
        step: its number, from 0.
        samples: of the run, to the end of the step.
        loss: mean over the targets of the global batch, without what layers add (`Replica.auxiliary`); 0
            where it has none.
        tokens: of the global batch.
        targets: tokens that the loss counts, fewer where data are masked or padded.
        norm: of the gradients before clipping; not finite where they overflowed and nothing was updated; None
            for an asynchronous schedule.
        updates: of the weights.
        stop: whether any rank was asked to stop.
        memory_gib: peak of the fullest rank; None where no rank measures it.
        busy_s: of each rank, the time in which it waited for no other.
        save_ready, save_failed: of `StepAgreement`.
        experts: of a model with experts.
        bad: why the update was not applied, where `guard` passes over such a step.
    """

    step: int
    samples: int
    loss: float
    tokens: int
    targets: int
    rate: float
    norm: float | None
    updates: int
    stop: bool
    memory_gib: float | None
    busy_s: tuple[float, ...]
    save_ready: bool
    save_failed: bool
    experts: ExpertReport | None
    bad: BadStep | None = None


@dataclass(kw_only=True)
class _Window:
    """Steps of an asynchronous schedule that follow one another without a drain.

    Attributes:
        first: the number of its first step.
        seen: samples before that.
        until: the number of the step after its last.
        counted: of each step under way, the tokens that the loss counts, of each microbatch.
        agreements: on the steps that have come to an end on this rank, in order.
        spoiled: of these, a gradient of this rank that was not finite, and whose update was therefore not
            made (`bad_gradient`), or the first weight that was not finite then.
        factors: the loss scale at its start, and after each step that has been reported.
    """

    first: int
    seen: int
    until: int
    counted: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    agreements: deque[tuple[int, Agreement]] = field(default_factory=deque[tuple[int, Agreement]])
    spoiled: dict[int, BadGradient | None] = field(default_factory=dict[int, "BadGradient | None"])
    factors: list[float] = field(default_factory=list[float])


class TrainingStep:
    """Steps of one replica.

    Args:
        rate: the learning rate by step.
        note: tells people a line; called on every rank.
        guard: what becomes of bad steps; by default they raise.
        memory: looks for weights and states that change between two updates.
    """

    def __init__(
        self,
        replica: Replica,
        rate: LearningRate,
        note: Callable[[str], None] | None = None,
        guard: Guard | None = None,
        memory: MemoryCheck | None = None,
    ) -> None:
        self.replica, self.mesh = replica, replica.mesh
        self._memory = memory or MemoryCheck()
        self._guard = guard or Guard(GuardConfig(), [])
        self.batches = Batches(replica)
        self._rate, self._note = rate, note
        self._update_numbers = update_numbers(replica.pipeline.program)
        self._window: _Window | None = None
        self._saving: BackgroundSave | None = None

    @property
    def drained(self) -> bool:
        """Whether all steps that were begun have been reported, and nothing is under way."""
        return self._window is None

    def run(
        self,
        samples: SampleSource,
        *,
        step: int,
        seen: int,
        until: int | None = None,
        stop: StopRequest | None = None,
        saving: BackgroundSave | None = None,
        recorder: Recorder | None = None,
    ) -> list[StepResult]:
        """One global batch: forward and backward, agree, update, correct. Collective over all ranks.

        An asynchronous schedule goes on to this rank's last action of the step, and with later steps until
        then, and hears only later what all ranks agree on: the results come late, in order, and none is
        missing once it has drained.

        Args:
            step: its number from 0, by which the learning rate is set.
            seen: samples before it.
            until: an asynchronous schedule need not drain before this step; None: it drains after each. The
                same for all steps before the drain. It drains earlier where a rank was asked to stop or has
                failed to save.
            stop: whether this rank was asked to stop.
            saving: what this rank saves in the background.
            recorder: times every call.

        Returns:
            The steps of which the result is known now.

        Raises:
            TrainingFailed: a loss, a norm or a weight is not finite, on all ranks, and the guard stops there.
        """
        self._saving = saving
        if self.replica.asynchronous:
            return self._advance(
                samples,
                step=step,
                seen=seen,
                until=step + 1 if until is None else until,
                stop=stop,
                recorder=recorder,
            )
        replica, timed = self.replica, _untimed if recorder is None else recorder.timed
        where, rate = f"step {step + 1}", self._rate(step)
        PROGRESS.mark(_LOADING)
        (inputs, targets), counts = timed(trace.BATCH, lambda: self.batches.take(samples, seen, keyed=True))
        replica.set_rate(rate)
        # counts of all ranks: a mean over means would weigh the tokens of ranks with few targets more
        losses = replica.step(inputs, targets, scales(self._update_numbers, counts), recorder)

        def known() -> list[Tensor]:
            PROGRESS.mark(_NORM)
            return [counts.sum()[None], replica.gradient_norm()[None], *self._expert_facts()]

        def agreement() -> StepAgreement:
            changed = self._memory.changed(self.mesh.device)
            return agree(self._report(losses, stop, memory_changed=changed), self.mesh.device, known())

        agreed = timed(trace.AGREEMENT, agreement)
        counted, norm, *experts = agreed.known
        bad = self._judged(agreed, step, seen, loss=agreed.loss / (counted or 1.0), norm=norm)
        if bad is None:
            PROGRESS.mark(_UPDATING)
            timed(trace.UPDATE, lambda: self.update(rate, norm, where))
            if isfinite(norm):
                self.correct()
        return [self._result(step, seen, agreed, counted=counted, norm=norm, experts=experts, bad=bad)]

    def _advance(
        self,
        samples: SampleSource,
        *,
        step: int,
        seen: int,
        until: int,
        stop: StopRequest | None,
        recorder: Recorder | None,
    ) -> list[StepResult]:
        """One step further with an asynchronous schedule; see `run`."""
        replica, timed = self.replica, _untimed if recorder is None else recorder.timed
        pipeline, size = replica.pipeline, replica.job.global_batch
        if self._window is None:
            last = step + 1 if pipeline.drains_each_step else until
            self._window = _Window(first=step, seen=seen, until=last)
            if replica.loss_scale is not None:
                self._window.factors.append(replica.loss_scale.value)
        window = self._window

        def enter(number: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
            before = window.seen + number * size
            PROGRESS.mark(_LOADING)
            (inputs, targets), counts = timed(
                trace.BATCH, lambda: self.batches.take(samples, before, keyed=True, number=number)
            )
            window.counted[window.first + number] = counts
            # each update is by the mean over its tokens
            return inputs, targets, scales(self._update_numbers, counts)

        def factor(number: int) -> float:
            # every rank knows these reports by the time that the first rank needs the batch
            return window.factors[max(0, number - pipeline.ahead - pipeline.late)]

        scaled = factor if window.factors else None
        # of all updates until the end of the step on this rank
        replica.set_rate(self._rate(step), step, scaled and scaled(step - window.first))
        replica.optimizer.overflowed, replica.optimizer.refused = False, None
        losses = replica.advance(enter, window.until - window.first, scaled, recorder)
        # no gradient norm follows that would show it
        spoiled = self._spoiled()
        window.spoiled[step] = replica.optimizer.refused or (None if spoiled is None else (0, spoiled))
        report = self._report(losses, stop, spoiled is not None, replica.optimizer.overflowed)
        known = [window.counted.pop(step).sum()[None], *self._expert_facts()]
        window.agreements.append((step, Agreement(report, self.mesh.device, known)))
        results = list[StepResult]()
        while len(window.agreements) > (0 if pipeline.drained else pipeline.late):
            results.append(timed(trace.AGREEMENT, lambda: self._conclude(window)))
        if pipeline.drained:
            self._window = None
            self.correct()
        elif any(result.stop or result.save_failed for result in results):
            window.until = min(window.until, step + 1 + pipeline.ahead)
        return results

    def _conclude(self, window: _Window) -> StepResult:
        """The result of the oldest step that is not reported yet."""
        step, agreement = window.agreements.popleft()
        PROGRESS.mark(_AGREEING)
        agreed, spoiled = agreement.wait(), window.spoiled.pop(step)
        where = f"step {step + 1}"
        seen = window.seen + (step - window.first) * self.replica.job.global_batch
        counted, *experts = agreed.known
        loss = agreed.loss / (counted or 1.0)
        bad = self._judged(agreed, step, seen, loss=loss, norm=None, spoiled=spoiled)
        if (scale := self.replica.loss_scale) is not None:
            scale.update(agreed.overflow)
            if scale.exhausted:
                raise TrainingFailed(f"{where}: gradients overflow at the smallest loss scale")
            if agreed.overflow:
                self._tell(
                    f"{where}: gradients overflow, no update; the loss scale will be {scale.value:.10g}"
                )
            window.factors.append(scale.value)
        return self._result(step, seen, agreed, counted=counted, norm=None, experts=experts, bad=bad)

    def _judged(
        self,
        agreed: StepAgreement,
        step: int,
        seen: int,
        *,
        loss: float,
        norm: float | None,
        spoiled: BadGradient | None = None,
    ) -> BadStep | None:
        """Why the update of a step is not to be applied, or, of an asynchronous schedule, was not applied as
        a whole; None: it is. Collective, and the same on every rank.

        Args:
            norm: of the gradients; None for an asynchronous schedule.
            spoiled: with that, a gradient or the first weight of this rank that is not finite.

        Raises:
            TrainingFailed: the guard stops here, or weights are not finite already.
        """
        where, size = f"step {step + 1}", self.replica.job.global_batch
        samples, suspects = range(seen, seen + size), [range(seen, seen + size)]
        scale, spike = self.replica.loss_scale, False
        reason = None
        if agreed.memory_changed:
            changed = self._memory.first()
            place = self._first_named(None if changed is None else (0, changed))
            return self._guard.changed(step, place, seen)
        if agreed.bad_microbatches:
            reason = bad_loss(agreed)
            suspects = [
                self.batches.indices(seen, self.mesh.layout.index(rank, "dp"))[i]
                for rank, i in agreed.bad_microbatches.items()
            ]
        elif agreed.bad_weights:
            self._check(agreed, where, spoiled)
        elif norm is None and agreed.overflow and scale is None:
            place = self._first_named(spoiled)
            reason = f"gradients of an update are not finite, and it was not made; first: {place}"
        elif norm is not None and not isfinite(norm) and (scale is None or scale.value <= SMALLEST):
            smallest = "" if scale is None else " at the smallest loss scale"
            states = self.replica.states
            place = self._first_named(bad_gradient(states, self.replica.shape, states.buffers))
            reason = f"the gradient norm is {norm}{smallest}; first bad gradient: {place or 'on no rank'}"
        elif norm is None or isfinite(norm):
            reason = self._guard.spike(loss, norm)
            spike = reason is not None
            if reason is None:
                self._guard.good(step + 1, loss, norm)
        if reason is None:
            return None
        bad = self._guard.refuse(
            step + 1, reason, spike=spike, samples=samples, suspects=suspects, whole=norm is not None
        )
        # weights that are not finite make every later step a bad one
        if bad.action == "skip" and (place := self.bad_weight()) is not None:
            raise TrainingFailed(
                f"{where}: {reason}; nor are weights, which skipping does not mend "
                f"(guard.on_nonfinite=rollback does); first {place}"
            )
        return bad

    def _expert_facts(self) -> list[Tensor]:
        """What `expert_facts` has of a step: one tensor, or none. Collective."""
        facts = expert_facts(self.replica, self.replica.job.global_batch * self.replica.job.sequence)
        return [] if facts is None else [facts]

    def _result(
        self,
        step: int,
        seen: int,
        agreed: StepAgreement,
        *,
        counted: float,
        norm: float | None,
        experts: Sequence[float],
        bad: BadStep | None,
    ) -> StepResult:
        job = self.replica.job
        applied = norm is None or (isfinite(norm) and bad is None)
        return StepResult(
            step=step,
            samples=seen + job.global_batch,
            loss=nan if agreed.bad_microbatches else agreed.loss / (counted or 1.0),
            tokens=job.global_batch * job.sequence,
            targets=int(counted),
            rate=self._rate(step),
            norm=norm,
            updates=max(self._update_numbers) + 1 if applied else 0,
            stop=agreed.stop,
            memory_gib=agreed.memory_gib,
            busy_s=agreed.busy_s,
            save_ready=agreed.save_ready,
            save_failed=agreed.save_failed,
            experts=ExpertReport(*experts) if experts else None,
            bad=bad,
        )

    def update(self, rate: float, norm: float, where: str) -> None:
        """Apply the gradients of the step, unless they overflowed in float16.

        Args:
            norm: of the gradients before clipping, the same on every rank; not finite where they overflowed.
        """
        self.replica.update(rate, norm)
        if not isfinite(norm):
            assert self.replica.loss_scale is not None, "a bad step"
            scale = self.replica.loss_scale.value
            self._tell(f"{where}: gradients overflow, no update; the loss scale is {scale:.10g} now")

    def correct(self) -> None:
        """Move the corrections of the experts' scores by the step's loads. Collective over all ranks."""
        replica, moe = self.replica, self.replica.shape.moe
        if moe is None or not moe.correction or not moe.correction_rate:
            return
        loads = replica.auxiliary.table(replica.shape.layers, moe.experts)
        if self.mesh.layout.world > 1:
            dist.all_reduce(loads)
        for name, parameter in replica.parameters.items():
            if is_router_correction(name):
                correct(parameter, loads[int(name.split(".")[1])], moe.correction_rate)

    def _tell(self, text: str) -> None:
        if self._note is not None:
            self._note(text)

    def agree(
        self,
        losses: Tensor | None,
        where: str,
        stop: StopRequest | None = None,
        known: Sequence[Tensor] = (),
    ) -> StepAgreement:
        """What all ranks report of a step or an evaluation, the same on every rank. Collective.

        Args:
            losses: of this rank's microbatches [m], where it has the last stage.
            stop: whether this rank was asked to stop.
            known: numbers that the host is to know with it; see `Agreement`.

        Raises:
            TrainingFailed: a loss is not finite; on all ranks, naming the step, rank and microbatch.
        """
        report = self._report(losses, stop)
        PROGRESS.mark(_AGREEING)
        agreed = agree(report, self.mesh.device, known)
        self._check(agreed, where)
        return agreed

    def _report(
        self,
        losses: Tensor | None,
        stop: StopRequest | None,
        bad_weights: bool = False,
        overflow: bool = False,
        memory_changed: float | Tensor = 0.0,
    ) -> StepReport:
        """What this rank has to say of a step."""
        bad_microbatch, total = 0.0, 0.0
        if losses is not None and len(losses):
            bad = ~losses.isfinite()
            numbers = torch.tensor(self._microbatches(len(losses)), dtype=torch.float64) + 1.0
            first = torch.where(bad, moved(numbers, losses.device), inf).amin()
            bad_microbatch = torch.where(bad.any(), first, 0.0)
            if self.mesh.index("tp") == 0:  # every tp rank computes the same loss
                total = torch.where(bad.any(), 0.0, losses.double().sum())
        return StepReport(
            loss=total,
            bad_microbatch=bad_microbatch,
            bad_weights=bad_weights,
            overflow=overflow,
            memory_changed=memory_changed,
            stop=stop is not None and stop.signal is not None,
            memory_gib=peak_memory(self.mesh.device),
            busy_s=0.0 if on_accelerator(self.mesh.device) else BUSY.report(),
            written=self._saving is not None and self._saving.written,
            write_failed=self._saving is not None and self._saving.failed,
        )

    def _check(self, agreed: StepAgreement, where: str, spoiled: BadGradient | None = None) -> None:
        """Raise TrainingFailed, on all ranks, where a loss or a weight is not finite.

        Args:
            spoiled: the first weight of this rank that is not.
        """
        if agreed.bad_microbatches:
            raise TrainingFailed(f"{where}: {bad_loss(agreed)}")
        if agreed.bad_weights:
            place = self._first_named(spoiled)
            raise TrainingFailed(
                f"{where}: its updates left weights that are not finite; first {place or 'on no rank'}"
            )

    def _microbatches(self, losses: int) -> Sequence[int]:
        """The microbatches whose losses this rank holds: only some of them where a schedule such as dualpipe
        trains two copies of the model.
        """
        pipeline = self.replica.pipeline
        copies = [s // pipeline.program.depth for s in pipeline.stages if pipeline.program.is_last(s)]
        trained = [i for i, copy in enumerate(pipeline.program.copy_of) if copy in copies]
        return trained if len(trained) == losses else range(losses)  # an evaluation uses one copy for all

    def bad_weight(self) -> str | None:
        """Rank and name of the first weight in memory that is not finite. Collective."""
        self.replica.states.ready()  # of what is still being gathered nothing is known
        spoiled = self._spoiled()
        return self._first_named(None if spoiled is None else (0, spoiled))

    @torch.no_grad()
    def _spoiled(self) -> str | None:
        """The first weight of this rank that is not finite."""
        here = {n: p for n, p in self.replica.parameters.items() if p.untyped_storage().size()}
        if finite(list(here.values())):
            return None
        return _not_finite(here) or "a weight"  # whose norm alone is too large

    def _first_named(self, named: BadGradient | None) -> str | None:
        """Name and rank of the tensor nearest to the loss that ranks name, of several the first rank's; None
        where none names one. Collective: every rank calls it, for they have decided on the same norm or the
        same agreement.
        """
        # one row a rank: nearness and a name in UTF-8
        names = torch.zeros(self.mesh.layout.world, 1 + _LONGEST_NAME, dtype=torch.int32)
        if named is not None:
            encoded = named[1].encode()[:_LONGEST_NAME]
            names[self.mesh.rank, : 1 + len(encoded)] = torch.tensor([named[0], *encoded])
        if len(names) > 1:
            names = names.to(self.mesh.device)
            dist.all_reduce(names)
            names = names.cpu()
        rows: list[tuple[int, list[int]]] = [(rank, row) for rank, row in enumerate(names.tolist()) if row[1]]
        if not rows:
            return None
        rank, row = max(rows, key=lambda one: one[1][0])
        return f"{bytes(row[1:]).rstrip(bytes(1)).decode()} on rank {rank}"


def bad_loss(agreed: StepAgreement) -> str:
    """The first loss that is not finite, in words."""
    rank, microbatch = next(iter(agreed.bad_microbatches.items()))
    return f"the loss of microbatch {microbatch} on rank {rank} is not finite"


def _not_finite(tensors: Mapping[str, Tensor | None]) -> str | None:
    """The name of the first tensor that is not finite."""
    return next((name for name, t in tensors.items() if t is not None and not bool(t.isfinite().all())), None)
