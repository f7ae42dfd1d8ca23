"""Claim: the executor's own cost is small under every schedule. Stages are trivial (Linear(8, 8)), so that
only overhead shows.

On one rank: microseconds per action beyond bare autograd, compared with torch's class of the same
schedule. On 2 and 4 ranks: compared with torch's, and with a hand-written loop that executes the same
orders with isend and irecv. All use nn.Linear, whose split backward walks the graph; `own layers` defer
their weight gradients themselves.

    python benchmarks/executor_schedules.py [--ranks 2]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.engine.pipeline import Boundary, Pipeline
from stretto.layout import Layout
from stretto.program import Program, schedule
from stretto.program.action import Action, ActionKind

WIDTH, SAMPLES, MICROBATCHES = 8, 4, 64


@dataclass(frozen=True)
class Race:
    """One schedule: Stretto's and torch's name for it, and the goals for the ratio of times."""

    name: str
    torchs: str
    chunks: int | None  # option of the schedule
    goal: float | None  # for the ratio of times on several ranks


RACES = (
    Race("gpipe", "ScheduleGPipe", None, None),
    Race("1f1b", "Schedule1F1B", None, None),
    Race("interleaved", "ScheduleInterleaved1F1B", 2, 0.6),
    Race("bfs", "ScheduleLoopedBFS", 2, None),
    Race("interleaved-zb", "ScheduleInterleavedZeroBubble", 2, 0.6),
    Race("zb-v", "ScheduleZBVZeroBubble", None, 0.75),
    Race("dualpipe-v", "ScheduleDualPipeV", None, 0.75),
)


def squares(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).sum()


def program_of(contest: Race, ranks: int) -> Program:
    return schedule(contest.name, ranks, MICROBATCHES, chunks=contest.chunks)


class Batch:
    """Inputs and targets of all microbatches, the same on every rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = [torch.randn(SAMPLES, WIDTH) for _ in range(MICROBATCHES)]
        self.targets = [torch.randn(SAMPLES, WIDTH) for _ in range(MICROBATCHES)]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def own_linear() -> nn.Module:
    return ParallelLinear(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH), nn.Parameter(torch.zeros(WIDTH)))


def bare(program: Program, batch: Batch, layer: Callable[[], nn.Module]) -> Step:
    """Forward and backward by autograd alone."""
    model = nn.Sequential(*(layer() for _ in range(program.stages)))

    def step() -> None:
        for x, t in zip(batch.inputs, batch.targets, strict=True):
            squares(model(x), t).backward()
        model.zero_grad(set_to_none=True)

    return step


def stretto_step(program: Program, batch: Batch, layer: Callable[[], nn.Module]) -> Step:
    pipe = Pipeline(
        [layer() for _ in range(program.stages)],
        program,
        Mesh(Layout(pp=program.ranks)),
        squares,
        boundary=Boundary((SAMPLES, WIDTH), torch.float32),
    )
    return lambda: pipe.step(batch.inputs, batch.targets)


def torchs(name: str, program: Program, batch: Batch) -> Step:
    """torch's class, with stages placed as in Stretto."""
    mine = program.stages_of(dist.get_rank())
    stages = [PipelineStage(nn.Linear(WIDTH, WIDTH), s, program.stages, torch.device("cpu")) for s in mine]
    schedule = getattr(schedules, name)
    single = issubclass(schedule, schedules.PipelineScheduleSingle)
    runner = schedule(stages[0] if single else stages, MICROBATCHES, loss_fn=squares, scale_grads=False)
    x, t = torch.cat(batch.inputs), torch.cat(batch.targets)
    first, last = 0 in mine, program.stages - 1 in mine

    def step() -> None:
        inputs = (x,) if first else ()
        runner.step(*inputs, target=t if last else None, losses=[] if last else None, return_outputs=False)
        for stage in stages:
            stage.submod.zero_grad(set_to_none=True)

    return step


class ByHand:
    """The program's orders executed naively: receives right before their use, sends waited for at the
    end, one tag a message.
    """

    def __init__(self, program: Program, batch: Batch) -> None:
        self.program, self.batch, rank = program, batch, dist.get_rank()
        self.order = [a for a in program.orders[rank] if a.kind.is_compute]
        self.layers = {s: nn.Linear(WIDTH, WIDTH) for s in program.stages_of(rank)}

    def __call__(self) -> None:
        self.sends: list[tuple[Any, Tensor]] = []
        self.alive: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.here: dict[tuple[int, int, bool], Tensor] = {}
        self.rest: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        for stage, kind, i in self.order:
            assert i is not None
            if kind is ActionKind.F:
                self.forward(stage, i)
            elif kind is ActionKind.W:
                y, dy = self.rest.pop((stage, i))
                torch.autograd.backward(y, dy, inputs=list(self.layers[stage].parameters()))
            else:
                self.backward(stage, i, split=kind is ActionKind.I)
        for work, _ in self.sends:
            work.wait()
        for layer in self.layers.values():
            layer.zero_grad(set_to_none=True)

    def forward(self, stage: int, i: int) -> None:
        x = self.batch.inputs[i] if stage == 0 else self.take(stage, stage - 1, i, True).requires_grad_()
        y = self.layers[stage](x)
        if stage == self.program.stages - 1:
            y = squares(y, self.batch.targets[i])
        else:
            self.give(y.detach(), stage, stage + 1, i, True)
        self.alive[stage, i] = x, y

    def backward(self, stage: int, i: int, split: bool) -> None:
        x, y = self.alive.pop((stage, i))
        last = stage == self.program.stages - 1
        dy = None if last else self.take(stage, stage + 1, i, False)
        if not split:
            torch.autograd.backward(y, dy)
            dx = x.grad
        else:
            self.rest[stage, i] = y, dy
            dx = None if stage == 0 else torch.autograd.grad(y, x, dy, retain_graph=True)[0]
        if stage > 0:
            assert dx is not None
            self.give(dx, stage, stage - 1, i, False)

    def take(self, stage: int, other: int, i: int, forward: bool) -> Tensor:
        source = self.program.placement[other]
        if source == dist.get_rank():
            return self.here.pop((stage, i, forward))
        x = torch.empty(SAMPLES, WIDTH)
        work = dist.irecv(x, source, tag=self.tag(stage, i, forward))
        assert work is not None
        work.wait()
        return x

    def give(self, tensor: Tensor, stage: int, other: int, i: int, forward: bool) -> None:
        target = self.program.placement[other]
        if target == dist.get_rank():
            self.here[other, i, forward] = tensor
        else:
            self.sends.append((dist.isend(tensor, target, tag=self.tag(other, i, forward)), tensor))

    @staticmethod
    def tag(stage: int, i: int, forward: bool) -> int:
        return (stage * MICROBATCHES + i) * 2 + forward


def compete(contest: Race, rounds: int) -> list[Timing]:
    program, batch = program_of(contest, dist.get_world_size()), Batch()
    peer = f"torch {contest.torchs}"
    contestants: dict[str, Step] = {
        peer: torchs(contest.torchs, program, batch),
        "Stretto": stretto_step(program, batch, linear),
        "by hand": ByHand(program, batch),
    }
    if program.ranks == 1:
        contestants |= {
            "bare autograd": bare(program, batch, linear),
            "Stretto, own layers": stretto_step(program, batch, own_linear),
            "bare autograd, own layers": bare(program, batch, own_linear),
        }
    return race(contestants, peer, rounds=rounds, inner=3)


def actions_of(contest: Race, ranks: int) -> int:
    """Compute actions of the busiest rank."""

    def compute(order: tuple[Action, ...]) -> int:
        return sum(a.kind.is_compute for a in order)

    return max(map(compute, program_of(contest, ranks).orders))


def tell(contest: Race, ranks: int, timings: list[Timing]) -> None:
    """The figures that the goals refer to."""
    best = {t.name: t.best_ms for t in timings}
    speed = {t.name: t.speedup for t in timings}
    peer, actions = f"torch {contest.torchs}", actions_of(contest, ranks)
    us = {name: ms * 1e3 / actions for name, ms in best.items()}
    print(
        f"us for each of {actions} actions, best: " + ", ".join(f"{n} {value:.0f}" for n, value in us.items())
    )
    if ranks == 1:
        other = us[peer] - us["bare autograd"]
        for layers in ("", ", own layers"):
            own = us[f"Stretto{layers}"] - us[f"bare autograd{layers}"]
            share = f"{own / other:.2f} of torch's {other:.1f} (goal: at most 0.5)"
            print(f"own cost{layers}: {own:.1f} us, {share}")
    else:
        goal = f" (goal: at most {contest.goal})" if contest.goal else ""
        by_hand = speed["by hand"] / speed["Stretto"]
        print(f"{1 / speed['Stretto']:.2f} of torch{goal}, {by_hand:.2f} of by hand (goal: at most 1.15)")
    print(flush=True)


def main() -> None:
    args = arguments(__doc__, rounds=20, ranks=0)
    for ranks in (args.ranks,) if args.ranks else (1, 2, 4):
        for contest in RACES:
            timings = on_ranks(ranks, compete, contest, args.rounds)[0]
            title = f"{contest.name}, {ranks} rank(s), {MICROBATCHES} microbatches"
            report(title, timings, f"torch {contest.torchs}", args.out)
            tell(contest, ranks, timings)


if __name__ == "__main__":
    main()
