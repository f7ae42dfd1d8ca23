"""A model of uneven layers on two ranks: cuts that ignore the schedule compared with the planned one.

The layers are residual MLPs of which some have four times the inner width. They are measured once, alone;
`planner.cutting.partition` cuts them for the schedule; then all cuts run in turn on the same ranks and are
compared round by round, next to their predictions. Each rank needs its own core: on a busy machine ranks
take turns, and a step takes the sum of their work however it is cut.

    python benchmarks/partition.py
    python benchmarks/partition.py --sleep-us 3000     # layers that sleep, as if each rank had its own device
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from harness import Laps, arguments, compare, laps, run_ranks, table, where
from sleeping import Sleeper
from torch import Tensor, nn

from stretto import Layout, Pipeline, schedule
from stretto.engine.parallel.mesh import Mesh
from stretto.planner.cutting.partition import partition
from stretto.planner.cutting.profile import ModelProfile
from stretto.run.calibrate.modules import profile_layers

RANKS = 2
SCHEDULES: dict[str, dict[str, int]] = {"1f1b": {}, "zb-h1": {}, "interleaved": {"chunks": 2}, "zb-v": {}}
# positions of the wide layers
SHAPES = {
    "wide last": [1] * 12 + [4] * 4,
    "wide first": [4] * 4 + [1] * 12,
    "mixed": [1, 1, 4, 1] * 2 + [1] * 6 + [4] * 2,
}


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model(shape: str, width: int, rows: int, sleep: float) -> tuple[list[nn.Module], Tensor]:
    """Layers and one microbatch; `sleep`: seconds each of F, I and W of a narrow layer, 0 to compute."""
    torch.manual_seed(0)
    if sleep:
        return [Sleeper([sleep * scale] * 3) for scale in SHAPES[shape]], torch.ones(1, 1)
    return [Block(width, width * scale) for scale in SHAPES[shape]], torch.randn(rows, width)


def profile_of(shape: str, width: int, rows: int, sleep: float) -> ModelProfile:
    """The measured profile; half of a sleeping layer's backward is the weight gradient."""
    profile = profile_layers(*model(shape, width, rows, sleep))
    return (
        replace(profile, layers=tuple(replace(layer, weight=None) for layer in profile.layers))
        if sleep
        else profile
    )


def on_one_rank(
    size: tuple[str, int, int, float],
    name: str,
    microbatches: int,
    cuts: dict[str, list[range]],
    rounds: int,
) -> tuple[Any, Any]:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    x = model(*size)[1]
    program, mesh = schedule(name, RANKS, microbatches, **SCHEDULES[name]), Mesh(Layout(pp=RANKS))
    y = torch.randn_like(x)
    # separate modules for each: layers with a split backward queue for one pipeline
    pipes = {
        cut: Pipeline(model(*size)[0], program, mesh, nn.MSELoss(), cut=stages)
        for cut, stages in cuts.items()
    }
    steps = {
        cut: lambda pipe=pipe: pipe.step([x] * microbatches, [y] * microbatches)
        for cut, pipe in pipes.items()
    }
    taken = laps(steps, rounds)
    dist.destroy_process_group()
    return taken.walls, taken.cpus


def main() -> None:
    args = arguments(
        __doc__, rounds=12, width=256, rows=512, microbatches=8, sleep_us=0, schedules=",".join(SCHEDULES)
    )
    torch.set_num_threads(1)
    for shape in SHAPES:
        size = (shape, args.width, args.rows, args.sleep_us * 1e-6)
        profile = profile_of(*size)
        for name in args.schedules.split(","):
            program = schedule(name, RANKS, args.microbatches, **SCHEDULES[name])
            planned = partition(profile, program)
            by = {cut: stages for cut, stages in planned.starts.items() if tuple(stages) != planned.stages}
            cuts = {**by, "planned": list(planned.stages)}
            walls, cpus = run_ranks(RANKS, on_one_rank, size, name, args.microbatches, cuts, args.rounds)[0]
            reference = "layers" if "layers" in cuts else "planned"
            timings = compare(Laps(walls, cpus), reference)
            print(table(f"{shape}, {name}: {[len(s) for s in planned.stages]}", timings, reference))
            predicted = {**planned.start_seconds, "planned": planned.seconds}
            rows = []
            for timing in timings:
                ms = 1e3 * predicted[timing.name]
                off = ms / timing.median_ms - 1
                print(f"{timing.name}: predicted {ms:.1f} ms, {100 * off:+.1f}%")
                rows.append(
                    {
                        "cut": timing.name,
                        "predicted_ms": ms,
                        "median_ms": timing.median_ms,
                        "speedup": timing.speedup,
                        "quartiles": [timing.low, timing.high],
                    }
                )
            print(f"\n{where()}\n", flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    line = {
                        "shape": shape,
                        "schedule": name,
                        "cut": [len(s) for s in planned.stages],
                        "where": where(),
                        "rows": rows,
                    }
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
