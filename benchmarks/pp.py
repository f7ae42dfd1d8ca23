"""Claim: pipelines of two ranks beat torch.distributed.pipelining by 5% on the same stages.

1F1B and interleaved. `same modules` gives our pipeline the peer's own plain modules and loss; `Stretto` is
what `stretto train` runs.

    python benchmarks/pp.py
"""

from __future__ import annotations

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
    only_rank,
    plain,
    replica,
    single_step,
    split,
    stretto_step,
    with_blas,
)
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

from stretto.cost.layers import layer_costs
from stretto.layout import Layout
from stretto.layout.cut import cut
from stretto.parallel.mesh import Mesh
from stretto.pipeline import Boundary, Pipeline
from stretto.schedule import schedule


def cut_of(chunks: int) -> list[range]:
    return cut(layer_costs(SHAPE, SEQUENCE), 2 * chunks)


def torchs(chunks: int) -> Step:
    """torch's schedule on the same cut."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [rank + world * c for c in range(chunks)]
    layers = [layer for _, layer in plain().layers()]  # pyright: ignore
    stages = [
        PipelineStage(module, s, world * chunks, torch.device("cpu"))
        for s, module in zip(mine, split(layers, cut_of(chunks), mine), strict=True)
    ]
    if chunks == 1:
        runner = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=mean_loss)
    else:
        runner = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=mean_loss)
    optimizer = adamw(p for s in stages for p in s.submod.parameters())
    x, y = (torch.cat(part) for part in batch())

    def step() -> None:
        last = rank == world - 1
        runner.step(*((x,) if rank == 0 else ()), target=y if last else None, losses=[] if last else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def same_modules(name: str, chunks: int) -> Step:
    """Our pipeline over the peer's modules, loss and optimiser."""
    world = dist.get_world_size()
    pipe = Pipeline(
        [layer for _, layer in plain().layers()],  # pyright: ignore
        schedule(name, ranks=world, microbatches=MICROBATCHES, chunks=chunks if chunks > 1 else None),
        Mesh(Layout(pp=world)),
        mean_loss,
        cut=cut_of(chunks),
        boundary=Boundary((SAMPLES, SEQUENCE, HIDDEN), torch.float32),
    )
    optimizer = adamw(pipe.parameters())
    inputs, targets = batch()

    def step() -> None:
        pipe.step(inputs, targets, 1.0 / MICROBATCHES)
        optimizer.step()

    return step


def compete(name: str, chunks: int, rounds: int) -> list[Timing]:
    overrides = {"layout__pp": dist.get_world_size(), "schedule__name": name}
    overrides |= {"schedule__chunks": chunks} if chunks > 1 else {}
    contestants = {
        "one process": only_rank(0, single_step(plain()), dist.get_rank()),
        f"torch {name}": torchs(chunks),
        "Stretto, same modules": same_modules(name, chunks),
        "Stretto": stretto_step(replica(config(**overrides))),
        "Stretto, BLAS products": with_blas(stretto_step(replica(config(**overrides)))),
    }
    return race(contestants, f"torch {name}", rounds=rounds)


def main() -> None:
    given = arguments(__doc__, rounds=15)
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        timings = on_ranks(2, compete, name, chunks, given.rounds)[0]
        report(f"2 pipeline ranks, {name}", timings, f"torch {name}", given.out)


if __name__ == "__main__":
    main()
