"""Data parallelism and ZeRO in torch and DeepSpeed: the small GPT, one microbatch after another.

All reduce in buckets of the same size. `each` reduces gradients with every microbatch, as a system that
never holds all of them must; otherwise they are accumulated locally and reduced once a step.
"""

from __future__ import annotations

import contextlib
import os
import warnings

import small_gpt
import torch
import torch.distributed as dist
from harness import Step
from small_gpt import MICROBATCHES, SAMPLES, adamw, batch, mean_loss, plain
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

BUCKET_MIB = 25


def my_pairs() -> list[tuple[Tensor, Tensor]]:
    """This rank's microbatches."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    inputs, targets = batch()
    return list(zip(inputs[mine], targets[mine], strict=True))


def ddp(zero1: bool = False) -> Step:
    """DistributedDataParallel with one reduction per step; `zero1`: with torch's ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(plain(), gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MIB)
    if zero1:
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=1e-3,
            weight_decay=0.01,
            fused=True,
        )
    else:
        optimizer = adamw(model.parameters())
    pairs = my_pairs()

    def step() -> float:
        total = 0.0
        for at, (x, y) in enumerate(pairs):
            with contextlib.nullcontext() if at == len(pairs) - 1 else model.no_sync():
                loss = mean_loss(model(x), y) / len(pairs)
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def fsdp(parameters: bool, each: bool) -> Step:
    """FSDP2, with one unit per block and one for the rest.

    Args:
        parameters: shard them between a unit's forward and backward too (ZeRO-3); otherwise they are gathered
            once a step (ZeRO-2, or ZeRO-1 where gradients are not reduced with `each`).
    """
    model, mesh = plain(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # pyright: ignore
        fully_shard(block, mesh=mesh, reshard_after_forward=parameters)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if parameters else False)
    optimizer = adamw(model.parameters())
    pairs = my_pairs()

    def step() -> float:
        total = 0.0
        for at, (x, y) in enumerate(pairs):
            last = at == len(pairs) - 1
            model.set_requires_gradient_sync(each or last)  # pyright: ignore
            model.set_is_last_backward(last)  # pyright: ignore
            model.set_reshard_after_backward(parameters or last)  # pyright: ignore
            loss = mean_loss(model(x), y) / len(pairs)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def deepspeed(stage: int) -> Step:
    """DeepSpeed's engine: stages 0 and 1 reduce once per step, 2 and 3 with each microbatch."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # pyright: ignore

    warnings.simplefilter("ignore", FutureWarning)  # otherwise one per collective
    model = plain()
    bucket = BUCKET_MIB * 2**20 // 4
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICROBATCHES // dist.get_world_size(),
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    pairs = my_pairs()

    def step() -> float:
        total = 0.0
        for x, y in pairs:
            loss = mean_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(pairs)
        return total

    return step


def local_loss(loss: object) -> float:
    """The loss that peers report: the mean over this rank's tokens. Stretto reports sums of microbatches."""
    if isinstance(loss, float):
        return loss
    assert isinstance(loss, Tensor)
    tokens = MICROBATCHES * SAMPLES * small_gpt.SEQUENCE // dist.get_world_size()
    return float(loss.sum()) / tokens
