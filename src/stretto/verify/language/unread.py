"""Steps of a layout as training makes them: nothing is read between them, for reading waits.

A layer that does not wait for its updated weights is right whenever somebody has waited before it. So the
weights are compared once, after the last step. Nor may it matter when messages arrive: the steps are made
with every message and every thread late (`engine.parallel.late`), and come to the same bits
as without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

import torch

from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.late import delay_messages
from stretto.run.launch.failure import TrainingFailed
from stretto.run.train.rank_model import RankModel
from stretto.verify.compare import TOLERANCE, Comparison, Quantity, Snapshot, relative, worst_quantities
from stretto.verify.evidence import Verdict
from stretto.verify.language.reference import Trial
from stretto.verify.language.step import TrialTask, loss_of, trial_trainer, worst

Fresh = Callable[[], AbstractContextManager[RankModel]]  # a new replica, closed at the end


@dataclass(kw_only=True)
class Ran:
    """What steps came to; the same on every rank but for `bits`.

    Attributes:
        late: whether messages were late.
        losses, norms: relative errors by step.
        weights: after the last step; None where one failed.
        bits: a digest of what this rank has computed.
        failure: why a step failed.
        broken: how messages were used wrongly, on any rank.
    """

    late: bool = False
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    weights: Comparison | None = None
    bits: str = ""
    failure: str | None = None
    broken: list[str] = field(default_factory=list[str])

    def equal(self, tolerance: float) -> bool:
        """Whether all errors are within the tolerance, and no message was used wrongly."""
        complete = self.failure is None and self.weights is not None and not self.broken
        return complete and all(quantity.equal for quantity in self.quantities(tolerance))

    def quantities(self, tolerance: float) -> list[Quantity]:
        """Return the largest errors; they are infinite if a step failed."""
        weights = self.weights
        return [
            Quantity("loss", max(self.losses) if weights is not None else inf, tolerance),
            Quantity("gradients", None, tolerance),
            Quantity("norm", max(self.norms, default=None), tolerance),
            Quantity("weights", inf, tolerance)
            if weights is None
            else weights.quantity("weights", tolerance),
        ]

    @property
    def wrong_use(self) -> str | None:
        """How messages were used wrongly, in words."""
        more = f", and {len(self.broken) - 1} more" if len(self.broken) > 1 else ""
        return f"{self.broken[0]}{more}" if self.broken else None


def run_steps(
    replica: RankModel,
    trial: Trial,
    reference: Sequence[Snapshot],
    *,
    windows: Sequence[int] = (),
    late: bool = False,
) -> Ran:
    """Make the first steps of a trial, as many as the reference has. Collective.

    Args:
        windows: how many steps an asynchronous schedule makes before it drains, and again; none: it drains
            after each step.
        late: keep messages back until they are waited for.
    """
    if not late:
        return _run(replica, trial, reference, windows)
    with delay_messages(trial.seed) as messages:
        ran = _run(replica, trial, reference, windows)
        if ran.failure is not None:
            flying: list[list[str]] = gather_json(messages.in_flight)
            if first := next((message for rank in flying for message in rank), None):
                ran.failure = f"{ran.failure} while {first} is still in flight"
        replica.states.ready()
    ran.late = True
    everywhere: list[list[str]] = gather_json(messages.broken)
    ran.broken = [misuse for rank in everywhere for misuse in rank]
    return ran


def _run(replica: RankModel, trial: Trial, reference: Sequence[Snapshot], windows: Sequence[int]) -> Ran:
    task, ran = TrialTask(replica, trial), Ran()
    trainer = trial_trainer(task, drains=list(accumulate(windows)))
    if replica.asynchronous:
        task.scale_losses()
    digest = hashlib.blake2b(digest_size=16)
    results = list[tuple[float, float | None]]()
    try:
        for _ in reference:
            for done in trainer.step():
                results.append((loss_of(done), done.norm))
    except TrainingFailed as failed:
        ran.failure = str(failed)
        return ran
    digest.update(repr(results).encode())
    ran.losses += [
        relative(loss, snapshot.loss) for (loss, _), snapshot in zip(results, reference, strict=True)
    ]
    norms = [norm for _, norm in results if norm is not None]
    if norms:
        of_steps = zip(worst(norms, reference), reference, strict=True)
        ran.norms += [relative(norm, snapshot.norm) for norm, snapshot in of_steps]
    with replica.states.full_weights() as weights:
        for weight in weights.values():  # of a copy: memory that numpy sees cannot be released
            digest.update(weight.clone(memory_format=torch.contiguous_format).numpy().tobytes())
        ran.weights = reference[-1].compare_placed("weights", weights, replica.places)
    ran.bits = digest.hexdigest()
    return ran


# ---------------------------------------------------------------------- verdicts


_EARLY = "something is used before it has arrived"


def same_bits_late(
    verdict: Verdict,
    ran: Ran,
    fresh: Fresh,
    trial: Trial,
    reference: Sequence[Snapshot],
    *,
    windows: Sequence[int] = (),
) -> Verdict:
    """A verdict of equality, kept if the same steps come to the same bits with everything late. Collective.

    Args:
        ran: the steps without delays.
        reference: of these steps.
        windows: as `run_steps` takes them.
    """
    with fresh() as replica:
        again = run_steps(replica, trial, reference, windows=windows, late=True)
    equal_bits: list[bool] = gather_json(again.bits == ran.bits and again.failure is None)
    if all(equal_bits) and not again.broken:
        return verdict
    if again.failure is None and not again.broken:
        ranks = [str(rank) for rank, equal in enumerate(equal_bits) if not equal]
        diagnosis = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} come to other bits: {_EARLY}"
        return _with_errors(verdict, again, f"{_WHEN_LATE} {diagnosis}")
    return only_unread(verdict, again)


_WHEN_LATE = "equal where messages arrive at once; where they are late,"


def wrong_use_verdict(layout: str, ran: Ran) -> Verdict:
    """The verdict on steps that use messages wrongly. They are not made again: without `delay_messages` ranks
    might wait for each other for ever.
    """
    return Verdict(layout=layout, quantities=ran.quantities(TOLERANCE), diagnosis=ran.wrong_use)


def only_unread(verdict: Verdict, ran: Ran) -> Verdict:
    """The verdict on steps that are equal when each is read, and differ as they `ran`."""
    if ran.late:
        diagnosis = ran.wrong_use or (
            f"{ran.failure}: {_EARLY}" if ran.failure else f"results differ: {_EARLY}"
        )
        return _with_errors(verdict, ran, f"{_WHEN_LATE} {diagnosis}")
    failure = "" if ran.failure is None else f" ({ran.failure})"
    diagnosis = (
        f"steps are equal when each is read, and differ when nothing is read between them{failure}: {_EARLY}"
    )
    return _with_errors(verdict, ran, diagnosis)


def with_wrong_use(
    verdict: Verdict,
    ran: Ran,
    fresh: Fresh,
    trial: Trial,
    reference: Sequence[Snapshot],
    *,
    windows: Sequence[int] = (),
) -> Verdict:
    """A verdict of difference with how messages are used wrongly, where they are. Collective."""
    if not ran.late:
        with fresh() as replica:
            ran = run_steps(replica, trial, reference, windows=windows, late=True)
    if ran.wrong_use is None or verdict.diagnosis is None or ran.wrong_use in verdict.diagnosis:
        return verdict
    return replace(verdict, diagnosis=f"{verdict.diagnosis}; {ran.wrong_use}")


def _with_errors(verdict: Verdict, ran: Ran, diagnosis: str) -> Verdict:
    """The verdict with the errors of steps that differ, and a diagnosis."""
    errors = ran.quantities(verdict["loss"].bound)
    quantities = worst_quantities([verdict.quantities, errors])
    return replace(verdict, quantities=quantities, diagnosis=diagnosis)
