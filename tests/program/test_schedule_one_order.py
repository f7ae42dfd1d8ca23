"""Receives where their sends are: then a program completes under every transport."""

from __future__ import annotations

import pytest
from brute_force import completes
from mutations import seeds

from stretto.errors import StrettoError
from stretto.program import Program, ScheduleError, check, lower, schedule
from stretto.program.checks.transport import TRANSPORTS
from stretto.program.pairing import as_blocks
from stretto.program.transforms.one_order import one_order

_, LOWERED = seeds()


@pytest.mark.parametrize("program", LOWERED, ids=lambda p: p.name)
def test_every_transport_carries_it(program: Program):
    ordered = one_order(program)
    for transport in TRANSPORTS:
        check(ordered, transport)
        assert completes(ordered, 5, transport)
    for mine, block_order in zip(ordered.orders, as_blocks(program).orders, strict=True):
        assert [a for a in mine if not a.kind.value.startswith("RECV")] == [
            a for a in block_order if not a.kind.value.startswith("RECV")
        ]
        assert sorted(map(str, mine)) == sorted(map(str, block_order))


def test_lowering_itself_does_not_give_that():
    """What makes `one_order` needed: gradients and activations of zb-v pass between the same ranks."""
    program = lower(schedule("zb-v", 2, 4))
    with pytest.raises(ScheduleError, match="but the receive for it is"):
        check(program, "paired")
    check(one_order(program), "paired")


def test_bad_requests():
    with pytest.raises(StrettoError, match="is not lowered"):
        one_order(schedule("gpipe", 2, 2))
