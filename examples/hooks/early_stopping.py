"""Ends a run whose held-out loss has not fallen for some evaluations, of any kind of model."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from stretto.run.train.hooks import HookedRun


class EarlyStopping:
    """Remembers the best loss; a resumed run continues to count.

    Args:
        patience: evaluations without a better loss after which the run ends.
    """

    def __init__(self, patience: int = 3) -> None:
        self.patience, self.best, self.worse = patience, inf, 0

    def on_evaluation(self, run: HookedRun, record: Mapping[str, Any]) -> None:
        loss = record.get("loss", record.get("logloss"))  # of a language model, or of a recommender
        assert loss is not None
        self.worse = 0 if loss < self.best else self.worse + 1
        self.best = min(self.best, loss)
        run.log({"early_stopping/best": self.best, "early_stopping/worse": self.worse})
        if self.worse >= self.patience:
            run.stop(f"the held-out loss has been above {self.best:.4f} for {self.worse} evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best if self.best < inf else None, "worse": self.worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = inf if state["best"] is None else state["best"]
        self.worse = state["worse"]
