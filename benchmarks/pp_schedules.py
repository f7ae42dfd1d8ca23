"""Claim: under every schedule, pipelines of two ranks beat torch.distributed.pipelining by 5% on the same
stages, by 10% where the backward is split.

The small GPT. `same modules` runs Stretto's pipeline on the peer's own plain modules, loss and optimiser;
`Stretto` is what `stretto train` runs. `BLAS products` uses torch's own products on both sides.

    python benchmarks/pp_schedules.py --only dualpipe-v
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report
from small_gpt import (
    HIDDEN,
    MICROBATCHES,
    SAMPLES,
    SEQUENCE,
    SHAPE,
    adamw,
    batch,
    config,
    mean_loss,
    plain,
    replica,
    split,
    stretto_step,
    with_blas,
)
from torch.distributed.pipelining import PipelineStage, schedules

from stretto.engine.parallel.mesh import Mesh
from stretto.engine.pipeline import Boundary, Pipeline
from stretto.job.flops import layer_costs
from stretto.layout import Layout
from stretto.layout.cut import cut
from stretto.program import Program, schedule

RANKS = 2


@dataclass(frozen=True)
class Race:
    """One schedule: Stretto's and torch's name for it, and the goal for torch's step time over Stretto's."""

    name: str
    torchs: str
    chunks: int | None  # option of the schedule
    goal: float


RACES = (
    Race("gpipe", "ScheduleGPipe", None, 1.05),
    Race("1f1b", "Schedule1F1B", None, 1.05),
    Race("interleaved", "ScheduleInterleaved1F1B", 2, 1.05),
    Race("bfs", "ScheduleLoopedBFS", 2, 1.05),
    Race("interleaved-zb", "ScheduleInterleavedZeroBubble", 2, 1.1),
    Race("zb-v", "ScheduleZBVZeroBubble", None, 1.1),
    Race("dualpipe-v", "ScheduleDualPipeV", None, 1.1),
)


def cut_of(program: Program) -> list[range]:
    return cut(layer_costs(SHAPE, SEQUENCE), program.stages)


def torchs(name: str, program: Program) -> Step:
    """torch's class on the same cut, with stages placed as in Stretto."""
    mine = program.stages_of(dist.get_rank())
    layers = [layer for _, layer in plain().layers()]  # pyright: ignore
    stages = [
        PipelineStage(module, s, program.stages, torch.device("cpu"))
        for s, module in zip(mine, split(layers, cut_of(program), mine), strict=True)
    ]
    schedule = getattr(schedules, name)
    single = issubclass(schedule, schedules.PipelineScheduleSingle)
    runner = schedule(stages[0] if single else stages, MICROBATCHES, loss_fn=mean_loss)
    optimizer = adamw(p for s in stages for p in s.submod.parameters())
    x, y = (torch.cat(part) for part in batch())
    first, last = 0 in mine, program.stages - 1 in mine

    def step() -> None:
        inputs = (x,) if first else ()
        runner.step(*inputs, target=y if last else None, losses=[] if last else None, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def same_modules(program: Program) -> Step:
    """Stretto's pipeline over the peer's modules, loss and optimiser."""
    pipe = Pipeline(
        [layer for _, layer in plain().layers()],  # pyright: ignore
        program,
        Mesh(Layout(pp=program.ranks)),
        mean_loss,
        cut=cut_of(program),
        boundary=Boundary((SAMPLES, SEQUENCE, HIDDEN), torch.float32),
    )
    optimizer = adamw(pipe.parameters())
    inputs, targets = batch()

    def step() -> None:
        pipe.step(inputs, targets, 1.0 / MICROBATCHES)
        optimizer.step()

    return step


def compete(contest: Race, rounds: int) -> list[Timing]:
    program = schedule(contest.name, RANKS, MICROBATCHES, chunks=contest.chunks)
    overrides = {"layout__pp": RANKS, "schedule__name": contest.name}
    overrides |= {"schedule__chunks": contest.chunks} if contest.chunks else {}
    peer = f"torch {contest.torchs}"
    contestants = {
        peer: torchs(contest.torchs, program),
        "Stretto, same modules": same_modules(program),
        "Stretto, same modules, BLAS products": with_blas(same_modules(program)),
        "Stretto": stretto_step(replica(config(**overrides))),
    }
    return race(contestants, peer, rounds=rounds, warmup=2)


def main() -> None:
    args = arguments(__doc__, rounds=15, only="")
    for contest in RACES:
        if args.only and contest.name not in args.only.split(","):
            continue
        timings = on_ranks(RANKS, compete, contest, args.rounds)[0]
        report(f"{RANKS} pipeline ranks, {contest.name}", timings, f"torch {contest.torchs}", args.out)
        speeds = ", ".join(f"{t.name} {t.speedup:.2f}" for t in timings[1:])
        print(f"speed over torch: {speeds} (goal: at least {contest.goal})\n", flush=True)


if __name__ == "__main__":
    main()
