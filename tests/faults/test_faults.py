"""Every fault of the campaign can be planted; and, with -m slow, its test fails."""

from __future__ import annotations

import pytest
from campaign import problems, run
from planted import FAULTS, Fault

pytestmark = pytest.mark.apart

NAMES = [fault.name for fault in FAULTS]


def test_no_fault_has_lost_its_place_or_its_test() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert [problem for fault in FAULTS for problem in problems(fault)] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    seen = run(fault)
    if fault.missed is not None and not seen.caught:
        pytest.xfail(fault.missed)
    assert fault.missed is None or fault.race, f"{fault.test} sees it now: take its `missed` away"
    assert seen.caught, f"{fault.test} passes with {fault.new!r} for {fault.old!r}:\n{seen.output}"
