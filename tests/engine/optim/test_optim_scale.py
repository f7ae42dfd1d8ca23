"""The loss scale halves, doubles, stays in its range, and goes on where it was."""

from __future__ import annotations

from stretto.engine.optim.scale import LossScale


def test_it_halves_at_an_overflow_and_doubles_after_good_steps():
    scale = LossScale(value=1024.0, steps=3)
    seen = []
    for overflow in (False, False, True, False, False, False, False, True, True):
        scale.update(overflow)
        seen.append(scale.value)
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024, 512, 256]
    assert scale.skipped == 3


def test_the_scale_stays_in_range_and_reports_exhaustion():
    scale = LossScale(value=2.0**24, steps=1)
    scale.update(False)
    assert scale.value == 2.0**24
    scale = LossScale(value=2.0)
    scale.update(True)
    assert (scale.value, scale.exhausted) == (1.0, False)
    scale.update(True)
    assert (scale.value, scale.exhausted, scale.skipped) == (1.0, True, 2)
    scale.update(False)
    assert not scale.exhausted


def test_a_loss_scale_continues_from_its_state():
    first, two = LossScale(value=64.0, steps=3), LossScale(value=1.0, steps=3)
    for overflow in (True, False, False):
        first.update(overflow)
    two.load(first.state())
    for scale in (first, two):
        scale.update(False)
    assert first == two
    assert first.value == 64.0
