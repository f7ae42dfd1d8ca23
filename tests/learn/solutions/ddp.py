import torch
import torch.distributed as dist
from torch import nn


def reduce_gradients(model: nn.Module, bucket_bytes: int) -> None:
    buckets, filled = [], bucket_bytes
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        size = parameter.grad.nbytes
        if filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter.grad)
        filled += size
    for bucket in buckets:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
