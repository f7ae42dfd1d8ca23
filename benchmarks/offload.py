"""Claim: optimiser states in host memory or in files cost little time if there is enough work to hide them.

The small GPT with more states relative to its work (a larger vocabulary, fewer microbatches) and with more
work, with its states in memory and offloaded, on the same ranks in turn. Hidden is the share of the
transfer time during which no step was waiting for it.

    python benchmarks/offload.py [--ranks 2] [--path /fast/disk]
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, astuple, dataclass

import torch
import torch.distributed as dist
from harness import Step, Timing, arguments, compare, laps, on_ranks, table, where
from small_gpt import SAMPLES, batch, config, replica, resize

from stretto.run.train.language_task import apply_gradients
from stretto.run.train.rank_model import RankModel

MEMORY = "in memory"
WHERE = {MEMORY: "none", "host memory": "cpu", "files": "nvme"}


@dataclass(frozen=True)
class Size:
    hidden: int
    vocab: int
    microbatches: int


SIZES = (
    Size(256, 8192, 8),
    Size(256, 8192, 2),
    Size(256, 32768, 8),
    Size(512, 8192, 8),
)


@dataclass(frozen=True)
class Files:
    """Of one rank, over the measured steps: seconds in which files were read or written, seconds waited for
    that, and bytes moved.
    """

    moved_s: float
    waited_s: float
    moved: int

    @property
    def hidden(self) -> float:
        """The share of the transfer time during which no step was waiting."""
        return 1 - self.waited_s / self.moved_s if self.moved_s else 1.0


@dataclass(frozen=True)
class Result:
    size: Size
    parameters: int
    timings: list[Timing]
    files: list[Files]  # by rank


def one_step(contestant: RankModel, size: Size) -> Step:
    """A training step including its last wait, so that no work spills into another contestant's time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = batch()
    mine = [at % len(inputs) for at in range(rank * size.microbatches, (rank + 1) * size.microbatches)]
    x, y = [inputs[at] for at in mine], [targets[at] for at in mine]
    scale = torch.full((len(x),), 1.0 / (ranks * size.microbatches * x[0].numel()))

    def step() -> None:
        contestant.step(x, y, scale)
        apply_gradients(contestant, 1e-3, float(contestant.gradient_norm()))
        contestant.states.ready()

    return step


def counters(contestant: RankModel) -> Files:
    """Seconds of transfers and waits so far."""
    files = contestant.optimizer.sharded[0].files
    assert files is not None
    ring = files.ring
    return Files(ring.moved_s, ring.waited_s, ring.moved)


def compete(size: Size, path: str, rounds: int) -> tuple[int, list[Timing], Files]:
    """A contestant for each place of the states, on this rank."""
    resize(size.hidden, size.vocab)
    ranks = dist.get_world_size()
    fixed = {
        "layout__dp": ranks,
        "dp__mode": "zero1" if ranks > 1 else "ddp",
        "dp__path": path,
        "batch__global_size": size.microbatches * SAMPLES * ranks,
    }
    contestant = {name: replica(config(**fixed, dp__offload=where)) for name, where in WHERE.items()}
    steps = {name: one_step(method, size) for name, method in contestant.items()}
    before = counters(contestant["files"])
    walls = laps(steps, rounds, warmup=2)
    after = counters(contestant["files"])
    files = Files(*(late - early for late, early in zip(astuple(after), astuple(before), strict=True)))
    parameters = sum(p.numel() for p in contestant[MEMORY].parameters.values())
    for method in contestant.values():
        method.close()
    return parameters, compare(walls, MEMORY), files


def main() -> None:
    args = arguments(__doc__, rounds=9, ranks=1, path=tempfile.gettempdir())
    for size in SIZES:
        by_rank = on_ranks(args.ranks, compete, size, args.path, args.rounds)
        result = Result(size, by_rank[0][0], by_rank[0][1], [files for _, _, files in by_rank])
        print(
            table(
                f"{args.ranks} ranks, {result.parameters / 1e6:.1f}M parameters, {size}",
                result.timings,
                MEMORY,
            )
        )
        for rank, files in enumerate(result.files):
            print(
                f"rank {rank}: {files.moved / 2**20:.0f} MiB moved in {files.moved_s:.2f} s, "
                f"waited {files.waited_s:.2f} s: {files.hidden:.0%} hidden"
            )
        print(f"\n{where()}\n", flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps({"title": "offload", "where": where(), **asdict(result)}) + "\n")


if __name__ == "__main__":
    main()
