"""Every synchronous schedule on real ranks, equals one process, with layers of ours and with plain ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from plain import batch, check, squares
from torch import nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.engine.pipeline import Pipeline, ReplicatedWeights
from stretto.errors import StrettoError
from stretto.program import names
from stretto.program.program import Program
from stretto.program.schedules.registry import options
from stretto.program.transforms.activations import offload, recompute
from stretto.program.transforms.sharding import gather


class Foreign(nn.Module):
    """A linear layer that is not recognised as one: its stage is split by walking the graph."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.kernel, self.offset = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kernel.t() + self.offset


def deep(layers: int, parallel: bool) -> list[nn.Module]:
    """Linear layers with others between, boundaries of all widths; without `parallel`, of unknown classes."""
    torch.manual_seed(3)
    widths = [3, *(4 + i % 4 for i in range((layers + 1) // 2 - 1)), 8]
    layers_made = list[nn.Module]()
    for at, (a, b) in enumerate(itertools.pairwise(widths)):
        linear = nn.Linear(a, b).double()
        layer = ParallelLinear(linear.weight, linear.bias) if at % 4 else linear
        layers_made.append(layer if parallel else Foreign(linear))
        layers_made.append((nn.LayerNorm(b) if at % 2 else nn.Tanh()).double())
    return layers_made[:layers]


@cache
def programs(ranks: int, microbatches: int) -> list[Program]:
    """Programs that train and update at the end, with values of their options that fit 16 stages. Some are
    searched for, which takes longer than a test: ranks receive them.
    """
    chosen = list[Program]()
    for name in names():
        inputs = options(name)
        choices: list[dict[str, int]] = [{}]
        if "chunks" in inputs and inputs["chunks"] is not None:
            choices.append({"chunks": 3})
        if "waves" in inputs:
            choices.append({"waves": 2})
        for choice in choices:
            try:
                program = schedule(name, ranks, microbatches, **choice)
            except StrettoError:  # not defined for this number of ranks or microbatches; others see to that
                continue
            if program.trains and not program.versions and program.depth <= 16:
                chosen.append(program)
    return chosen


def every_schedule(layout: Layout, chosen: list[Program], both: bool = False) -> None:
    """Programs with layers of ours and with plain ones in turn, or with `both`."""
    for index, program in enumerate(chosen):
        for parallel in (True, False) if both else (index % 2 == 0,):
            m = program.microbatches
            label = f"{program.name} {dict(program.parameters)} {layout} m={m} parallel={parallel}"
            layers = max(program.depth, 6) + (-max(program.depth, 6)) % 2
            check(
                lambda n=layers, o=parallel: deep(n, o),
                program,
                layout,
                label,
                weights=ReplicatedWeights(bucket_bytes=64),
            )


def test_every_schedule_on_one_rank():
    chosen = [*programs(1, 1), *programs(1, 4)]
    every_schedule(Layout(), chosen, True)
    wanted = {"gpipe", "bfs", "1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "hanayo"}
    assert wanted <= {program.name for program in chosen}


@pytest.mark.slow
def test_on_two_ranks():
    chosen = [*programs(2, 1), *programs(2, 5)]
    on_ranks(2, every_schedule, Layout(pp=2), chosen, True)
    assert {"zb-h1", "zb-v", "hanayo", "dualpipe-v", "dualpipe"} <= {program.name for program in chosen}


def test_every_sixth_schedule_on_four_ranks():
    on_ranks(4, every_schedule, Layout(pp=4), programs(4, 9)[::6])


@pytest.mark.slow
def test_on_four_ranks():
    chosen = programs(4, 9)
    on_ranks(4, every_schedule, Layout(pp=4), chosen)
    wanted = {"zb-h1", "zb-v", "hanayo", "dualpipe-v", "dualpipe", "chimera"}
    assert wanted <= {program.name for program in chosen}


def test_every_fourth_schedule_with_replicas():
    on_ranks(4, every_schedule, Layout(pp=2, dp=2), programs(2, 4)[1::4])


@pytest.mark.slow
def test_every_schedule_with_replicas():
    on_ranks(4, every_schedule, Layout(pp=2, dp=2), programs(2, 4))


# ------------------------------------------------------------------ ties, and what is kept between F and B


def tied(layers: int) -> list[nn.Module]:
    """Second and last layer share their weight, two in the middle theirs, and first and last a bias."""
    torch.manual_seed(1)
    linears = [nn.Linear(8, 8) for _ in range(layers - 1)]
    layers_made: list[nn.Module] = [nn.Linear(3, 8), *(ParallelLinear(x.weight, x.bias) for x in linears)]
    layers_made[-1].weight, layers_made[-1].bias = layers_made[1].weight, layers_made[0].bias
    layers_made[layers // 2].weight = layers_made[layers // 2 - 1].weight
    return [layer.double() for layer in layers_made]


def ties(ranks: int, chosen: list[Program]) -> None:
    for program in chosen:
        label = f"{program.name} with ties on {ranks} ranks"
        check(lambda p=program: tied(p.depth + 2), program, Layout(pp=ranks), label)


def test_ties_with_every_fourth_schedule():
    on_ranks(2, ties, 2, programs(2, 4)[::4])


@pytest.mark.slow
def test_ties_with_every_schedule():
    on_ranks(2, ties, 2, programs(2, 4))


def test_ties_on_four_ranks():
    wanted = {"interleaved", "hanayo", "chimera"}
    chosen = [program for program in programs(4, 4) if program.name in wanted]
    assert {program.name for program in chosen} == wanted
    on_ranks(4, ties, 4, chosen)


class Random(nn.Module):
    """Dropout from the process's own stream: its repetition must draw the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training) + 0.0 * x


def test_repeated_forwards_draw_what_the_first_drew():
    base = schedule("gpipe", 1, 4)
    results = list[list[torch.Tensor]]()
    for program in (base, recompute(base)):
        layers = deep(4, parallel=True)
        layers[1:1] = [Random()]
        pipe = Pipeline(layers, program, Mesh(Layout()), squares)
        inputs, targets = batch(0, 0, 4)
        pipe._executor(pipe._rounds, inputs)
        torch.manual_seed(7)
        pipe.step(inputs, targets)
        results.append([p.grad for p in pipe.parameters()])
        after = torch.rand(1)
        results[-1].append(after)  # and the stream goes on from the same place
    for plain, repeated in zip(*results, strict=True):
        assert torch.equal(plain, repeated)


def recomputing(ranks: int, schedules: Sequence[str]) -> None:
    layout = Layout(pp=ranks)
    for name in schedules:
        base = schedule(name, ranks, 4)
        some = tuple(range(0, base.stages, 2))
        for change, program in {
            "recompute": recompute(base),
            "recompute some": recompute(base, some),
            "offload": offload(base),
            "gather": gather(base),
            "both": offload(recompute(base, some), [s for s in range(base.stages) if s not in some]),
        }.items():
            parallel = change != "recompute"
            check(
                lambda n=base.depth, o=parallel: deep(max(n + n % 2, 6), o),
                program,
                layout,
                f"{name} {change}",
            )


@pytest.mark.parametrize(
    "schedules",
    [("zb-v", "dualpipe"), pytest.param(("1f1b", "interleaved", "zb-h1"), marks=pytest.mark.slow)],
)
def test_recomputation_offload_and_gathering(schedules: tuple[str, ...]):
    on_ranks(2, recomputing, 2, schedules)
