"""Programs that hold fewer activations: the work keeps its order, and lowering leaves it in place."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from mutations import pair, program, seeds

from stretto.errors import StrettoError
from stretto.program import Action, ActionKind, Program, check, lower, schedule
from stretto.program.transforms.activations import offload, recompute
from stretto.program.transforms.sharding import gather

BARE = [
    p
    for p in seeds()[0]
    if p.trains
    and not any(a.kind in (ActionKind.RECOMPUTE, ActionKind.OFFLOAD) for order in p.orders for a in order)
]
ADDED = {ActionKind.RECOMPUTE, ActionKind.OFFLOAD, ActionKind.RELOAD, ActionKind.UNSHARD, ActionKind.RESHARD}


def text(program: Program, rank: int = 0) -> str:
    return " ".join(map(str, program.orders[rank]))


def without(program: Program, kinds: set[ActionKind]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(a for a in order if a.kind not in kinds) for order in program.orders)


@pytest.mark.parametrize("program", BARE, ids=lambda p: p.name)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_work_stays_and_lowering_leaves_the_rest_in_place(program: Program, ahead: int):
    offloaded = offload(recompute(program), stages=range(0, program.stages, 2), ahead=ahead)
    assert without(offloaded, {ActionKind.RECOMPUTE, ActionKind.OFFLOAD, ActionKind.RELOAD}) == program.orders
    check(offloaded)
    placed = {
        ActionKind.REDUCE_GRAD,
        ActionKind.REDUCE_TIED,
        ActionKind.SEND_F,
        ActionKind.SEND_B,
        ActionKind.RECV_F,
        ActionKind.RECV_B,
    }
    lowered = lower(offloaded)
    assert without(lowered, placed) == without(offloaded, placed)
    check(lowered)


def test_recompute_stands_right_before_each_backward():
    program = schedule("1f1b", 2, 3)
    assert text(recompute(program)) == "0F0 0F1 0RECOMPUTE0 0B0 0F2 0RECOMPUTE1 0B1 0RECOMPUTE2 0B2"
    assert text(recompute(program), 1) == text(program, 1)  # each backward follows its forward
    assert recompute(program, [1]).orders == program.orders


def test_a_paired_backward_is_prepared_before_the_pair():
    example = program(
        (0, 1), 3, "0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", pairs=frozenset({pair("0F2 0B0")})
    )
    assert text(recompute(example)) == "0F0 0F1 0RECOMPUTE0 0F2 0B0 0RECOMPUTE1 0B1 0RECOMPUTE2 0B2"
    moved = offload(recompute(example), ahead=0)
    assert text(moved) == (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0RECOMPUTE0 0F2 0OFFLOAD2 0B0 "
        "0RELOAD1 0RECOMPUTE1 0B1 0RELOAD2 0RECOMPUTE2 0B2"
    )
    check(lower(moved, lookahead=0))


def test_reloads_are_so_many_actions_ahead():
    program = schedule("gpipe", 1, 4)
    assert text(offload(program)) == (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0RELOAD0 0F3 0OFFLOAD3 "
        "0RELOAD1 0B0 0RELOAD2 0B1 0RELOAD3 0B2 0B3"
    )
    # 0F3 would come back in the same breath
    assert text(offload(program, ahead=2)) == (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0RELOAD1 0F3 0OFFLOAD3 "
        "0RELOAD2 0B0 0RELOAD3 0B1 0B2 0B3"
    )
    assert offload(program, ahead=9).orders == program.orders


@pytest.mark.parametrize("program", [p for p in BARE if not p.versions], ids=lambda p: p.name)
@pytest.mark.parametrize("limit", [2, 3, 100])
def test_gathering_keeps_to_its_limit(program: Program, limit: int):
    if any(a.kind is ActionKind.UNSHARD for order in program.orders for a in order):
        return
    gathered = gather(program, limit)
    assert without(gathered, {ActionKind.UNSHARD, ActionKind.RESHARD}) == program.orders
    check(gathered)
    check(lower(gathered))
    for order in gathered.orders:
        there: set[int] = set()
        for stage, kind, _ in order:
            if kind is ActionKind.UNSHARD:
                there.add(stage)
            elif kind is ActionKind.RESHARD:
                there.remove(stage)
            assert len(there) <= limit
        gathers = [a for a in order if a.kind is ActionKind.UNSHARD]
        stages = {a.stage for a in order}
        if limit >= len(stages):
            assert len(gathers) == len(stages)


def test_gathering_is_one_run_ahead():
    program = schedule("bfs", 1, 2, chunks=4)
    assert text(gather(program, 2)) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 1F0 1F1 1RESHARD 3UNSHARD 2F0 2F1 3F0 3F1 3B1 3B0 "
        "3RESHARD 1UNSHARD 2B1 2B0 2RESHARD 0UNSHARD 1B1 1B0 1RESHARD 0B1 0B0 0RESHARD"
    )
    alone = text(gather(program, 1))
    assert alone.startswith("0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1RESHARD 2UNSHARD")
    # 4 chunks forward, and backward those that had to make room; the last one's run goes on
    for limit in range(1, 5):
        assert text(gather(program, limit)).count("UNSHARD") == 8 - limit


@pytest.mark.parametrize("name", ["bfs", "interleaved"])
@pytest.mark.parametrize("limit", [2, 3])
def test_the_next_stage_is_gathered_before_the_current_is_released(name: str, limit: int):
    for order in gather(schedule(name, 2, 4, chunks=4), limit).orders:
        compute = [(at, a.stage) for at, a in enumerate(order) if a.kind.is_compute]
        starts = [compute[0][0]]
        starts += [at for (at, stage), (_, last) in zip(compute[1:], compute, strict=False) if stage != last]
        for run, coming in pairwise(starts):
            there: set[int] = set()
            for stage, kind, _ in order[:run]:
                (there.add if kind is ActionKind.UNSHARD else there.discard)(stage) if kind in ADDED else None
            assert order[coming].stage in there


def test_bad_requests():
    example = schedule("1f1b", 2, 2)
    paired = program((0, 0), 2, "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1", pairs=frozenset({pair("0F1 1B0")}))
    paired = replace(paired, pairs=frozenset({pair("0F1 0B0")}))
    assert text(gather(paired, 2)).count("UNSHARD") == 2
    for wrong, says in [
        (lambda: recompute(lower(example)), "lowered already"),
        (lambda: offload(lower(example)), "lowered already"),
        (lambda: gather(lower(example)), "lowered already"),
        (lambda: recompute(example, [2]), "stages has 2, must be of 0 to 1"),
        (lambda: offload(example, [-1]), "stages has -1, must be of 0 to 1"),
        (lambda: recompute(recompute(example)), "has RECOMPUTE already"),
        (lambda: offload(offload(example, ahead=0), ahead=0), "has OFFLOAD and RELOAD already"),
        (lambda: offload(example, ahead=-1), "ahead is -1"),
        (lambda: gather(gather(example)), "gathers its parameters already"),
        (lambda: gather(example, 0), "limit is 0, must be at least 1"),
        (lambda: recompute(schedule("forward-only", 2, 2)), "is forward-only"),
        (lambda: gather(schedule("pipedream", 2, 2)), "has weight versions"),
        (lambda: gather(schedule("dualpipe-v", 2, 6), 1), "limit is 1, must be at least 2 with overlapped"),
    ]:
        with pytest.raises(StrettoError, match=says):
            wrong()
