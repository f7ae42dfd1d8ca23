"""A model of narrow and wide layers, measured, cut for its schedule, and trained on two ranks.

    python examples/uneven_layers.py

The same cut from the command line:

    stretto partition examples/uneven_layers.py:model --ranks 2 --microbatches 8
"""

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto import Layout, Mesh, Pipeline, partition, profile_layers, run_ranks, schedule

WIDTH, INNER, ROWS, MICROBATCHES = 128, [128] * 10 + [512] * 4, 256, 8  # the last four are 4 times wider


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model() -> tuple[list[nn.Module], Tensor, nn.Module, Tensor]:
    """The arguments of `stretto partition`: layers, one microbatch, and optionally a loss and a target."""
    torch.manual_seed(0)
    return [Block(inner) for inner in INNER], torch.randn(ROWS, WIDTH), nn.MSELoss(), torch.randn(ROWS, WIDTH)


def measure(cuts: dict[str, list[range]], rounds: int = 10) -> dict[str, tuple[float, float]]:
    """Loss and milliseconds of a step with each cut; the cuts take turns."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    _, x, loss, y = model()
    program, mesh = schedule("1f1b", ranks=2, microbatches=MICROBATCHES), Mesh(Layout(pp=2))
    pipes = {name: Pipeline(model()[0], program, mesh, loss, cut=cut) for name, cut in cuts.items()}
    taken = {name: list[float]() for name in cuts}
    losses = dict.fromkeys(cuts, 0.0)
    for _ in range(rounds):
        for name, pipe in pipes.items():
            dist.barrier()
            begin = time.perf_counter()
            step_losses = pipe.step([x] * MICROBATCHES, [y] * MICROBATCHES)
            dist.barrier()
            taken[name].append(time.perf_counter() - begin)
            losses[name] = 0.0 if step_losses is None else float(step_losses.mean())
    dist.destroy_process_group()
    return {name: (losses[name], 1e3 * median(taken[name][2:])) for name in cuts}


if __name__ == "__main__":
    torch.set_num_threads(1)
    best = partition(profile_layers(*model()), schedule("1f1b", ranks=2, microbatches=MICROBATCHES))
    cuts = {"even": [range(7), range(7, 14)], "planned": list(best.stages)}
    _, measured = run_ranks(2, measure, cuts)  # the last rank has the loss
    predicted = {"even": best.start_seconds["layers"], "planned": best.seconds}
    for name, (loss, ms) in measured.items():
        sizes = " + ".join(str(len(stage)) for stage in cuts[name])
        print(
            f"{name}: {sizes} layers, predicted {1e3 * predicted[name]:.1f} ms, took {ms:.1f} ms, "
            f"loss {loss:.6f}"
        )
