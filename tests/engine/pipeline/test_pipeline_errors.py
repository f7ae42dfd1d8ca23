"""Errors in the use of a pipeline, and the state after a trial forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from plain import batch, mlp, squares
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Boundary, Pipeline, PipelineError
from stretto.engine.pipeline.executor import error_text
from stretto.errors import StrettoError
from stretto.run.launch.local import RankFailed

PROGRAM = schedule("1f1b", ranks=1, microbatches=2)
TWO = schedule("1f1b", ranks=2, microbatches=3)


def pipeline(layers: list[nn.Module] | None = None, **options: object) -> Pipeline:
    return Pipeline(mlp() if layers is None else layers, PROGRAM, Mesh(Layout()), squares, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "phrases"),
    [
        (lambda: Pipeline(mlp(), TWO, Mesh(Layout()), squares), ("for 2 pipeline ranks", "pp=1", "ranks=pp")),
        (
            lambda: Pipeline(mlp()[:1], schedule("interleaved", 1, 2, chunks=2), Mesh(Layout()), squares),
            ("1 layers over 2 stages",),
        ),
        (lambda: pipeline(cut=[range(7)]), ("cut [(0, 7)] of 8 layers into 1 stages", "layers 0 to 7")),
        (lambda: pipeline(cut=[range(4), range(4, 8)]), ("into 1 stages",)),
        (lambda: pipeline(cut=[range(1, 8)]), ("cut [(1, 8)]",)),
        (lambda: pipeline().step(batch(0, 0, 3)[0], batch(0, 0, 2)[1]), ("3 inputs for 2 microbatches",)),
        (lambda: pipeline().step(batch(0, 0, 2)[0], batch(0, 0, 1)[1]), ("1 targets for 2 microbatches",)),
        (lambda: pipeline().step(batch(0, 0, 2)[0]), ("0 targets for 2 microbatches",)),
        (lambda: pipeline().evaluate([], []), ("0 inputs for 0 microbatches",)),
        (
            lambda: pipeline().evaluate(*batch(0, 0, 3)[:1], batch(0, 0, 2)[1]),
            ("2 targets for 3 microbatches",),
        ),
        (lambda: Pipeline(mlp(), PROGRAM, Mesh(Layout())).step(batch(0, 0, 2)[0]), ("needs a loss",)),
    ],
)
def test_bad_input_is_named(make: Callable[[], object], phrases: tuple[str, ...]):
    with pytest.raises(StrettoError) as error:
        make()
    for word in phrases:
        assert word in str(error.value)


def test_without_a_loss_evaluation_gives_the_outputs():
    layers = mlp()
    pipe = Pipeline(layers, schedule("interleaved", 1, 2, chunks=3), Mesh(Layout()))
    inputs, _ = batch(0, 0, 5)
    outputs = pipe.evaluate(inputs)
    assert torch.equal(outputs, torch.stack([nn.Sequential(*layers)(x) for x in inputs]))
    assert not outputs.requires_grad


def test_evaluation_leaves_every_module_in_its_mode():
    drop, evaluating = nn.Dropout(0.5), nn.Dropout(0.5).eval()
    pipe = pipeline([nn.Linear(3, 8).double(), drop, nn.Sequential(evaluating)])
    inputs, targets = batch(0, 0, 2)
    first, again = pipe.evaluate(inputs, targets), pipe.evaluate(inputs, targets)
    assert torch.equal(first, again), "dropout was on"
    assert drop.training
    assert not evaluating.training


class Fails(nn.Module):
    """Raises at a call: at the trial forward, or at the second microbatch after it."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise ValueError("no such luck")
        return x * 1.0


class FailsBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0

        def fail(_: Tensor) -> None:
            raise ValueError("no way back")

        if y.requires_grad:
            y.register_hook(fail)
        return y


def failing(kind: str) -> None:
    layers = mlp()
    layers[7] = {
        "forward": nn.Sequential(Fails(1), layers[7]),
        "backward": nn.Sequential(layers[7], FailsBackward()),
    }.get(kind, layers[7])
    if kind == "int":
        layers[3] = ToInt()
    boundary = Boundary((4, 5), torch.float64) if kind != "int" else None
    pipe = Pipeline(layers, TWO, Mesh(Layout(pp=2)), squares, cut=[range(4), range(4, 8)], boundary=boundary)
    inputs, targets = batch(0, 0, 3)
    if kind == "short":
        inputs[1] = inputs[1][:2]  # a short microbatch
    pipe.step(inputs, targets)


class ToInt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


@pytest.mark.parametrize(
    ("kind", "phrases"),
    [
        ("forward", ("pipeline rank 1 at 1F1: no such luck",)),
        ("backward", ("pipeline rank 1 at 1B0: no way back",)),
        ("short", ("pipeline rank 0 at 0SEND_F1", "sends [2, 5]", "expects [4, 5]", "one shape")),
        ("int", ("stage 0 returns a torch.int64 tensor of shape (4, 5)", "floating-point")),
    ],
)
def test_the_rank_and_the_action_are_named(kind: str, phrases: tuple[str, ...]):
    with pytest.raises((RankFailed, StrettoError)) as error:
        on_ranks(2, failing, kind)
    for word in phrases:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError(0), "KeyError: 0"),
        (IndexError("list index out of range"), "IndexError: list index out of range"),
        (AssertionError(), "AssertionError"),
        (ValueError("no such luck"), "no such luck"),
        (StrettoError("too long"), "too long"),
    ],
)
def test_terse_errors_are_reported_with_their_type(error: Exception, text: str):
    assert error_text(error) == text


def test_a_failure_in_the_trial_forward_names_the_stage():
    layers = [Fails(0), nn.Linear(3, 8).double()]
    pipe = Pipeline(layers, schedule("interleaved", 1, 2, chunks=2), Mesh(Layout()), squares)
    with pytest.raises(PipelineError, match="pipeline rank 0 in the trial forward of stage 0: no such luck"):
        pipe.step(*batch(0, 0, 2))


# ------------------------------------------------------------------ the trial forward


def probed() -> dict[int, tuple[int, ...]]:
    """Every boundary has its own shape; the trial leaves the random stream and running averages alone."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7)),
        nn.Linear(7, 5),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 2)),
        nn.Linear(2, 8),
    ]
    layers = [layer.double() for layer in layers]
    program = schedule("interleaved", ranks=2, microbatches=2, chunks=2)
    pipe = Pipeline(layers, program, Mesh(Layout(pp=2)), squares, cut=[range(s, s + 1) for s in range(4)])
    stream = torch.get_rng_state()
    pipe._executor(pipe._rounds, batch(0, 0, 2)[0])
    assert torch.equal(torch.get_rng_state(), stream)
    for stage in pipe.stages.values():
        for part in stage.modules():
            assert part.training
            if isinstance(part, nn.BatchNorm1d):
                assert part.num_batches_tracked == 0
    assert pipe._boundaries is not None
    assert {b.dtype for (b,) in pipe._boundaries.values()} == {torch.float64}
    dist.barrier()
    pipe.close()
    return {stage: boundary.shape for stage, (boundary,) in pipe._boundaries.items()}


def test_boundaries_are_found_by_a_trial_forward():
    shapes = {1: (4, 7), 2: (4, 5), 3: (4, 2)}
    for results in on_ranks(2, probed):
        assert results == shapes  # each rank holds two of four stages, and so touches all three boundaries
