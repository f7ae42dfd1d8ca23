"""Claim: two data-parallel ranks are at least as fast as torch's DistributedDataParallel on the same model.

python benchmarks/dp.py [--deepspeed 1]     # DeepSpeed without ZeRO too, where it is installed
"""

from __future__ import annotations

import contextlib
import os

import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report
from small_gpt import (
    MICROBATCHES,
    SAMPLES,
    adamw,
    batch,
    config,
    mean_loss,
    only_rank,
    plain,
    replica,
    single_step,
    stretto_step,
    with_blas,
)
from torch.nn.parallel import DistributedDataParallel

REFERENCE = "torch DDP"


def ddp() -> Step:
    """DDP with one reduction a step, gradients as views of its buckets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(plain(), gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())
    inputs, targets = batch()
    pairs = list(zip(inputs[rank::world], targets[rank::world], strict=True))

    def step() -> None:
        for at, (x, y) in enumerate(pairs):
            with contextlib.nullcontext() if at == len(pairs) - 1 else model.no_sync():
                (mean_loss(model(x), y) / len(pairs)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def deepspeed_zero0() -> Step:
    """DeepSpeed's engine without ZeRO."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # pyright: ignore

    rank, world = dist.get_rank(), dist.get_world_size()
    model = plain()
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICROBATCHES // world,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    inputs, targets = batch()
    pairs = list(zip(inputs[rank::world], targets[rank::world], strict=True))

    def step() -> None:
        for x, y in pairs:
            engine.backward(mean_loss(engine(x), y))
            engine.step()

    return step


def compete(rounds: int, with_deepspeed: bool) -> list[Timing]:
    world = dist.get_world_size()
    contestants = {
        "one process": only_rank(0, single_step(plain()), dist.get_rank()),
        REFERENCE: ddp(),
        "Stretto": stretto_step(replica(config(layout__dp=world)), world),
        "Stretto, BLAS products": with_blas(stretto_step(replica(config(layout__dp=world)), world)),
    }
    if with_deepspeed:
        contestants["DeepSpeed ZeRO-0"] = deepspeed_zero0()
    return race(contestants, REFERENCE, rounds=rounds)


def main() -> None:
    given = arguments(__doc__, rounds=15, deepspeed=0)
    timings = on_ranks(2, compete, given.rounds, bool(given.deepspeed))[0]
    report("2 data-parallel ranks", timings, REFERENCE, given.out)


if __name__ == "__main__":
    main()
