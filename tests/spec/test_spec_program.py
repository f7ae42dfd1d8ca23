"""What stages cost, as searched schedules and the replay of a traced step take it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.program import check, lower
from stretto.program.action import Kind
from stretto.spec.flops import attention_flops, block_flops
from stretto.spec.program import ProgramKey, build_program, stage_times
from stretto.spec.shape import ModelShape

SHAPE = ModelShape(family="gpt", layers=4, hidden=32, heads=4, vocab=64, sequence=128)
MOVES = {Kind.UNSHARD, Kind.RESHARD}


def test_what_is_recomputed_makes_the_input_gradients_of_blocks_longer() -> None:
    plain = stage_times(SHAPE, 128, 2)
    attention = attention_flops(SHAPE, 128) / block_flops(SHAPE, 128)
    blocks = round(plain[0][0])  # the embedding costs nothing: all of it is blocks
    for mode, again in (("selective", attention), ("full", 1.0)):
        f, i, w = stage_times(SHAPE, 128, 2, mode)[0]
        assert (f, w) == (plain[0][0], plain[0][2])
        assert i == pytest.approx(plain[0][1] + blocks * again)


def test_a_searched_schedule_is_searched_for_the_costs_with_recomputation() -> None:
    plain, again, full = (
        build_program(
            ProgramKey(
                name="auto",
                ranks=2,
                microbatches=4,
                options=(("chunks", 1), ("effort", 0.0)),
                costs=(SHAPE, 128, recompute, None),
            )
        )
        for recompute in ("none", "none", "full")
    )
    assert plain is again
    assert full is not plain


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "chimera", "dualpipe"])
def test_sharded_parameters_of_stages_are_gathered_before_use_and_released(name: str) -> None:
    key = ProgramKey(name=name, ranks=2, microbatches=4, gathered=True)
    plain, made = build_program(replace(key, gathered=False)), build_program(key)
    check(lower(made))
    for before, after in zip(plain.orders, made.orders, strict=True):
        assert before == tuple(action for action in after if action.kind not in MOVES)
    for rank, order in enumerate(made.orders):
        there = most = 0
        for action in order:
            there += {Kind.UNSHARD: 1, Kind.RESHARD: -1}.get(action.kind, 0)
            most = max(most, there)
        at_work = 2 if any(a.stage != b.stage for a, b in made.pairs) else 1
        assert 1 <= most <= min(at_work + 1, len(made.stages_of(rank)))
    assert made is build_program(replace(key))


def test_overlapped_pairs_have_both_of_their_stages() -> None:
    made = build_program(ProgramKey(name="dualpipe-v", ranks=2, microbatches=8, gathered=True))
    assert any(a.stage != b.stage for a, b in made.pairs)
    check(lower(made))


@pytest.mark.parametrize("name", ["pipedream", "forward-only"])
def test_what_cannot_be_gathered_is_left_to_the_rules(name: str) -> None:
    made = build_program(ProgramKey(name=name, ranks=2, microbatches=4, gathered=True))
    assert MOVES.isdisjoint(action.kind for order in made.orders for action in order)
