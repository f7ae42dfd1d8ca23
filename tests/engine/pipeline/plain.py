"""Models as a user writes them, lists of modules, and what one process makes of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import Work

from stretto import Layout
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Pipeline
from stretto.engine.pipeline.exchange import Channel
from stretto.program.action import ActionKind
from stretto.program.program import Program

RATE = 0.05


def mlp(seed: int = 0) -> list[nn.Module]:
    """Eight layers, every boundary of another width; some without parameters."""
    torch.manual_seed(seed)
    widths = [3, 7, 5, 6, 4, 8]
    linears = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    layers = [
        linears[0],
        nn.Tanh(),
        linears[1],
        nn.LayerNorm(5),
        linears[2],
        linears[3],
        nn.Sigmoid(),
        linears[4],
    ]
    return [layer.double() for layer in layers]


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def batch(
    step: int, replica: int, microbatches: int, width: int = 3, out: int = 8
) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of one replica, a function of step, replica and microbatch."""

    def draw(i: int, n: int) -> Tensor:
        stream = torch.Generator().manual_seed(1 + i + 100 * replica + 10_000 * step + n)
        return torch.randn(4, n, dtype=torch.float64, generator=stream)

    return [draw(i, width) for i in range(microbatches)], [draw(i, out) for i in range(microbatches)]


@dataclass
class Outcome:
    """Results of one step in one process: losses by replica and microbatch, gradients by parameter."""

    losses: list[list[float]]
    gradients: list[Tensor]


def reference(
    layers: Sequence[nn.Module],
    steps: int,
    replicas: int,
    microbatches: int,
    scale: float,
    loss: Callable[..., Tensor],
) -> list[Outcome]:
    """Train the layers in one process, all replicas one after the other."""
    model = nn.Sequential(*layers)
    outcomes = []
    for step in range(steps):
        model.zero_grad()
        losses = []
        for replica in range(replicas):
            inputs, targets = batch(step, replica, microbatches)
            values = [loss(model(x), t) for x, t in zip(inputs, targets, strict=True)]
            (scale * torch.stack(values).sum()).backward()
            losses.append([v.item() for v in values])
        outcomes.append(Outcome(losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        descend(list(model.parameters()))
    return outcomes


@torch.no_grad()
def descend(parameters: Sequence[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None:
            p -= RATE * p.grad


def close(computed: Tensor, plain: Tensor, label: str) -> None:
    torch.testing.assert_close(computed, plain, rtol=1e-11, atol=1e-12, msg=lambda text: f"{label}: {text}")


def check(
    make: Callable[[], list[nn.Module]],
    program: Program,
    layout: Layout,
    label: str,
    *,
    steps: int = 2,
    loss: Callable[..., Tensor] = squares,
    **options: object,
) -> None:
    """Steps of a pipeline of this rank beside one process: losses, every gradient held here, evaluation."""
    plain, layers, scale, m = make(), make(), 0.25, program.microbatches
    names = {id(p): i for i, p in enumerate(nn.Sequential(*layers).parameters()) if p.requires_grad}
    trained = [i for i, p in enumerate(nn.Sequential(*layers).parameters()) if p.requires_grad]
    mesh = Mesh(layout)
    pipe = Pipeline(layers, program, mesh, loss, **options)  # type: ignore[arg-type]
    sent = watch_sends(pipe)
    for step, wanted in enumerate(reference(plain, steps, layout.dp, m, scale, loss)):
        replica = mesh.index("dp")
        inputs, targets = batch(step, replica, m)
        sent.clear()
        before = evaluate(pipe, copy.copy(inputs), targets, label)
        losses = pipe.step(inputs, targets, scale)
        if step > 0:  # by then all buffers are there, at addresses of their own
            nothing_sent_from_a_buffer(pipe, sent, label)
        assert (losses is not None) == pipe.holds_loss, label
        wished = torch.tensor(wanted.losses[replica], dtype=torch.float64)
        if losses is not None:  # where the model has copies, those of this rank's own microbatches
            mine = [i for i, c in enumerate(program.copy_of) if (c + 1) * program.depth - 1 in pipe.stages]
            close(losses.double(), wished[mine], f"{label} step {step} losses")
        assert (before is not None) == (program.depth - 1 in pipe.stages), label
        if before is not None:
            close(before, wished, f"{label} step {step} evaluation")
        count = 0
        for p in pipe.parameters():
            if p.requires_grad:
                at = trained.index(names[id(p)])
                close(p.grad, wanted.gradients[at], f"{label} step {step} gradient {names[id(p)]}")
                count += 1
        assert count == sum(p.requires_grad for p in pipe.parameters())
        nothing_left(pipe, label)
        descend(pipe.parameters())
        if step == 0:  # what the usual loop does, although `step` starts from zero by itself
            torch.optim.SGD(pipe.parameters() or [nn.Parameter(torch.zeros(1))]).zero_grad()
    pipe.close()
    mesh.close()


def evaluate(pipe: Pipeline, inputs: list[Tensor], targets: list[Tensor], label: str) -> Tensor | None:
    """Losses without training; gradients and modes stay as they are."""
    gradients = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    losses = pipe.evaluate(inputs, targets)
    now = [p.grad for p in pipe.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, now, strict=True)), (
        f"{label}: evaluation touched gradients"
    )
    nothing_left(pipe, label)
    return losses


def watch_sends(pipe: Pipeline) -> set[int]:
    """Addresses of the memory that messages are sent from, as they are sent."""
    sent: set[int] = set()
    transfer = pipe._transfer
    if transfer is not None:
        start = transfer.send

        def send(tensor: Tensor, channel: Channel) -> Work:
            sent.add(tensor.untyped_storage().data_ptr())
            return start(tensor, channel)

        transfer.send = send  # type: ignore[method-assign]
    return sent


def nothing_sent_from_a_buffer(pipe: Pipeline, sent: set[int], label: str) -> None:
    """The next message may come into a buffer while the last one that was read from it is still being sent.

    Inputs in training are the exception: they stay until a backward that needs the message to have arrived.
    """
    for executor in [pipe._train, *pipe._infer.values()]:
        if executor is not None and executor._exchange is not None:
            for (stage, kind, _), buffers in executor._exchange.memory.items():
                if kind is ActionKind.RECV_B or executor is not pipe._train:
                    for buffer in buffers:
                        assert buffer.untyped_storage().data_ptr() not in sent, (
                            f"{label}: stage {stage} {kind}"
                        )


def nothing_left(pipe: Pipeline, label: str) -> None:
    """No tensor of a step outlives it."""
    for executor in [pipe._train, *pipe._infer.values()]:
        if executor is None:
            continue
        live = executor.live
        assert not live.sends, label
        assert not live.receives, label
        for batch in (live.inputs, live.targets, live.scales):
            assert batch == [None] * live.ring, label
        for stage in live.stages.values():
            for slots in (stage.x, stage.y, stage.root, stage.dx):
                assert slots == [None] * len(slots), label
            assert not stage.queue, label
            assert stage.weight_work == [None] * len(stage.weight_work), label
