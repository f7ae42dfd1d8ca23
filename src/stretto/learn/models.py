"""Small plain models of the exercises, and their training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A norm and an MLP with a residual: [..., width] to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def random_blocks(count: int, width: int, hidden: int) -> nn.Sequential:
    """Blocks in float64 in which no bias is zero and no norm the identity."""
    blocks = nn.Sequential(*(Block(width, hidden) for _ in range(count))).double()
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter.normal_(std=0.3)
    return blocks


def square_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error of the model's output for batch[0] against batch[1]."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """Backward of the square loss, and an update."""
    loss = square_loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
