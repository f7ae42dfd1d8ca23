"""Asynchronous schedules equal a replay of their delayed updates in one process, written from the
papers' words (which version of each stage's weights a microbatch sees); it knows nothing of programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from plain import batch, mlp, squares
from test_pipeline_schedules import deep
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Pipeline, ReplicatedWeights
from stretto.errors import StrettoError
from stretto.program.checks.versions import weight_versions
from stretto.program.program import Program

RATE, MOMENTUM, STEPS = 0.01, 0.9, 2


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
        self.newest = [{n: p.detach().clone() for n, p in s.named_parameters()} for s in stages]

    def step(self, batches: Sequence[tuple[list[Tensor], list[Tensor]]], scale: float) -> list[list[float]]:
        """One step from a drained pipeline; `batches` of all replicas; their losses."""
        m = len(batches[0][0])
        history = [[newest] for newest in self.newest]
        losses = [[0.0] * m for _ in batches]
        for update, start in enumerate(range(0, m, self.group)):
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
        self.newest = [h[-1] for h in history]
        return losses


def beside(
    program: Program,
    layout: Layout,
    delays: Sequence[int],
    group: int,
    make: Callable[[bool], list[nn.Module]],
) -> dict[int, int]:
    """Steps of the pipeline and of the replay; weights, losses and evaluation after each. Returns the weight
    versions held.
    """
    mesh, layers, m = Mesh(layout), make(True), program.microbatches
    pipe = Pipeline(layers, program, mesh, squares, weights=ReplicatedWeights(optimizer=optimizer))
    plain = make(False)
    cuts = [pipe.layers_of(s) for s in range(program.depth)]
    delayed = Delayed([nn.Sequential(*(plain[i] for i in c)) for c in cuts], delays, group)
    replica = mesh.index("dp")
    for step in range(STEPS):
        batches = [batch(step, r, m) for r in range(layout.dp)]
        wanted = delayed.step(batches, 0.25)
        losses = pipe.step(*batches[replica], 0.25)
        if losses is not None:
            expected = torch.tensor(wanted[replica], dtype=torch.float64)
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        for s, stage in pipe.stages.items():
            for p, wished in zip(stage.parameters(), delayed.newest[s].values(), strict=True):
                torch.testing.assert_close(p.detach(), wished, rtol=1e-12, atol=1e-12)
        before = pipe.evaluate(*batches[replica])  # with the newest weights
        if before is not None:
            x = torch.stack(batches[replica][0])
            for stage, weights in zip(delayed.stages, delayed.newest, strict=True):
                x = torch.func.functional_call(stage, weights, (x,))
            after = torch.stack([squares(y, t) for y, t in zip(x, batches[replica][1], strict=True)])
            torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)
    held = pipe.weight_versions
    promised = weight_versions(program)
    assert held == {s: promised[s] for s in held}
    pipe.close()
    mesh.close()
    return held


def cases(layout: Layout, microbatches: Sequence[int]) -> None:
    p = layout.pp
    for m in microbatches:
        for ours in (True, False):

            def make(tried: bool, ours: bool = ours) -> list[nn.Module]:
                return deep(8, tried and ours)

            held = beside(schedule("pipedream", p, m), layout, [p - 1 - r for r in range(p)], 1, make)
            if m >= 2 * p:
                assert held == {r: p - r for r in held}
            held = beside(schedule("pipedream", p, m, vertical_sync=True), layout, [p - 1] * p, 1, make)
            for group in {min(p, m), min(p + 1, m)}:
                program = schedule("pipedream-2bw", p, m, group=group)
                held = beside(program, layout, [1] * p, group, make)
                assert max(held.values()) <= 2


def test_one_rank_has_no_delay():
    beside(schedule("pipedream", 1, 5), Layout(), [0], 1, lambda _: mlp())


def test_two_ranks():
    on_ranks(2, cases, Layout(pp=2), (1, 2, 7))


def test_asynchronous_schedules_on_four_ranks():
    on_ranks(4, cases, Layout(pp=4), (3, 11))


def test_replicas_sum_their_gradients_before_every_update():
    on_ranks(4, cases, Layout(pp=2, dp=2), (5,))


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
