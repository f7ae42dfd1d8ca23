"""What stages cost, as searched schedules and the replay of a traced step take it."""

from __future__ import annotations

import pytest

from stretto.cost.flops import attention_flops, block_flops
from stretto.cost.shape import ModelShape
from stretto.plan.program import build_program, stage_times

SHAPE = ModelShape(family="gpt", layers=4, hidden=32, heads=4, vocab=64, sequence=128)


def test_what_is_recomputed_makes_the_input_gradients_of_blocks_longer() -> None:
    plain = stage_times(SHAPE, 128, 2)
    attention = attention_flops(SHAPE, 128) / block_flops(SHAPE, 128)
    blocks = round(plain[0][0])  # the embedding costs nothing: all of it is blocks
    for mode, again in (("selective", attention), ("full", 1.0)):
        f, i, w = stage_times(SHAPE, 128, 2, mode)[0]
        assert (f, w) == (plain[0][0], plain[0][2])
        assert i == pytest.approx(plain[0][1] + blocks * again)


def test_a_searched_schedule_is_searched_for_the_costs_with_recomputation() -> None:
    options = {"effort": 0.0, "chunks": 1}
    plain = build_program("auto", 2, 4, options, SHAPE, 128)
    full = build_program("auto", 2, 4, options, SHAPE, 128, "full")
    assert plain is build_program("auto", 2, 4, options, SHAPE, 128)
    assert full is not plain
