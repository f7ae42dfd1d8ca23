"""Claim: two data-parallel ranks are at least as fast as torch's DistributedDataParallel on the same model.

python benchmarks/dp.py [--deepspeed 1]     # also DeepSpeed without ZeRO, if installed
"""

from __future__ import annotations

import torch.distributed as dist
from harness import Timing, arguments, on_ranks, race, report
from small_gpt import config, only_rank, plain, replica, single_step, stretto_step, with_blas
from zero_peers import ddp, deepspeed

REFERENCE = "torch DDP"


def compete(rounds: int, with_deepspeed: bool) -> list[Timing]:
    world = dist.get_world_size()
    contestants = {
        "one process": only_rank(0, single_step(plain()), dist.get_rank()),
        REFERENCE: ddp(),
        "Stretto": stretto_step(replica(config(layout__dp=world)), world),
        "Stretto, BLAS products": with_blas(stretto_step(replica(config(layout__dp=world)), world)),
    }
    if with_deepspeed:
        contestants["DeepSpeed ZeRO-0"] = deepspeed(0)
    return race(contestants, REFERENCE, rounds=rounds)


def main() -> None:
    args = arguments(__doc__, rounds=15, deepspeed=0)
    timings = on_ranks(2, compete, args.rounds, bool(args.deepspeed))[0]
    report("2 data-parallel ranks", timings, REFERENCE, args.out)


if __name__ == "__main__":
    main()
