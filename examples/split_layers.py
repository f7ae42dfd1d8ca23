"""How each layer of a network is best split over ranks: convolutions by batch, wide layers by features.

stretto split examples/split_layers.py:alexnet --cluster a100:4 --svg splits.svg
python examples/split_layers.py          # a small network of the kind, planned and run on 2 ranks
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto.prove import prove


def network(widths: tuple[int, ...], kernels: tuple[int, ...], pooled: tuple[int, ...], wide: int):
    layers, before = [], 3
    for at, (width, kernel) in enumerate(zip(widths, kernels, strict=True)):
        layers += [nn.Conv2d(before, width, kernel, 4 if at == 0 else 1, kernel // 2), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2)] if at in pooled else []
        before = width
    layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten()]
    linear = [
        nn.Linear(36 * before, wide),
        nn.ReLU(),
        nn.Linear(wide, wide),
        nn.ReLU(),
        nn.Linear(wide, 1000),
    ]
    return nn.Sequential(nn.Sequential(*layers), nn.Sequential(*linear))


def alexnet(batch: int = 512):
    """The widths of Krizhevsky 2014; on the meta device, since only shapes are read."""
    with torch.device("meta"):
        widths, kernels = (64, 192, 384, 256, 256), (11, 5, 3, 3, 3)
        return network(widths, kernels, (0, 1, 4), 4096), torch.empty(batch, 3, 224, 224)


def small():
    return network((8, 16), (5, 3), (0,), 1024)


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def check():
    """Train it beside one process, under the plan, and compare."""
    ranks, batch = dist.get_world_size(), (torch.zeros(32, 3, 64, 64), torch.arange(32))
    batch[0].normal_(generator=torch.Generator().manual_seed(0))
    planned = stretto.plan_module(small(), batch[0], cluster="v100-32gb-pcie", devices=ranks)

    def parallel(model):
        mesh = stretto.Mesh(stretto.Layout(tp=ranks))
        model.table = stretto.parallelize(model, planned.plan, mesh, convert=True)
        return model

    def step(model, optimizer, batch):
        mean = loss(model, batch)
        mean.backward()
        stretto.sum_gradients(model, model.table)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return planned.table(), prove(small, parallel, batch, step, loss=loss, reduction="same")


def on_rank():
    dist.init_process_group("gloo")
    result = check()
    dist.destroy_process_group()
    return result


if __name__ == "__main__":
    table, report = stretto.run_ranks(2, on_rank)[0]
    report.raise_for_difference()
    print(table, report, sep="\n\n")
