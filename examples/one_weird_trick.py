"""Krizhevsky's "one weird trick" (arXiv 1404.5997): convolutions split the batch and fully connected layers
their features, over the same ranks. Every schedule of the gather between is proved equal to one process.

    python examples/one_weird_trick.py
    stretto prove examples/one_weird_trick.py:check --ranks 4
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto import BatchParallel, ColumnParallel, GatherBatch, RowParallel
from stretto.prove import prove

RANKS, WAYS = 2, ("all", "turns", "shares", "data parallel")


def build() -> nn.Module:
    """Like AlexNet, and smaller."""
    model = nn.Sequential()
    model.features = nn.Sequential(
        *(nn.Conv2d(3, 16, 5, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
    )
    model.classifier = nn.Sequential(
        *(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    return model


def plan(way: str) -> dict:
    if way == "data parallel":
        return {"features": BatchParallel(), "classifier": BatchParallel()}
    # the classifier's last layer has no style of its own: it is replicated
    linear = {"classifier": GatherBatch(way), "classifier.0": ColumnParallel(), "classifier.2": RowParallel()}
    return {"features": BatchParallel(), **linear}


def loss(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)  # of the whole batch, on every rank


def check(way: str = "turns", sent: list[int] | None = None):
    def parallel(model):
        mesh = stretto.Mesh(stretto.Layout(tp=dist.get_world_size()))
        model.table = stretto.parallelize(model, plan(way), mesh)
        return model

    def step(model, optimizer, batch):
        with stretto.traffic() as counted:
            mean = loss(model, batch)
            mean.backward()
            stretto.sum_gradients(model, model.table)
        if sent is not None:
            sent.append(counted.total)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    torch.manual_seed(0)
    batch = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    return prove(build, parallel, batch, step, loss=loss, reduction="same")


def on_rank(way: str):
    dist.init_process_group("gloo")
    report = check(way, sent := [])
    dist.destroy_process_group()
    return report, sent[0]


if __name__ == "__main__":
    for way in WAYS:
        report, sent = stretto.run_ranks(RANKS, on_rank, way)[0]
        report.raise_for_difference()
        off = ", ".join(f"{q.name} {q.error:.0e}" for q in report.quantities if q.error is not None)
        print(f"{way}: a rank sends {sent:,} bytes in a step; off by {off}")
