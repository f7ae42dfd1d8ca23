"""Grades `bugs`: five planted bugs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.engine.parallel.control import gather_json
from stretto.learn.checks import Check, compared, proved, split
from stretto.prove import prove

RANKS = 2
TEMPLATE = '''import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def accumulate(model: nn.Module, microbatches: list[tuple[Tensor, Tensor]]) -> None:
    """Add to `grad` the gradient of the mean loss over all targets of all microbatches of all ranks.

    Args:
        microbatches: (inputs, targets) of this rank, as many on each; targets of -100 do not count, so
            microbatches and ranks have different numbers of targets.
    """
    for inputs, targets in microbatches:
        loss = cross_entropy(model(inputs), targets, ignore_index=-100)
        (loss / len(microbatches)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def tie_gradients(gradient: Tensor) -> Tensor:
    """Return the gradient of a weight that the embedding on rank 0 and the head on rank 1 share, on both.

    Args:
        gradient: of this rank's use of the weight.
    """
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()  # as all gradients


def clip(sharded: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients of a tensor-parallel model in place so that their norm is at most `max_norm`.

    Args:
        sharded: gradients of which each rank has another part.
        replicated: gradients that both ranks have, with equal values.

    Returns:
        The norm of all gradients of the whole model, before.
    """
    gradients = [*sharded, *replicated]
    square = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def dropout(x: Tensor, p: float, seed: int, step: int) -> Tensor:
    """Drop elements of features that are split over the ranks, in every step and on every rank others.

    Args:
        x: this rank's features.
        p: probability that an element is zero; the others are divided by 1 - p.
        seed: the job's, below 2**31.
        step: from 0.
    """
    generator = torch.Generator().manual_seed(seed + step + dist.get_rank())
    mask = torch.rand(x.shape, generator=generator) >= p
    return x * mask / (1 - p)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x / sqrt(mean of x**2 over all features) * weight, differentiable, of split features.

    Args:
        x: this rank's features, [batch, features / 2]; weight: theirs.
    """
    square = x.square().sum(-1, keepdim=True)
    with torch.no_grad():
        dist.all_reduce(square)
    return x * (square / (x.shape[-1] * dist.get_world_size())).rsqrt() * weight
'''


def _token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def checks(reader: Mapping[str, Any], random: Random) -> Iterator[Check]:
    """Compare each function with one process."""
    rank, width = dist.get_rank(), 2 * random.randint(3, 5)
    rows = random.randint(3, 5)
    targets = torch.randint(width, (4 * rows,))
    targets[torch.rand(4 * rows) < 0.4] = -100
    targets[::rows] = 0  # no microbatch is empty
    targets[: rows - 1] = -100  # and the first has few

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        reader["accumulate"](model, [*zip(*(tensor.split(rows) for tensor in batch), strict=True)])
        optimizer.step()
        optimizer.zero_grad()

    report = prove(
        lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)),
        lambda model: model,
        (torch.randn(4 * rows, width), targets),
        step,
        loss=_token_loss,
        share=lambda batch, rank: split(batch, RANKS, rank),
        timeout=15.0,
    )
    yield proved("accumulate", report)

    uses = torch.randn(RANKS, rows, width).double()
    yield compared("tie_gradients", reader["tie_gradients"](uses[rank].clone()), uses.sum(0))

    shards, copies = torch.randn(RANKS, rows, width).double(), torch.randn(width).double()
    bound = random.uniform(0.3, 0.9)
    sharded, replicated = shards[rank].clone(), copies.clone()
    square, copied = shards.square().sum(), copies.square().sum()
    norm = reader["clip"]([sharded], [replicated], bound)
    causes = {
        "replicated gradients are counted once on each rank": (square + RANKS * copied).sqrt(),
        "it is the norm of this rank's gradients": (shards[rank].square().sum() + copied).sqrt(),
    }
    expected = (square + copied).sqrt()
    yield compared("clip: the norm", norm, expected, causes)
    factor = bound / (expected + 1e-6)
    yield compared("clip: sharded gradients", sharded, shards[rank] * factor)
    yield compared("clip: replicated gradients", replicated, copies * factor)

    seed, x = random.randrange(2**31), torch.ones(40, width).double()
    places = dict[tuple[float, ...], str]()  # of each mask
    for step_index in range(3):
        masks: list[list[float]] = gather_json(reader["dropout"](x, 0.5, seed, step_index).flatten().tolist())
        for mask_rank, mask in enumerate(masks):
            place, problem = f"rank {mask_rank} in step {step_index}", None
            if {*mask} != {0.0, 2.0} or not 0.3 < mask.count(0.0) / len(mask) < 0.7:
                problem = (
                    f"{place}: at p=0.5 ones become {sorted({*mask})[:4]}, must be 0 and 2, half of them each"
                )
            elif (other := places.setdefault(tuple(mask), place)) != place:
                problem = f"{place} drops the same elements as {other}: their seeds are equal"
            yield Check(f"dropout: {place}", problem)

    features, scales = torch.randn(rows, RANKS * width).double(), torch.randn(2, rows, RANKS * width).double()
    weight, outer = scales[0, 0], scales[1]
    full, local = features.requires_grad_(), features.detach().chunk(RANKS, 1)[rank].requires_grad_()
    expected = full * full.square().mean(1, keepdim=True).rsqrt() * weight
    (expected * outer).sum().backward()
    part = [tensor.chunk(RANKS, -1)[rank] for tensor in (expected, outer, weight)]
    output = reader["rms_norm"](local, part[2])
    yield compared("rms_norm: its output", output, part[0])
    (output * part[1]).sum().backward()
    assert full.grad is not None
    yield compared("rms_norm: the gradient of x", local.grad, full.grad.chunk(RANKS, 1)[rank])
