"""Somebody else's models, of no code of ours, and how they are trained: what proofs of any module prove."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.prove import Split

WIDTH, VOCAB, BATCH, LENGTH = 16, 24, 8, 6


class Block(nn.Module):
    """A norm and an MLP, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """An embedding, blocks, and a head that may share the embedding's weight."""

    def __init__(self, blocks: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain(tied: bool = False) -> Plain:
    torch.manual_seed(0)
    return Plain(tied=tied)


def plain_tied() -> Plain:
    return plain(tied=True)


def batch() -> tuple[Tensor, Tensor]:
    """Words, and those that follow."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ragged() -> tuple[Tensor, Tensor]:
    """The same, with other numbers of targets in each sample; -100 is none."""
    x, y = batch()
    y = y.clone()
    for row in range(BATCH):
        y[row, 1 + row % LENGTH :] = -100
    return x, y


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def samples(batch: Any, rank: int) -> Any:
    """This rank's samples."""
    return tuple(tensor.chunk(dist.get_world_size())[rank] for tensor in batch)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The training step of most scripts."""
    mean = loss(model, batch)
    mean.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return mean


def unclipped(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """torch's clipping refuses a mix of tensors and distributed tensors."""
    mean = loss(model, batch)
    mean.backward()
    optimizer.step()
    optimizer.zero_grad()
    return mean


# ------------------------------------------------------------------ split with plain tensors


class Reduced(torch.autograd.Function):
    """Summed over ranks forwards, as it is backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Copied(torch.autograd.Function):
    """As it is forwards, summed over ranks backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Row(nn.Module):
    """A linear layer of which each rank has a part of the inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        share = linear.weight.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        self.weight, self.bias = nn.Parameter(share.detach().clone()), linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return Reduced.apply(x @ self.weight.T) + self.bias


class ByHand(nn.Module):
    """A block whose MLP is split over ranks with plain tensors."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.down, self.up = block.norm, Row(block.down), block.up
        for name in ("weight", "bias"):
            part = getattr(block.up, name).detach().chunk(dist.get_world_size())[dist.get_rank()]
            setattr(self.up, name, nn.Parameter(part.clone()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(Copied.apply(self.norm(x)))))


def split_by_hand(model: Any) -> nn.Module:
    model.blocks = nn.ModuleList(map(ByHand, model.blocks))
    return model


BY_HAND = {"*.up.*": Split(0), "*.down.weight": Split(1)}


# ------------------------------------------------------------------ cut into stages


class Stage(nn.Module):
    """Some of the blocks, with the embedding or the head at the ends."""

    def __init__(self, model: Any, at: int, of: int) -> None:
        super().__init__()
        blocks = list(model.blocks)
        count = len(blocks) // of
        self.embed = model.embed if at == 0 else nn.Identity()
        self.layers = nn.Sequential(*blocks[at * count : (at + 1) * count])
        self.head = model.head if at == of - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


def flat_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
