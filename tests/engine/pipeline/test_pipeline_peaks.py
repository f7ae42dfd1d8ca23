"""Activations that are alive while a program runs, counted as memory, are those that the program names."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from plain import squares
from test_pipeline_schedules import Foreign
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.engine.pipeline import Pipeline, ReplicatedWeights
from stretto.engine.pipeline.activation_offload import ActivationCopies
from stretto.program import names
from stretto.program.memory import peak_activations, peak_held
from stretto.program.program import Program
from stretto.program.transforms.activations import offload, recompute

WIDTH, RANKS = 4, 4


class Counter:
    """Counts the observed tensors that are still in memory."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def show(self, tensor: Tensor) -> None:
        if torch.is_grad_enabled():  # a forward that keeps nothing does not count
            self.alive += 1
            self.peak = max(self.peak, self.alive)
            weakref.finalize(tensor.untyped_storage(), self._gone)

    def _gone(self) -> None:
        self.alive -= 1


def counting_reloads(counter: Counter) -> None:
    """Also count reloaded tensors, which have separate memory."""
    reload = ActivationCopies.reload

    def counted(self: ActivationCopies) -> None:
        saved = list(self._saved)
        reload(self)
        for tensor in saved:
            assert tensor.on_device is not None
            counter.show(tensor.on_device)

    ActivationCopies.reload = counted  # type: ignore[method-assign]


class Counted(nn.Module):
    """One layer whose weight gradient needs one tensor of its own: the activation that is counted."""

    def __init__(self, counter: Counter, parallel: bool) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH).double()
        self.linear = ParallelLinear(linear.weight, linear.bias) if parallel else Foreign(linear)
        self.counter = counter

    def forward(self, x: Tensor) -> Tensor:
        h = x + 1.0
        self.counter.show(h)
        return self.linear(h)


def peak(program: Program, parallel: bool) -> int:
    """The most activations alive on this rank in the second step."""
    counter, original = Counter(), ActivationCopies.reload
    counting_reloads(counter)
    mesh, m = Mesh(Layout(pp=program.ranks)), program.microbatches
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    if program.versions:
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)  # noqa: E731
    layers = [Counted(counter, parallel) for _ in range(program.depth)]
    pipe = Pipeline(layers, program, mesh, squares, weights=ReplicatedWeights(optimizer=optimizer))
    data = [torch.randn(2, WIDTH, dtype=torch.float64) for _ in range(m)]
    pipe.step(data, data)
    assert counter.alive == 0, f"{program.name}: {counter.alive} activations outlive the step"
    counter.peak = 0
    pipe.step(data, data)
    pipe.close()
    mesh.close()
    ActivationCopies.reload = original  # type: ignore[method-assign]
    return counter.peak


def programs(ranks: int, microbatches: int) -> list[Program]:
    results = [schedule(name, ranks, microbatches) for name in names()]
    results = [program for program in results if program.trains]
    base = schedule("1f1b", ranks, microbatches)
    return [*results, recompute(base), recompute(base, [0, 2]), offload(base), offload(base, [1, 2])]


def peaks(cases: list[tuple[Program, bool]]) -> list[int]:
    return [peak(program, parallel) for program, parallel in cases]


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_every_schedule_holds_the_predicted_peak(step: int):
    """With parallel layers and with layers of unknown classes in turn; or every third."""
    chosen = programs(RANKS, 2 * RANKS + 1)[::step]
    cases = [(program, index % 2 == 0) for index, program in enumerate(chosen)]
    for rank, counts in enumerate(on_ranks(RANKS, peaks, cases)):
        for (program, parallel), count in zip(cases, counts, strict=True):
            predicted = peak_held(program)[rank]
            assert count == predicted, (
                f"rank {rank}, {program.name}, parallel={parallel}: {count} alive, program says {predicted}"
            )


def test_peak_activations_count_chunks():
    program = schedule("interleaved", RANKS, 8)
    peaks_of_ranks = peak_held(program)
    assert peak_activations(program) == [count / 2 for count in peaks_of_ranks]
