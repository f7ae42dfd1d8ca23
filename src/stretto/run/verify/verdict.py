"""What a proof of one layout says."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.run.verify.diagnose import TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One layout against the reference: largest relative errors over all steps, and where they are.

    Asynchronous schedules have no gradients and no norm of a step: these are None, and `updates` says after
    how many delayed updates the weights were compared.
    """

    layout: str
    loss_error: float
    grad_error: float | None
    worst_gradient: str | None
    norm_error: float | None
    weight_error: float
    worst_weight: str
    diagnosis: str | None
    seconds: float = 0.0
    updates: int | None = None
    tolerance: float = TOLERANCE
    same_as: str | None = None  # the layout that was run, where the program is the same action by action

    @property
    def equal(self) -> bool:
        """Everything within the tolerance, and nothing held in a wrong place."""
        errors = (self.loss_error, self.grad_error, self.norm_error, self.weight_error)
        return self.diagnosis is None and all(e <= self.tolerance for e in errors if e is not None)
