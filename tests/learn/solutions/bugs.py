import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy


def accumulate(model: nn.Module, microbatches: list[tuple[Tensor, Tensor]]) -> None:
    """Add to `grad` the gradient of the mean loss over all targets of all microbatches of all ranks.

    Args:
        microbatches: (inputs, targets) of this rank, as many on each; targets of -100 do not count, so
            microbatches and ranks have different numbers of targets.
    """
    count = torch.stack([(targets != -100).sum() for _, targets in microbatches]).sum()
    dist.all_reduce(count)
    for inputs, targets in microbatches:
        loss = cross_entropy(model(inputs), targets, ignore_index=-100, reduction="sum")
        (loss / count).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def tie_gradients(gradient: Tensor) -> Tensor:
    """Return the gradient of a weight that the embedding on rank 0 and the head on rank 1 share, on both.

    Args:
        gradient: of this rank's use of the weight.
    """
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def clip(sharded: list[Tensor], replicated: list[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients of a tensor-parallel model in place so that their norm is at most `max_norm`.

    Args:
        sharded: gradients of which each rank has another part.
        replicated: gradients that both ranks have, with equal values.

    Returns:
        The norm of all gradients of the whole model, before.
    """
    gradients = [*sharded, *replicated]
    square = torch.stack([gradient.square().sum() for gradient in sharded]).sum()
    dist.all_reduce(square)
    norm = (square + torch.stack([gradient.square().sum() for gradient in replicated]).sum()).sqrt()
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
    generator = torch.Generator().manual_seed(seed + step * dist.get_world_size() + dist.get_rank())
    mask = torch.rand(x.shape, generator=generator) >= p
    return x * mask / (1 - p)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x / sqrt(mean of x**2 over all features) * weight, differentiable, of split features.

    Args:
        x: this rank's features, [batch, features / 2]; weight: theirs.
    """
    square = all_reduce(x.square().sum(-1, keepdim=True))
    return x * (square / (x.shape[-1] * dist.get_world_size())).rsqrt() * weight
