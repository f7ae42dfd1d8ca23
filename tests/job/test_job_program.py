"""Costs of stages, for searched schedules and for the replay of a traced step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.job.flops import attention_flops, block_flops
from stretto.job.program import ProgramKey, ScheduleSearchKey, build_program, stage_times, stages_of
from stretto.job.shape import ModelShape
from stretto.program import check, lower
from stretto.program.action import ActionKind

SHAPE = ModelShape(family="gpt", layers=4, hidden=32, heads=4, vocab=64, sequence=128)
MOVES = {ActionKind.UNSHARD, ActionKind.RESHARD}


def test_what_is_recomputed_makes_the_input_gradients_of_blocks_longer() -> None:
    plain = stage_times(ScheduleSearchKey(shape=SHAPE, sequence=128), 2)
    attention = attention_flops(SHAPE, 128) / block_flops(SHAPE, 128)
    blocks = round(plain[0][0])  # the embedding costs nothing: all of it is blocks
    for mode, again in (("selective", attention), ("full", 1.0)):
        f, i, w = stage_times(ScheduleSearchKey(shape=SHAPE, sequence=128, recompute=mode), 2)[0]
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
                costs=ScheduleSearchKey(shape=SHAPE, sequence=128, recompute=recompute),
            )
        )
        for recompute in ("none", "none", "full")
    )
    assert plain is again
    assert full is not plain


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "chimera", "dualpipe"])
def test_sharded_parameters_of_stages_are_gathered_before_use_and_released(name: str) -> None:
    key = ProgramKey(name=name, ranks=2, microbatches=4, gathered=True)
    plain, gathered = build_program(replace(key, gathered=False)), build_program(key)
    check(lower(gathered))
    for before, after in zip(plain.orders, gathered.orders, strict=True):
        assert before == tuple(action for action in after if action.kind not in MOVES)
    for rank, order in enumerate(gathered.orders):
        there = most = 0
        for action in order:
            there += {ActionKind.UNSHARD: 1, ActionKind.RESHARD: -1}.get(action.kind, 0)
            most = max(most, there)
        at_work = 2 if any(a.stage != b.stage for a, b in gathered.pairs) else 1
        assert 1 <= most <= min(at_work + 1, len(gathered.stages_of(rank)))
    assert gathered is build_program(replace(key))


def test_overlapped_pairs_have_both_of_their_stages() -> None:
    gathered = build_program(ProgramKey(name="dualpipe-v", ranks=2, microbatches=8, gathered=True))
    assert any(a.stage != b.stage for a, b in gathered.pairs)
    check(lower(gathered))


@pytest.mark.parametrize("name", ["pipedream", "forward-only"])
def test_what_cannot_be_gathered_is_left_to_the_rules(name: str) -> None:
    gathered = build_program(ProgramKey(name=name, ranks=2, microbatches=4, gathered=True))
    assert MOVES.isdisjoint(action.kind for order in gathered.orders for action in order)


STACKS = ModelShape(family="t5", layers=4, hidden=32, heads=4, vocab=64, sequence=128)


@pytest.mark.parametrize("depth", range(2, 12))
def test_no_stage_has_layers_of_encoder_and_decoder(depth: int) -> None:
    """With as few layers a stage as there can be, too: 5 of the encoder, 6 of the decoder."""
    stages = stages_of(STACKS, 128, depth)
    assert [layer for stage in stages for layer in stage] == list(range(STACKS.chain))
    assert 5 in {stage.start for stage in stages}
    assert all(stages)


def test_stacks_are_cut_by_their_cost_and_their_lengths() -> None:
    """A short target makes the decoder cheap, and a number of stages is taken as it is."""
    of_encoder = [
        sum(stage.stop <= 5 for stage in stages_of(STACKS, 128, 5, target=target))
        for target in (16, 128, 1024)
    ]
    assert of_encoder == sorted(of_encoder, reverse=True)
    assert of_encoder[0] > of_encoder[2]
    forced = stages_of(STACKS, 128, 4, encoder_stages=1)
    assert forced[0] == range(5)
    times = stage_times(ScheduleSearchKey(shape=STACKS, sequence=128, target=16), 2)
    assert times[0][0] > times[1][0]
