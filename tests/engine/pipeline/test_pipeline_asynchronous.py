"""Asynchronous schedules equal a replay of their delayed updates in one process, written from the
papers' words (which version of each stage's weights a microbatch sees); it knows nothing of programs. Steps
follow one another without a drain, in windows of every length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from plain import batch, mlp, nothing_left, squares
from test_pipeline_schedules import deep
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Pipeline, ReplicatedWeights
from stretto.engine.pipeline.steady_state import repeated
from stretto.engine.pipeline.versions import ages
from stretto.errors import StrettoError
from stretto.program.checks.versions import weight_versions
from stretto.program.lower import LOOKAHEAD
from stretto.program.program import Program
from stretto.program.text import parse_action

RATE, MOMENTUM = 0.01, 0.9


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=MOMENTUM)


class Delayed:
    """Stages trained in one process, each microbatch with weights of a stage's own past.

    Args:
        delays: by stage, how many updates behind the newest a gradient's weights are, once there are as many.
        group: microbatches of one update.
    """

    def __init__(self, stages: Sequence[nn.Sequential], delays: Sequence[int], group: int) -> None:
        self.stages, self.delays, self.group = stages, delays, group
        self.velocity = [{n: torch.zeros_like(p) for n, p in s.named_parameters()} for s in stages]
        self.history = [[{n: p.detach().clone() for n, p in s.named_parameters()}] for s in stages]

    @property
    def newest(self) -> list[dict[str, Tensor]]:
        return [versions[-1] for versions in self.history]

    def drain(self) -> None:
        """Nothing is late any more."""
        self.history = [[newest] for newest in self.newest]

    def step(self, batches: Sequence[tuple[list[Tensor], list[Tensor]]], scale: float) -> list[list[float]]:
        """One step; `batches` of all replicas; their losses."""
        m, history = len(batches[0][0]), self.history
        losses = [[0.0] * m for _ in batches]
        for start in range(0, m, self.group):
            update = len(history[0]) - 1
            used = [h[max(0, update - d)] for h, d in zip(history, self.delays, strict=True)]
            leaves = [{n: t.clone().requires_grad_() for n, t in version.items()} for version in used]
            for replica, (inputs, targets) in enumerate(batches):
                for i in range(start, min(start + self.group, m)):
                    x = inputs[i]
                    for stage, weights in zip(self.stages, leaves, strict=True):
                        x = torch.func.functional_call(stage, weights, (x,))
                    loss = squares(x, targets[i])
                    (scale * loss).backward()
                    losses[replica][i] = loss.item()
            for s, weights in enumerate(leaves):
                new = dict[str, Tensor]()
                for n, leaf in weights.items():
                    assert leaf.grad is not None
                    self.velocity[s][n] = MOMENTUM * self.velocity[s][n] + leaf.grad
                    new[n] = history[s][-1][n] - RATE * self.velocity[s][n]
                history[s].append(new)
        return losses


def compare(
    program: Callable[..., Program],
    layout: Layout,
    delays: Sequence[int],
    group: int,
    make: Callable[[bool], list[nn.Module]],
    windows: Sequence[int] = (1, 3),
) -> dict[int, int]:
    """Windows of the pipeline and of the replay; losses of each step, weights and evaluation where it drains.
    Returns the weight versions held in the last.
    """
    window_program = program()
    mesh, layers, m = Mesh(layout), make(True), window_program.microbatches
    weights = ReplicatedWeights(optimizer=optimizer)
    pipe = Pipeline(layers, window_program, mesh, squares, window=lambda k: program(steps=k), weights=weights)
    plain = make(False)
    cuts = [pipe.layers_of(s) for s in range(window_program.depth)]
    delayed = Delayed([nn.Sequential(*(plain[i] for i in c)) for c in cuts], delays, group)
    replica, begun = mesh.index("dp"), 0
    for window in windows:
        taken = list[int]()

        def enter(number: int, begun: int = begun, taken: list[int] = taken) -> tuple[Any, Any, float]:
            taken.append(number)
            return *batch(begun + number, replica, m), 0.25

        for step in range(window):
            losses = pipe.advance(enter, window)
            assert pipe.drained is (step == window - 1)
            assert step < len(taken) <= min(window, step + 1 + pipe.ahead)
            wanted = delayed.step([batch(begun + step, r, m) for r in range(layout.dp)], 0.25)
            if losses is not None:
                expected = torch.tensor(wanted[replica], dtype=torch.float64)
                torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        assert taken == list(range(window)), "every batch once"
        begun += window
        delayed.drain()
        nothing_left(pipe, window_program.name)
        for s, stage in pipe.stages.items():
            for p, wished in zip(stage.parameters(), delayed.newest[s].values(), strict=True):
                torch.testing.assert_close(p.detach(), wished, rtol=1e-12, atol=1e-12)
        last = batch(begun, replica, m)
        before = pipe.evaluate(*last)  # with the newest weights
        if before is not None:
            x = torch.stack(last[0])
            for stage, version in zip(delayed.stages, delayed.newest, strict=True):
                x = torch.func.functional_call(stage, version, (x,))
            after = torch.stack([squares(y, t) for y, t in zip(x, last[1], strict=True)])
            torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)
    versions = pipe.weight_versions
    promised = weight_versions(program(steps=windows[-1]))
    assert versions == {s: promised[s] for s in versions}
    pipe.close()
    mesh.close()
    return versions


def cases(layout: Layout, microbatches: Sequence[int], both: bool = True) -> None:
    """With layers of ours and with plain ones; not `both`: in turn."""
    p = layout.pp
    for at, m in enumerate(microbatches):
        for parallel in (True, False) if both else (at % 2 == 0,):

            def make(tried: bool, parallel: bool = parallel) -> list[nn.Module]:
                return deep(8, tried and parallel)

            stashing, two = partial(schedule, "pipedream", p, m), partial(schedule, "pipedream-2bw", p, m)
            counts = compare(stashing, layout, [p - 1 - r for r in range(p)], 1, make)
            if 3 * m >= 2 * p:
                assert counts == {r: p - r for r in counts}
            compare(partial(stashing, vertical_sync=True), layout, [p - 1] * p, 1, make)
            for group in {min(p, m), min(p + 1, m)}:
                counts = compare(partial(two, group=group), layout, [1] * p, group, make)
                assert max(counts.values()) <= 2


def long(layout: Layout, m: int) -> None:
    """Until memory has come round twice."""
    p = layout.pp
    for build, delays, group in (
        (partial(schedule, "pipedream", p, m), [p - 1 - r for r in range(p)], 1),
        (partial(schedule, "pipedream-2bw", p, m, group=2), [1] * p, 2),
    ):
        rounds = repeated(lambda k, build=build: build(steps=k), 0, lookahead=LOOKAHEAD)
        windows = (rounds.fill + 2 * rounds.cycle + 1, 2)
        compare(build, layout, delays, group, lambda tried: deep(8, tried), windows)


def test_one_rank_has_no_delay():
    compare(partial(schedule, "pipedream", 1, 5), Layout(), [0], 1, lambda _: mlp())


def test_two_ranks():
    on_ranks(2, cases, Layout(pp=2), (1, 2, 7), False)


def test_asynchronous_schedules_on_four_ranks():
    on_ranks(4, cases, Layout(pp=4), (7,), False)


def test_replicas_sum_their_gradients_before_every_update():
    on_ranks(4, cases, Layout(pp=2, dp=2), (5,), False)


def test_steps_follow_one_another_without_end():
    on_ranks(2, long, Layout(pp=2), 3)


def shorter(layout: Layout, m: int) -> list[list[float]]:
    """A window of ten steps that is cut short as early as it can be while the third is under way."""
    mesh = Mesh(layout)
    pipe = Pipeline(
        deep(8, True),
        schedule("pipedream", layout.pp, m),
        mesh,
        squares,
        window=lambda k: schedule("pipedream", layout.pp, m, steps=k),
        weights=ReplicatedWeights(optimizer=optimizer),
    )
    steps, losses_of_steps = 10, list[list[float]]()
    while not losses_of_steps or not pipe.drained:
        losses = pipe.advance(lambda n: (*batch(n, 0, m), 0.25), steps)
        losses_of_steps.append([] if losses is None else losses.tolist())
        steps = 3 + pipe.ahead if len(losses_of_steps) == 3 else steps
    pipe.close()
    mesh.close()
    return losses_of_steps


def test_a_window_ends_early_alike_on_all_ranks():
    for m, wanted in ((1, 7), (4, 4)):
        first, *_, last = on_ranks(4, shorter, Layout(pp=4), m)
        assert len(first) == len(last) == wanted
        assert all(len(losses) == m for losses in last)


def test_asynchronous_programs_and_optimisers_must_match():
    with pytest.raises(StrettoError, match=r"updates weights within the step.*has no optimizer"):
        Pipeline(mlp(), schedule("pipedream", 1, 2), Mesh(Layout()), squares)
    with pytest.raises(StrettoError, match=r"updates weights after the step.*has an optimizer"):
        Pipeline(
            mlp(),
            schedule("1f1b", 1, 2),
            Mesh(Layout()),
            squares,
            weights=ReplicatedWeights(optimizer=optimizer),
        )


def test_a_version_is_kept_for_the_first_of_the_microbatches_that_still_use_it():
    """The order of a window that is cut short keeps the microbatches before the cut."""
    order = [parse_action(text) for text in ["0F0", "0F1", "0B0", "0U", "0F2", "0B1", "0B2"]]
    update = ages(order, [0, 0, 0])
    assert [update.of[action] for action in order if action in update.of] == [0, 0, 0, 1, 1, 1]
    assert update.following[order[3]] == 1  # in 0B1, after 0F2
