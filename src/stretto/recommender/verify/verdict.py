"""What a proof of one placement says."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.run.verify.diagnose import Verdict


@dataclass(frozen=True)
class TableVerdict(Verdict):
    """One placement against the reference: largest relative errors over all steps.

    Beside what is said of language models: of the states of the tables' optimiser, of logits without an
    update, and where each table is.
    """

    state_error: float | None = None
    worst_state: str | None = None
    predict_error: float = 0.0
    placement: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def equal(self) -> bool:
        """Everything within the tolerance."""
        within = self.predict_error <= self.tolerance and (self.state_error or 0.0) <= self.tolerance
        return within and super().equal
