"""A list of modules trained by a pipeline of two ranks.

python examples/pipeline_30_lines.py
"""

import torch
import torch.distributed as dist
from torch import nn

from stretto import Layout, Mesh, Pipeline, run_ranks, schedule


def train(steps: int = 120, microbatches: int = 4) -> list[float]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights and data on both ranks
    layers = [
        nn.Linear(2, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 1),
    ]
    program = schedule("zb-v", ranks=2, microbatches=microbatches)  # or any other
    pipe = Pipeline(layers, program, Mesh(Layout(pp=2)), loss=nn.MSELoss())
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    history = []
    for _ in range(steps):
        x = torch.rand(256, 2)
        y = torch.sin(6 * x[:, :1]) * x[:, 1:]
        losses = pipe.step(x.chunk(microbatches), y.chunk(microbatches), scale=1 / microbatches)
        optimizer.step()
        if losses is not None:  # on the rank that holds the last layer
            history.append(float(losses.mean()))
    dist.destroy_process_group()
    return history


if __name__ == "__main__":
    losses = next(filter(None, run_ranks(2, train)))
    print(*(f"step {i + 1:3d}  loss {losses[i]:.4f}" for i in range(0, len(losses), 20)), sep="\n")
