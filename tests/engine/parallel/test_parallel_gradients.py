"""Gradient buckets: one flat buffer, one reduction a bucket a step, started while the backward runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from counting import CountingGroup
from torch import Tensor, nn

from ranks import on_ranks
from stretto.engine.parallel.data.gradients import BUCKET_BYTES, GradientBuffer, buffer_of
from stretto.engine.parallel.data.unit import FlatParameter
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.engine.parallel.tensor.vocabulary import VocabParallelEmbedding

WIDTH, VOCAB, DEPTH = 4, 7, 3


class Model(nn.Module):
    """All kinds of layers that report gradients: fused ones, autograd's, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok = VocabParallelEmbedding(nn.Parameter(torch.randn(VOCAB, WIDTH)), 0, None)
        self.fused = ParallelLinear(nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH)))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.fused(self.fused(self.tok(ids)))
        for layer in self.layers:
            x = layer(x).tanh()
        return self.norm(self.frozen(x)).square().sum()

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]


def batch(rank: int, step: int, microbatch: int) -> Tensor:
    stream = torch.Generator().manual_seed(100 * rank + 10 * step + microbatch)
    return torch.randint(VOCAB, (2, 3), generator=stream)


def run_step(model: nn.Module, buffer: GradientBuffer, step: int, microbatches: int) -> None:
    """A step as the executor takes it."""
    buffer.zero()
    for i in range(microbatches):
        if i == microbatches - 1:
            buffer.arm()
        model(batch(rank(), step, i)).backward()
    buffer.flush()
    buffer.wait()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def expected(ranks: int, step: int, microbatches: int) -> dict[str, Tensor]:
    """Gradients of all ranks' microbatches by autograd alone."""
    model = Model()
    for r in range(ranks):
        for i in range(microbatches):
            model(batch(r, step, i)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model: Model, wanted: dict[str, Tensor], label: str) -> None:
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-12, atol=1e-12, msg=f"{label}: {name}")


def buffer(
    parameters: list[nn.Parameter], modules: list[nn.Module], group: Any, bucket_bytes: int = BUCKET_BYTES
) -> GradientBuffer:
    return buffer_of(parameters, modules, lambda _: group, bucket_bytes)


# ------------------------------------------------------------------ one rank


def test_every_gradient_is_a_view_of_the_buffer_last_layer_first():
    model = Model()
    gradient_buffer = buffer(model.trained(), [model], None)
    assert gradient_buffer.flats[0].numel() == sum(p.numel() for p in model.trained())
    for p in model.trained():
        assert p.grad.untyped_storage().data_ptr() == gradient_buffer.flats[0].untyped_storage().data_ptr()
    places = [p.grad.storage_offset() for p in model.trained()]
    assert places == sorted(places, reverse=True)
    gradient_buffer.flats[0].fill_(2.0)
    assert all(bool((p.grad == 2.0).all()) for p in model.trained())
    assert model.frozen.weight.grad is None


def test_microbatches_add_up_in_place_and_zero_starts_anew():
    model = Model()
    gradient_buffer = buffer(model.trained(), [model], None)
    before = [p.grad.data_ptr() for p in model.trained()]
    for step in range(2):
        run_step(model, gradient_buffer, step, 3)
        check(model, expected(1, step, 3), f"step {step}")
    assert [p.grad.data_ptr() for p in model.trained()] == before


def test_zero_grad_to_none_keeps_the_gradient_views():
    model = Model()
    gradient_buffer = buffer(model.trained(), [model], None)
    optimizer = torch.optim.SGD(model.trained(), lr=0.0)
    run_step(model, gradient_buffer, 0, 1)
    optimizer.zero_grad()
    assert model.norm.weight.grad is None
    run_step(model, gradient_buffer, 1, 1)
    check(model, expected(1, 1, 1), "after zero_grad")
    assert all(
        p.grad.untyped_storage().data_ptr() == gradient_buffer.flats[0].data_ptr() for p in model.trained()
    )


def test_a_parameter_is_never_cut():
    parameters = [nn.Parameter(torch.zeros(n)) for n in (3, 5, 2, 9, 1)]
    gradient_buffer = buffer(parameters, [], None, bucket_bytes=4 * 4)
    # from the back: 1 + 9, 2 + 5, and 3 that are left
    assert [flat.numel() for flat in gradient_buffer.flats] == [10, 7, 3]


def test_a_buffer_without_parameters_works():
    gradient_buffer = buffer([], [nn.ReLU()], None)
    gradient_buffer.zero()
    gradient_buffer.arm()
    gradient_buffer.flush()
    gradient_buffer.wait()
    assert gradient_buffer.flats == []


def test_one_rank_reports_units_while_the_backward_runs():
    """From the second step on, as gradients of several ranks are: what is offloaded then moves meanwhile."""
    model, reported = Model(), list[int]()
    gradient_buffer = buffer(model.trained(), [model], None, bucket_bytes=8)
    units = [gradient.unit for gradient in gradient_buffer.gradients]
    wanted = dict[str, Tensor]()

    def report(unit: FlatParameter) -> None:
        for name, p in model.named_parameters():
            if any(p is other for other in unit.parameters):
                torch.testing.assert_close(p.grad, wanted[name], rtol=1e-12, atol=1e-12, msg=name)
        reported.append(units.index(unit))

    gradient_buffer.report_to(report)
    for step in range(3):
        wanted = expected(1, step, 2)
        reported.clear()
        gradient_buffer.zero()
        model(batch(0, step, 0)).backward()
        assert not reported
        gradient_buffer.arm()
        model(batch(0, step, 1)).backward()
        assert len(reported) == (len(units) if step else 0)
        gradient_buffer.flush()
        gradient_buffer.wait()
        assert reported == list(range(len(units)))


# ------------------------------------------------------------------ two ranks


def reduced(microbatches: int, bucket_bytes: int) -> None:
    model, group = Model(), CountingGroup(dist.group.WORLD)
    gradient_buffer = buffer(model.trained(), [model], group, bucket_bytes)  # type: ignore[arg-type]
    for step in range(3):
        group.log.clear()
        run_step(model, gradient_buffer, step, microbatches)
        check(model, expected(2, step, microbatches), f"step {step}, {microbatches} microbatches")
        sizes = [flat.numel() for flat in gradient_buffer.flats]
        assert group.log == [("reduce", size) for size in sizes], "one reduction a bucket, in order"


def overlapped() -> list[list[Any]]:
    """Record the order of autograd's gradients and of reductions, for each of two steps."""
    model, log = Model(), list[Any]()
    group = CountingGroup(dist.group.WORLD, log)
    for name, p in model.named_parameters():
        if p.requires_grad and p is not model.tok.weight:
            p.register_hook(lambda _, name=name: log.append(name))
    reported = model.tok.add_weight_gradient

    def first_layer(*arguments: Tensor) -> None:
        log.append("tok.weight")
        reported(*arguments)

    model.tok.add_weight_gradient = first_layer  # type: ignore[method-assign]
    gradient_buffer = buffer(model.trained(), [model], group, bucket_bytes=1)  # type: ignore[arg-type]
    steps = []
    for step in range(2):
        log.clear()
        run_step(model, gradient_buffer, step, 2)
        steps.append(list(log))
    return steps


def late() -> str:
    """A model that in its second step uses a layer once more than in its first."""
    model = nn.Linear(2, 2)
    fused = ParallelLinear(model.weight, model.bias)
    gradient_buffer = buffer(list(model.parameters()), [fused], dist.group.WORLD)
    for uses in (1, 2):
        gradient_buffer.zero()
        gradient_buffer.arm()
        y = torch.ones(1, 2)
        for _ in range(uses):
            y = fused(y)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return str(error)
        gradient_buffer.flush()
        gradient_buffer.wait()
    return "nothing was said"


def fewer() -> None:
    """A layer left out of a step: its bucket is reduced at the end."""
    layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    group = CountingGroup(dist.group.WORLD)
    gradient_buffer = buffer(list(layers.parameters()), [layers], group, bucket_bytes=1)  # type: ignore[arg-type]
    for used in (2, 1, 2):
        group.log.clear()
        gradient_buffer.zero()
        gradient_buffer.arm()
        y = torch.ones(1, 2)
        for layer in layers[:used]:
            y = layer(y)
        y.sum().backward()
        gradient_buffer.flush()
        gradient_buffer.wait()
        assert len(group.log) == 4
        assert layers[0].bias.grad is not None
        assert (layers[1].bias.grad == (2.0 if used == 2 else 0.0)).all()


def blamed() -> None:
    """In the first step rank 1's gradient is NaN, and the sum of both; the blame ends with the step."""
    layer = nn.Linear(2, 2)
    gradient_buffer = buffer(list(layer.parameters()), [layer], dist.group.WORLD)
    for step in range(2):
        gradient_buffer.zero()
        gradient_buffer.arm()
        factor = float("nan") if (rank(), step) == (1, 0) else 1.0
        (factor * layer(torch.ones(1, 2))).sum().backward()
        gradient_buffer.flush()
        gradient_buffer.wait()
        assert bool(layer.weight.grad.isfinite().all()) == (step == 1)
        assert len(gradient_buffer.own_bad()) == (2 if (rank(), step) == (1, 0) else 0)


def every_case() -> tuple[list[list[Any]], str]:
    for microbatches in (1, 3):
        for bucket_bytes in (1, 200, 10**6):
            reduced(microbatches, bucket_bytes)
    fewer()
    blamed()
    return overlapped(), late()


@pytest.fixture(scope="module")
def on_two() -> Any:
    return on_ranks(2, every_case)


def test_gradients_are_summed_over_ranks_once_a_step(on_two):
    assert len(on_two) == 2  # the checks ran on the ranks


def test_reduction_starts_before_the_backward_ends(on_two):
    for steps, _ in on_two:
        first, second = ([("reduce" if isinstance(e, tuple) else e) for e in step] for step in steps)
        assert first.index("reduce") > max(
            i for i, e in enumerate(first) if e == "tok.weight"
        )  # still counting
        last_backward = len(second) - 1 - second[::-1].index("tok.weight")
        early = second[:last_backward].count("reduce")
        # all but the embedding's own, the last thing that the backward does; none in the first microbatch
        assert early == second.count("reduce") - 1
        assert "reduce" not in second[: second.index("tok.weight") + 1]
        # a layer is on its way before the one below it has its gradient
        top = second.index("layers.2.bias", second.index("tok.weight"))
        assert "reduce" in second[top : second.index("layers.0.weight", top)]


def test_a_gradient_that_comes_after_its_reduction_stops_the_step(on_two):
    for _, message in on_two:
        assert "more gradients than in the first step" in message
