"""Claim: the executor's own cost is small. Stages are trivial (Linear(8, 8)), so that only overhead shows.

On one rank: microseconds per action beyond bare autograd, compared with torch's Schedule1F1B. On 2 and 4
ranks: compared with torch's schedule and a hand-written loop over isend and irecv.

    python benchmarks/executor.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Boundary, Pipeline
from stretto.layout import Layout
from stretto.program import schedule

WIDTH, SAMPLES, MICROBATCHES = 8, 4, 64


def squares(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).sum()


def bare(inputs: list[Tensor], targets: list[Tensor]) -> Step:
    """Forward and backward by autograd alone."""
    layer = nn.Linear(WIDTH, WIDTH)

    def step() -> None:
        for x, t in zip(inputs, targets, strict=True):
            squares(layer(x), t).backward()
        layer.zero_grad(set_to_none=True)

    return step


def stretto_step(inputs: list[Tensor], targets: list[Tensor]) -> Step:
    p = dist.get_world_size()
    pipe = Pipeline(
        [nn.Linear(WIDTH, WIDTH) for _ in range(p)],
        schedule("1f1b", ranks=p, microbatches=MICROBATCHES),
        Mesh(Layout(pp=p)),
        squares,
        boundary=Boundary((SAMPLES, WIDTH), torch.float32),
    )
    return lambda: pipe.step(inputs, targets)


def torchs(inputs: list[Tensor], targets: list[Tensor]) -> Step:
    p, rank = dist.get_world_size(), dist.get_rank()
    stage = PipelineStage(nn.Linear(WIDTH, WIDTH), rank, p, torch.device("cpu"))
    runner = Schedule1F1B(stage, MICROBATCHES, loss_fn=squares, scale_grads=False)
    x, t = torch.cat(inputs), torch.cat(targets)

    def step() -> None:
        args = (x,) if rank == 0 else ()
        last = rank == p - 1
        runner.step(*args, target=t if last else None, losses=[] if last else None, return_outputs=False)
        stage.submod.zero_grad(set_to_none=True)

    return step


def receive(into: Tensor, source: int) -> None:
    """Wait for a message."""
    work = dist.irecv(into, source)
    assert work is not None, "this rank is in the group"
    work.wait()


def by_hand(inputs: list[Tensor], targets: list[Tensor]) -> Step:
    """1F1B with isend and irecv: receives right before their use, sends waited for at the end."""
    p, rank = dist.get_world_size(), dist.get_rank()
    layer = nn.Linear(WIDTH, WIDTH)
    first, last = rank == 0, rank == p - 1
    ahead = min(p - 1 - rank, MICROBATCHES)

    def step() -> None:
        sends, alive = [], {}

        def forward(i: int) -> None:
            x = inputs[i]
            if not first:
                x = torch.empty(SAMPLES, WIDTH)
                receive(x, rank - 1)
                x.requires_grad_()
            y = layer(x)
            if last:
                y = squares(y, targets[i])
            else:
                sends.append((dist.isend(y.detach(), rank + 1), y))
            alive[i] = x, y

        def backward(i: int) -> None:
            x, y = alive.pop(i)
            if last:
                y.backward()
            else:
                gradient = torch.empty(SAMPLES, WIDTH)
                receive(gradient, rank + 1)
                torch.autograd.backward(y, gradient)
            if not first:
                sends.append((dist.isend(x.grad, rank - 1), x))

        for i in range(ahead):
            forward(i)
        for i in range(MICROBATCHES):
            if i + ahead < MICROBATCHES:
                forward(i + ahead)
            backward(i)
        for work, _ in sends:
            work.wait()
        layer.zero_grad(set_to_none=True)

    return step


def compete(rounds: int) -> list[Timing]:
    torch.manual_seed(0)
    inputs = [torch.randn(SAMPLES, WIDTH) for _ in range(MICROBATCHES)]
    targets = [torch.randn(SAMPLES, WIDTH) for _ in range(MICROBATCHES)]
    contestants = {"torch Schedule1F1B": torchs, "Stretto": stretto_step}
    contestants |= {"bare autograd": bare} if dist.get_world_size() == 1 else {"by hand": by_hand}
    steps = {name: make(inputs, targets) for name, make in contestants.items()}
    return race(steps, "torch Schedule1F1B", rounds=rounds, inner=5)


def main() -> None:
    args = arguments(__doc__, rounds=40)
    for ranks in (1, 2, 4):
        timings = on_ranks(ranks, compete, args.rounds)[0]
        report(
            f"Executor, {ranks} rank(s), {MICROBATCHES} microbatches",
            timings,
            "torch Schedule1F1B",
            args.out,
        )
        us = {t.name: t.median_ms * 1e3 / (2 * MICROBATCHES) for t in timings}
        print("us an action: " + ", ".join(f"{name} {value:.0f}" for name, value in us.items()))
        if ranks == 1:
            floor = us["bare autograd"]
            own, other = us["Stretto"] - floor, us["torch Schedule1F1B"] - floor
            print(f"own cost per action: Stretto {own:.1f} us, torch {other:.1f} us, ratio {own / other:.2f}")
        print(flush=True)


if __name__ == "__main__":
    main()
