"""Claim: pipelines of two ranks beat torch.distributed.pipelining by 5% on the same stages.

1F1B and interleaved. `same modules` runs Stretto's pipeline on the peer's own plain modules and loss;
`Stretto` is what `stretto train` runs.

    python benchmarks/pp.py
"""

from __future__ import annotations

import torch.distributed as dist
from harness import Timing, arguments, on_ranks, race, report
from pp_schedules import same_modules, torchs
from small_gpt import (
    MICROBATCHES,
    config,
    only_rank,
    plain,
    replica,
    single_step,
    stretto_step,
    with_blas,
)

from stretto.program import schedule


def compete(name: str, kind: str, chunks: int, rounds: int) -> list[Timing]:
    program = schedule(name, dist.get_world_size(), MICROBATCHES, chunks=chunks)
    overrides = {"layout__pp": dist.get_world_size(), "schedule__name": name}
    overrides |= {"schedule__chunks": chunks} if chunks > 1 else {}
    contestants = {
        "one process": only_rank(0, single_step(plain()), dist.get_rank()),
        f"torch {name}": torchs(kind, program),
        "Stretto, same modules": same_modules(program),
        "Stretto": stretto_step(replica(config(**overrides))),
        "Stretto, BLAS products": with_blas(stretto_step(replica(config(**overrides)))),
    }
    return race(contestants, f"torch {name}", rounds=rounds)


def main() -> None:
    args = arguments(__doc__, rounds=15)
    for name, kind, chunks in (("1f1b", "Schedule1F1B", 1), ("interleaved", "ScheduleInterleaved1F1B", 2)):
        timings = on_ranks(2, compete, name, kind, chunks, args.rounds)[0]
        report(f"2 pipeline ranks, {name}", timings, f"torch {name}", args.out)


if __name__ == "__main__":
    main()
