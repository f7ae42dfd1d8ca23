"""Prove a model that FSDP2 shards equal to the same model in one process: no module here is of Stretto's.

stretto prove examples/prove_fsdp.py:check --ranks 4
python examples/prove_fsdp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from stretto import run_ranks
from stretto.prove import prove


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))


def parallel(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def step(model, optimizer, batch):
    x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch)  # this rank's samples
    mean = loss(model, (x, y))
    mean.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return mean


def check():
    torch.manual_seed(1)
    batch = torch.randn(16, 32), torch.randint(10, (16,))
    return prove(plain, parallel, batch, step, loss=loss)


def on_rank():
    dist.init_process_group("gloo")
    report = check()
    dist.destroy_process_group()
    return report


if __name__ == "__main__":
    report = run_ranks(2, on_rank)[0]
    print(report)
    report.raise_for_difference()
