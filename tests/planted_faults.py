"""Proofs of several layouts, each with a fault of its own planted on its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

import stretto.verify.language.prove as prove_module
from proofs import verify
from stretto.run.config.schema import TrainConfig
from stretto.verify.evidence import Verdict
from stretto.verify.language.cases import describe
from tiny_job import Changes, varied

Fault = Callable[[pytest.MonkeyPatch], None]


class Planted(NamedTuple):
    """A fault, the layout that it is planted in, and what the verdict must say.

    slow: others of the file find faults of the same kind, so this one is planted with `-m slow` only.
    """

    fault: Fault
    case: Changes
    says: tuple[str, ...]
    slow: bool = False

    def check(self, verdict: Verdict) -> None:
        """It is seen, and named."""
        assert not verdict.equal
        assert verdict.diagnosis is not None
        for phrase in self.says:
            assert phrase in verdict.diagnosis


def parameters(every: Sequence[Planted], name: Callable[[Planted], str]) -> list[Any]:
    """The parameter `at` of a test of each: its place in the list."""
    marks = {True: (pytest.mark.slow,), False: ()}
    return [pytest.param(at, id=name(fault), marks=marks[fault.slow]) for at, fault in enumerate(every)]


def selected(request: pytest.FixtureRequest) -> list[int]:
    """The values of `at` of the tests of the module that run."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    here = [item.callspec.params for item in items if item.path == request.path and hasattr(item, "callspec")]
    return sorted({params["at"] for params in here if "at" in params})


def prove_planted(
    config: TrainConfig, test: str, places: Sequence[int], steps: int = 2
) -> dict[int, Verdict]:
    """The verdicts on some of a test module's `ALL`, by their place in it.

    Args:
        test: the module's `__name__`: ranks import it, since a fault may be no function that pickles.
        steps: that each proof makes beside the one whose gradients are read.
    """
    every: Sequence[Planted] = sys.modules[test].ALL
    cases = [varied(config, every[at].case) for at in places]
    proved = verify(config, cases, steps, on_rank=partial(_plant_in_turn, test, places))
    assert [verdict.layout for verdict in proved] == [describe(case) for case in cases]
    assert all(verdict.same_as is None for verdict in proved)
    return dict(zip(places, proved, strict=True))


def _plant_in_turn(test: str, places: Sequence[int]) -> None:
    """On a rank: each proof has its own fault."""
    __import__(test)
    every: Sequence[Planted] = sys.modules[test].ALL
    right, turns = prove_module._prove, iter([every[at] for at in places])

    def faulty(*arguments: Any) -> Verdict:
        planted: Planted = next(turns)
        with pytest.MonkeyPatch.context() as patch:
            planted.fault(patch)
            return right(*arguments)

    prove_module._prove = faulty
