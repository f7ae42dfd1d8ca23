"""A user's list of modules in a pipeline equals one process: losses, every gradient, steps in a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plain import batch, check, mlp, squares
from torch import Tensor, nn

from ranks import on_ranks
from stretto import Layout, schedule
from stretto.engine.parallel.data.gradients import GradientBuffer
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.engine.pipeline import Pipeline, ReplicatedWeights
from stretto.program import Action, ActionKind
from stretto.program.program import Program

# ------------------------------------------------------------------ models with a catch


def parallel_layers() -> list[nn.Module]:
    """`mlp` with layers that can put their weight gradients off."""
    return [ParallelLinear(x.weight, x.bias) if isinstance(x, nn.Linear) else x for x in mlp()]


def tied(*shared: int) -> list[nn.Module]:
    """Eight layers; the `shared` of 1, 3, 4 and 6 have one weight between them."""
    torch.manual_seed(1)
    square = [nn.Linear(8, 8) for _ in range(5)]
    layers = [nn.Linear(3, 8), square[0], nn.Tanh(), *square[1:], nn.Tanh()]
    for at in shared[1:]:
        layers[at].weight = layers[shared[0]].weight
    return [layer.double() for layer in layers]


def one_module_twice() -> list[nn.Module]:
    layers = tied()
    layers[6] = layers[1]
    return layers


def one_parallel_module_twice() -> list[nn.Module]:
    layers = parallel_layers()
    layers = [layers[0], nn.Tanh(), ParallelLinear(*square()), nn.Tanh(), nn.Linear(7, 7).double(), nn.Tanh()]
    return [*layers, layers[2], nn.Linear(7, 8).double()]


def square() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(*size, dtype=torch.float64)) for size in ((7, 7), (7,))]


def frozen_first() -> list[nn.Module]:
    """A first stage that learns nothing, and a frozen layer among others."""
    layers = mlp()
    for at in (0, 4):
        layers[at].requires_grad_(False)
    return layers


class Narrow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 1:]


class Turn(nn.Module):
    """Another shape, and one more: its gradient is a view of what comes in, its output is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, -1) + 1.0


class Back(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, -1)


def views() -> list[nn.Module]:
    """Stages that compute nothing: what they pass on lies in the buffer of what they received."""
    torch.manual_seed(2)
    return [
        nn.Linear(3, 9).double(),
        Narrow(),
        nn.Linear(8, 6).double(),
        nn.Identity(),
        Turn(),
        Back(),
        nn.Linear(6, 8).double(),
    ]


def cut(*starts: int, layers: int = 8) -> list[range]:
    return [range(a, b) for a, b in zip((0, *starts), (*starts, layers), strict=True)]


# ------------------------------------------------------------------ programs with a split backward


def split(program: Program, late: int) -> Program:
    """Each B as I, with its W `late` backwards later: 0 at once, many: all at the end."""
    orders = []
    for order in program.orders:
        actions, waiting = list[Action](), list[Action]()
        for action in order:
            if action.kind is not ActionKind.B:
                actions.append(action)
                continue
            actions.append(Action(action.stage, ActionKind.I, action.microbatch))
            waiting.append(Action(action.stage, ActionKind.W, action.microbatch))
            if len(waiting) > late:
                actions.append(waiting.pop(0))
        orders.append((*actions, *waiting))
    return replace(program, name="split", orders=tuple(orders))


def some_split(program: Program) -> Program:
    """Odd microbatches with B, even ones with I and W."""
    orders = []
    for order in program.orders:
        actions = list[Action]()
        for a in order:
            if a.kind is ActionKind.B and a.microbatch is not None and a.microbatch % 2 == 0:
                actions += [
                    Action(a.stage, ActionKind.I, a.microbatch),
                    Action(a.stage, ActionKind.W, a.microbatch),
                ]
            else:
                actions.append(a)
        orders.append(tuple(actions))
    return replace(program, name="partly split", orders=tuple(orders))


# ------------------------------------------------------------------ what each number of ranks runs


def plain_cases(ranks: int) -> None:
    layout = Layout(pp=ranks)
    for m in (1, ranks + 1):
        for name in ("naive", "gpipe", "1f1b"):
            check(mlp, schedule(name, ranks=ranks, microbatches=m), layout, f"{name} p={ranks} m={m}")
        for chunks in (2, 3):
            if ranks * chunks <= 8:
                program = schedule("interleaved", ranks=ranks, microbatches=m, chunks=chunks)
                check(mlp, program, layout, f"interleaved p={ranks} v={chunks} m={m}")


def split_cases(layout: Layout) -> None:
    p = layout.pp
    for m, late in ((3, 0), (3, 1), (3, 99), (1, 99)) if layout.dp == 1 else ((3, 1), (3, 99)):
        for base in (
            schedule("1f1b", ranks=p, microbatches=m),
            schedule("interleaved", ranks=p, microbatches=m),
        ):
            label = f"{layout} {base.name} m={m} with W {late} backwards later"
            check(parallel_layers, split(base, late), layout, label)
    check(
        parallel_layers,
        some_split(schedule("1f1b", ranks=p, microbatches=4)),
        layout,
        f"{layout} partly split",
    )
    check(mlp, split(schedule("1f1b", ranks=p, microbatches=3), 1), layout, f"{layout} split, plain layers")


def one_rank() -> None:
    for name in ("naive", "gpipe", "1f1b", "interleaved"):
        for m in (1, 3):
            check(mlp, schedule(name, ranks=1, microbatches=m), Layout(), f"{name} p=1 m={m}")
    program = schedule("interleaved", ranks=1, microbatches=2, chunks=4)
    check(lambda: tied(1, 3, 6), program, Layout(), "tied stages of one rank")
    check(one_module_twice, program, Layout(), "one module in two stages of one rank")
    split_cases(Layout())
    for late in (0, 99):
        check(
            one_parallel_module_twice,
            split(program, late),
            Layout(),
            f"one module in two split stages, {late}",
        )


def two_ranks() -> None:
    layout = Layout(pp=2)
    plain_cases(2)
    split_cases(layout)
    two, four = (schedule("interleaved", ranks=2, microbatches=3, chunks=v) for v in (1, 2))
    check(lambda: tied(1, 6), two, layout, "tied first and last", cut=cut(4))
    check(lambda: tied(1, 3, 6), two, layout, "tied twice in the first stage and in the last", cut=cut(4))
    check(lambda: tied(1, 4), four, layout, "tied stages 0 and 2 of rank 0", cut=cut(2, 4, 6))
    check(lambda: tied(1, 3, 4, 6), four, layout, "tied in all stages", cut=cut(2, 4, 6))
    check(one_module_twice, two, layout, "one module in two stages", cut=cut(4))
    check(frozen_first, two, layout, "frozen first stage", cut=cut(2))
    check(views, schedule("1f1b", ranks=2, microbatches=3), layout, "views", cut=cut(1, layers=7))


def four_ranks() -> None:
    plain_cases(4)
    for name in ("gpipe", "1f1b"):
        for where in (cut(1, 4, 6, layers=7), cut(1, 3, 4, layers=7)):
            program = schedule(name, ranks=4, microbatches=7)
            check(views, program, Layout(pp=4), f"views {where}", cut=where)
    check(
        lambda: tied(1, 6),
        schedule("1f1b", ranks=4, microbatches=3),
        Layout(pp=4),
        "tied over four",
        cut=cut(2, 4, 6),
    )
    both = Layout(dp=2, pp=2)
    for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
        layout = replace(both, order=order)
        for make, program in (
            (mlp, schedule("1f1b", ranks=2, microbatches=3)),
            (lambda: tied(1, 6), schedule("interleaved", ranks=2, microbatches=2)),
        ):
            check(
                make,
                program,
                layout,
                f"{layout} {program.name}",
                weights=ReplicatedWeights(bucket_bytes=64),
            )
    four = schedule("interleaved", ranks=2, microbatches=3, chunks=2)
    check(
        lambda: tied(1, 3, 4, 6),
        four,
        both,
        "replicas tied in all stages",
        cut=cut(2, 4, 6),
        weights=ReplicatedWeights(bucket_bytes=64),
    )
    check(
        frozen_first,
        schedule("1f1b", ranks=2, microbatches=3),
        both,
        "replicas with a frozen stage",
        cut=cut(2),
    )
    split_cases(both)
    overlapped()
    check(
        mlp,
        schedule("1f1b", ranks=1, microbatches=2),
        Layout(dp=4),
        "replicas alone",
        weights=ReplicatedWeights(bucket_bytes=64),
    )


def overlapped() -> None:
    """From the second step on every bucket of every stage is on its way when its last backward is done."""
    program = schedule("interleaved", ranks=2, microbatches=3, chunks=2)
    mesh = Mesh(Layout(dp=2, pp=2))
    pipe = Pipeline(mlp(), program, mesh, squares, weights=ReplicatedWeights(bucket_bytes=64))
    launched: dict[int, int] = {}
    buffers = pipe.buffers
    for stage, buffer in buffers.items():

        def flush(stage: int = stage, buffer: GradientBuffer = buffer) -> None:
            launched.setdefault(stage, buffer._launched)
            GradientBuffer.flush(buffer)

        buffer.flush = flush  # type: ignore[method-assign]
    for step in range(3):
        launched.clear()
        pipe.step(*batch(step, mesh.index("dp"), 3))
        for stage, buffer in buffers.items():
            assert len(buffer.gradients) > 0
            assert launched[stage] == (len(buffer.gradients) if step else 0), f"stage {stage} in step {step}"
    pipe.close()
    mesh.close()


def test_layers_in_one_process():
    one_rank()


def test_on_two_ranks():
    on_ranks(2, two_ranks)


def test_on_four_ranks():
    on_ranks(4, four_ranks)


def test_the_comparison_finds_a_wrong_loss_scale():
    """The same comparison finds a loss of another scale."""
    program = schedule("1f1b", ranks=1, microbatches=2)
    calls = iter(range(100))

    def wrong(y: Tensor, t: Tensor) -> Tensor:
        return squares(y, t) * (1.0 if next(calls) < 2 else 1.0 + 1e-9)

    with pytest.raises(AssertionError, match="wrong step 0"):
        check(mlp, program, Layout(), "wrong", loss=wrong, steps=1)
