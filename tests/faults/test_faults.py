"""Faults can be planted and are listed in docs/evidence/faults.md; with -m slow, each is planted and seen."""

from __future__ import annotations

import sys
from dataclasses import replace

import campaign
import pytest
from anchor import merge, quote
from campaign import BEGIN, CUDA_PYTHON, END, PAGE, Results, equal_without, python_of, run, table
from jobs import JOBS

from faults import FAULTS, Fault, problems

pytestmark = pytest.mark.apart

NAMES = [fault.name for fault in FAULTS]
PROOFS = {fault.seen_by: fault for fault in FAULTS if fault.verify is not None}


def test_no_fault_has_lost_its_place_or_its_test() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 100
    assert [problem for fault in FAULTS for problem in problems(fault)] == []
    assert {fault.job for fault in FAULTS} == set(JOBS)


def test_check_names_what_is_quoted_wrongly_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = replace(FAULTS[0], name="lost", old="text that stands nowhere")
    untested = replace(FAULTS[1], name="untested", verify=None, test="faults/test_faults.py::test_of_nothing")
    monkeypatch.setattr(sys, "argv", ["campaign.py", "--check"])
    monkeypatch.setattr(campaign, "campaign", None)
    assert campaign.main() == 0
    assert capsys.readouterr().out == f"{len(FAULTS)} faults, 0 problems\n"
    monkeypatch.setattr(campaign, "FAULTS", [lost, untested])
    assert campaign.main() == 1
    printed = capsys.readouterr().out
    assert "has 0 times, not once: text that stands nowhere" in printed
    assert "tests/faults/test_faults.py has no test test_of_nothing" in printed


def test_a_fault_that_is_no_python_is_not_run() -> None:
    """Nothing could run its source, which would pass for a fault that was caught."""
    with pytest.raises(RuntimeError, match="is no Python with: if True:"):
        run(replace(FAULTS[0], new="if True:"))


def test_the_table_of_the_page_is_that_of_the_results() -> None:
    results = Results()
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert written.strip() == table(results)
    assert [fault.name for fault in FAULTS if results.get(fault) is None] == []
    seen = {fault.name for fault in FAULTS if (result := results.get(fault)) and result.caught}
    assert {fault.name for fault in FAULTS if fault.missed is None} <= seen


def test_a_fault_follows_its_line_through_renames_and_moves() -> None:
    base = "def f(first, step):\n    total = first\n    return total * (step + 1)\n"
    now = "import math\n\ndef g(start, step):\n    total = start\n    return total * (step + 1)\n"
    merged = merge(base, now, base.replace("total = first", "total = first + first"))
    assert merged is not None
    assert quote(now, merged) == ("total = start", "total = start + start")
    planted = base.replace("(step + 1)", "step")
    assert merge(base, now.replace("(step + 1)", "math.log(step)"), planted) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", PROOFS.values(), ids=PROOFS.keys())
def test_a_proof_is_equal_without_a_fault(fault: Fault) -> None:
    seen = equal_without(fault)
    assert not seen.caught, f"{seen.named}\n{seen.output}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    if python_of(fault) is None:
        pytest.skip(f"it takes torch's CUDA build, whose Python {CUDA_PYTHON} names")
    seen = run(fault)
    if fault.missed is not None and not seen.caught:
        pytest.xfail(fault.missed)
    assert seen.caught, f"{fault.seen_by} says nothing of {fault.new!r} for {fault.old!r}:\n{seen.output}"
