"""The dense part of a DLRM, forward and backward of a batch: torch's own layers and Stretto's.

26 tables of 64 columns, networks 512-256-64 and 512-512-256-1, batch 2048, one thread; the pooled vectors
get a gradient too. Stretto runs with the compiled dot interaction, and with torch's products.

    python benchmarks/dlrm_dense.py
"""

from __future__ import annotations

import torch
from harness import arguments, race, report

from stretto.recommender.models import interaction
from stretto.recommender.models.dlrm import DenseNet
from stretto.recommender.shape import DlrmShape, TableShape

SAMPLES, TABLES, DIM = 2048, 26, 64
BOTTOM, TOP = (512, 256, DIM), (512, 512, 256, 1)


def main() -> None:
    args = arguments(__doc__, rounds=20)
    torch.set_num_threads(1)
    shapes = {
        "dot": DlrmShape(
            tables=tuple(TableShape(9, DIM) for _ in range(TABLES)), dense=13, bottom=BOTTOM, top=TOP
        ),
        "dcn": DlrmShape(
            tables=tuple(TableShape(9, DIM) for _ in range(TABLES)),
            dense=13,
            bottom=BOTTOM,
            top=TOP,
            interaction="dcn",
            cross_layers=2,
            cross_rank=64,
        ),
    }
    dense, labels = torch.rand(SAMPLES, 13), (torch.rand(SAMPLES) < 0.25).float()
    pooled = (torch.randn(SAMPLES, TABLES, DIM) * 0.1).requires_grad_()
    large = interaction.LARGE
    for name, shape in shapes.items():
        plain, fast = (DenseNet(shape, fast=quick) for quick in (False, True))

        def step(net: DenseNet, compiled: bool) -> None:
            interaction.LARGE = large if compiled else 2**62
            net.zero_grad()
            pooled.grad = None
            loss = torch.nn.functional.binary_cross_entropy_with_logits(net(dense, pooled), labels)
            loss.backward()
            interaction.LARGE = large

        contestants = {
            "plain": lambda plain=plain, step=step: step(plain, False),
            "Stretto without numba": lambda fast=fast, step=step: step(fast, False),
            "Stretto": lambda fast=fast, step=step: step(fast, True),
        }
        timings = race(contestants, "plain", rounds=args.rounds)
        report(f"{name}, forward and backward", timings, "plain", args.out)


if __name__ == "__main__":
    main()
