"""When gradients are reduced over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.job.reduction import choose, most_open_stages, reduction
from stretto.program import schedule
from stretto.program.action import Action, ActionKind
from stretto.program.lower import lower


@pytest.mark.parametrize(
    ("name", "options", "opened"),
    [
        ("gpipe", {}, 1),
        ("1f1b", {}, 1),
        ("bfs", {}, 1),
        ("bfs", {"chunks": 4}, 1),
        ("interleaved", {}, 2),
        ("interleaved", {"chunks": 4}, 4),
        ("zb-v", {}, 2),
        ("chimera", {}, 2),
        ("pipedream", {}, 1),
    ],
)
def test_stages_whose_gradients_are_open_at_once(name: str, options: dict[str, int], opened: int) -> None:
    program = schedule(name, 4, 8, **options)
    assert [most_open_stages(program, rank) for rank in range(4)] == [opened] * 4
    assert [most_open_stages(lower(program), rank) for rank in range(4)] == [opened] * 4


def test_w_after_i_keeps_a_stage_open() -> None:
    i, w = ActionKind.I, ActionKind.W
    late = tuple(Action(stage, kind, 0) for stage, kind in ((1, i), (0, i), (1, w), (0, w)))
    soon = tuple(Action(stage, kind, 0) for stage, kind in ((1, i), (1, w), (0, i), (0, w)))
    forward = tuple(Action(stage, ActionKind.F, 0) for stage in (0, 1))
    program = schedule("gpipe", 1, 1)
    for order, opened in ((late, 2), (soon, 1)):
        split = replace(program, name="hand-made", placement=(0, 0), orders=(forward + order,))
        assert most_open_stages(split, 0) == opened


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bfs", "step"), ("1f1b", "microbatch"), ("gpipe", "microbatch"), ("interleaved", "microbatch")],
)
def test_once_a_step_only_where_a_rank_finishes_one_stage_before_the_next(name: str, expected: str) -> None:
    program = schedule(name, 2, 4)
    for mode in ("zero2", "zero3"):
        assert choose(program, mode) == reduction(program, mode) == expected
        assert reduction(program, mode, "step") == "step"
        assert reduction(program, mode, "microbatch") == "microbatch"
    for mode in ("server", "ddp", "zero1"):
        assert choose(program, mode) == "step"


def test_where_weights_change_within_the_step_once_an_update() -> None:
    assert choose(schedule("pipedream", 2, 4), "zero2") == "step"
