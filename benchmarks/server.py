"""Claim: with `server` only the first rank holds optimiser states, while the others hold weights and
gradients; the price is traffic through that one rank, which grows with their number, where `ddp` sends the
same from each.

Bytes that each rank sends in a step and holds at its peak, for the small GPT on 1 to 4 data-parallel
ranks.

    python benchmarks/server.py [--hidden 512] [--modes server,ddp,zero1]
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from harness import arguments, on_ranks, where
from small_gpt import SAMPLES, SEQUENCE, batch, config, replica, resize

from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.traffic import traffic
from stretto.run.config.job import job_of
from stretto.run.config.schema import TrainConfig
from stretto.run.train.language_task import apply_gradients
from stretto.run.train.memory_measured import measure

MIB = 2**20
RANKS = (1, 2, 3, 4)
EACH = 2  # microbatches per rank
KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Rank:
    """Bytes of one rank: sent per step by kind of communication, and held at the peak by kind."""

    sent: dict[str, int]
    kinds: dict[str, int]
    peak: int


def job(mode: str, ranks: int) -> TrainConfig:
    """A fixed number of microbatches per rank, whatever the number of ranks."""
    return config(layout__dp=ranks, dp__mode=mode, batch__global_size=EACH * SAMPLES * ranks)


def one_rank(mode: str, hidden: int) -> Rank:
    """Traffic of a step after the first; memory in a separate run."""
    resize(hidden)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = batch()
    mine = slice(EACH * rank, EACH * (rank + 1))
    contestant = replica(job(mode, ranks))
    scale = torch.full((EACH,), 1.0 / (EACH * SAMPLES * SEQUENCE * ranks))

    def step() -> None:
        contestant.step(inputs[mine], targets[mine], scale)
        apply_gradients(contestant, 1e-3, float(contestant.gradient_norm()))
        contestant.states.ready()

    step()
    with traffic() as sent:
        step()
    dist.barrier()
    contestant.close()
    described = job_of(job(mode, ranks))
    memory = measure(described, Mesh(described.layout))
    return Rank({kind: n for kind, n in sent.bytes.items() if n}, memory.kinds, memory.peak)


def main() -> None:
    args = arguments(__doc__, hidden=256, modes="server,ddp")
    print("| | rank | sent, MiB | by kind | weights | gradients | states | all, at the fullest |")
    print("|---|---|---|---|---|---|---|---|")
    rows = dict[str, list[Rank]]()
    for ranks in RANKS:
        for mode in args.modes.split(","):
            name = f"{mode}, {ranks}"
            rows[name] = on_ranks(ranks, one_rank, mode, args.hidden)
            for rank, outcome in enumerate(rows[name]):
                kinds = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in outcome.sent.items())
                columns = " | ".join(f"{outcome.kinds.get(kind, 0) / MIB:.1f}" for kind in KINDS)
                sent = sum(outcome.sent.values()) / MIB
                print(
                    f"| {name} | {rank} | {sent:.1f} | {kinds} | {columns} | {outcome.peak / MIB:.1f} |",
                    flush=True,
                )
    print(f"\n{where()}")
    if args.out is not None:
        plain = {name: [asdict(rank) for rank in ranks_of] for name, ranks_of in rows.items()}
        with args.out.open("a") as file:
            file.write(json.dumps({"title": "server", "where": where(), "rows": plain}) + "\n")


if __name__ == "__main__":
    main()
