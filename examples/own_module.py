"""Tensor parallelism for a module of your own, on two ranks.

The module is written for one process. A sharding plan names its layers and how each is split; `parallelize`
replaces them by their parallel counterparts.

    python examples/own_module.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto import ColumnParallel, Layout, Mesh, RowParallel, parallelize, run_ranks

RANKS = 2


class MLP(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


PLAN = {"up": ColumnParallel(), "down": RowParallel()}  # each rank holds half of the inner features


def build() -> tuple[MLP, Tensor]:
    torch.manual_seed(0)
    return MLP().double(), torch.randn(8, 64, dtype=torch.float64)


def on_one_rank() -> tuple[float, float, str]:
    """Largest differences from one process in output and weight gradients; the shapes held by this rank."""
    plain, x = build()
    y = plain(x)
    y.square().sum().backward()

    dist.init_process_group("gloo")
    model, _ = build()
    table = parallelize(model, PLAN, Mesh(Layout(tp=RANKS)))
    parallel_y = model(x)
    parallel_y.square().sum().backward()

    gradients = [
        (piece.of_local(parameter.grad) - piece.of_full(plain.get_parameter(name).grad)).abs().max()
        for name, parameter in model.named_parameters()
        for piece in table[name].placed.pieces
    ]
    shapes = ", ".join(f"{name} {list(p.shape)}" for name, p in model.named_parameters())
    dist.destroy_process_group()
    return float((parallel_y - y).detach().abs().max()), float(max(gradients)), shapes


if __name__ == "__main__":
    for rank, (output, gradient, shapes) in enumerate(run_ranks(RANKS, on_one_rank)):
        print(f"rank {rank} holds {shapes}")
        print(f"  largest difference from one process: output {output:.1e}, gradients {gradient:.1e}")
