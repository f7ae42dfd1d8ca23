"""Data parallelism in your own training loop: `data_parallel` wraps the module, and the loop stays unchanged.

Every mode trains the same weights as one process; the modes differ in what each rank keeps.

    python examples/data_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn

from stretto import Layout, Mesh, data_parallel, run_ranks

RANKS, STEPS, SAMPLES = 2, 20, 64
MODES = ("server", "ddp", "zero1", "zero2", "zero3")


def build() -> nn.Module:
    torch.manual_seed(0)  # the same weights on all ranks
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(SAMPLES, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(6 * x[:, :1]) * x[:, 1:]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> list[float]:
    """An ordinary training loop: each rank takes its share of the samples and averages over it."""
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = (model(x[rank::ranks]) - y[rank::ranks]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def on_one_rank(mode: str) -> tuple[list[float], int]:
    """This rank's losses, and the number of elements for which its optimiser keeps states."""
    dist.init_process_group("gloo")
    model = data_parallel(build(), Mesh(Layout(dp=RANKS)), mode=mode)
    optimizer = model.optimizer("adamw", lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    losses = train(model, optimizer, dist.get_rank(), RANKS)
    state_elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    dist.destroy_process_group()
    return losses, state_elements


if __name__ == "__main__":
    plain = build()
    alone = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0), 0, 1)
    for mode in MODES:
        ranks = run_ranks(RANKS, on_one_rank, mode)
        together = [sum(step) / RANKS for step in zip(*(losses for losses, _ in ranks), strict=True)]
        off = max(abs(a - b) for a, b in zip(alone, together, strict=True))
        per_rank = ", ".join(str(elements) for _, elements in ranks)
        print(f"{mode}: loss {together[0]:.4f} to {together[-1]:.4f}, off by {off:.1e}, states of {per_rank}")
