"""Proofs of several layouts, each with a fault of its own planted on its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

import stretto.run.verify.prove as prove_module
from stretto.prove.diagnose import Verdict
from stretto.run.config.schema import TrainConfig
from stretto.run.verify.cases import describe
from stretto.run.verify.job import verify
from tiny_job import Changes, varied

Fault = Callable[[pytest.MonkeyPatch], None]


class Planted(NamedTuple):
    """A fault, the layout that it is planted in, and what the verdict must say."""

    fault: Fault
    case: Changes
    says: tuple[str, ...]

    def check(self, verdict: Verdict) -> None:
        """It is seen, and named."""
        assert not verdict.equal
        assert verdict.diagnosis is not None
        for words in self.says:
            assert words in verdict.diagnosis


def prove_planted(config: TrainConfig, test: str, steps: int = 2) -> list[Verdict]:
    """The verdict on each of a test module's `ALL`.

    Args:
        steps: that each proof makes beside the one whose gradients are read.
        test: the module's `__name__`: ranks import it, since a fault may be no function that pickles.
    """
    every: Sequence[Planted] = sys.modules[test].ALL
    cases = [varied(config, planted.case) for planted in every]
    proved = verify(config, cases, steps, on_rank=partial(_plant_in_turn, test))
    assert [verdict.layout for verdict in proved] == [describe(case) for case in cases]
    assert all(verdict.same_as is None for verdict in proved)
    return proved


def _plant_in_turn(test: str) -> None:
    """On a rank: each proof has its own fault."""
    __import__(test)
    right, turns = prove_module._prove, iter(sys.modules[test].ALL)

    def faulty(*arguments: Any) -> Verdict:
        planted: Planted = next(turns)
        with pytest.MonkeyPatch.context() as patch:
            planted.fault(patch)
            return right(*arguments)

    prove_module._prove = faulty
