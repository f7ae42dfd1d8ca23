"""The proof of a language model's layouts, and nothing but its verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.job.job import Job
from stretto.run.config import TrainConfig
from stretto.verify.evidence import Verdict
from stretto.verify.language.proof import language_proof
from stretto.verify.run import run_proof


def verify(
    config: TrainConfig,
    cases: Sequence[Job],
    steps: int = 2,
    twice: bool = False,
    on_rank: Callable[[], None] | None = None,
) -> list[Verdict]:
    """The verdicts; `on_rank` is called on every rank first."""
    return run_proof(language_proof(config, cases, steps, twice), on_rank).verdicts
