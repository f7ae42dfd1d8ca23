"""Claims: each way of sharding states over data-parallel ranks is at least as fast as torch's own and as
DeepSpeed's stage, and holds no more.

One race for each of ddp, zero1, zero2 and zero3. `each` reduces gradients with every microbatch, otherwise
they are reduced once a step: contestants of the same kind do equal work. Stretto waits at the end of a
step for the weights of the next, although a training run would meanwhile begin it. Memory is a process's
growth at its peak in a step, each contestant alone.

    python benchmarks/zero.py [--mode zero2] [--ranks 4] [--hidden 512] [--deepspeed 1] [--memory 0]
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch.distributed as dist
import zero_peers as peers
from harness import Laps, Step, arguments, compare, growth, laps, on_ranks, report, where
from small_gpt import config, replica, resize, stretto_step, with_blas

MODES = ("ddp", "zero1", "zero2", "zero3")
BLAS = ", BLAS products"


def stretto(mode: str, each: bool) -> Step:
    """Stretto's contestant on this rank."""
    settings = {
        "layout__dp": dist.get_world_size(),
        "dp__mode": mode,
        "dp__reduce": "microbatch" if each else "step",
        "train__bucket_mib": peers.BUCKET_MIB,
    }
    return stretto_step(replica(config(**settings)), dist.get_world_size())


def torch_own(mode: str) -> dict[str, Callable[[], Step]]:
    """torch's counterparts of a mode."""
    once, each = "torch FSDP2, once a step", "torch FSDP2, each microbatch"
    match mode:
        case "ddp":
            return {"torch DDP": peers.ddp}
        case "zero1":
            return {
                "torch DDP, ZeRO optimiser": partial(peers.ddp, True),
                once: partial(peers.fsdp, False, False),
            }
        case _:
            sharded = mode == "zero3"
            return {once: partial(peers.fsdp, sharded, False), each: partial(peers.fsdp, sharded, True)}


def contestants(mode: str, with_deepspeed: bool) -> dict[str, Callable[[], Step]]:
    """Builders of each contestant's step, by name."""
    makers = torch_own(mode)
    for each in (False, True) if mode in ("zero2", "zero3") else (False,):
        name = (
            "Stretto"
            if mode in ("ddp", "zero1")
            else f"Stretto, {'each microbatch' if each else 'once a step'}"
        )
        makers[name] = partial(stretto, mode, each)
        makers[name + BLAS] = lambda each=each: with_blas(stretto(mode, each))
    if with_deepspeed:
        makers[f"DeepSpeed ZeRO-{MODES.index(mode)}"] = partial(peers.deepspeed, MODES.index(mode))
    return makers


def compete(mode: str, hidden: int, rounds: int, with_deepspeed: bool) -> Laps:
    """All contestants of a mode on the same ranks; their losses must agree."""
    resize(hidden)
    losses = dict[str, float]()

    def remembering(name: str, step: Step) -> Step:
        def remember() -> None:
            losses[name] = peers.local_loss(step())

        return remember

    makers = contestants(mode, with_deepspeed)
    raced = laps({name: remembering(name, make()) for name, make in makers.items()}, rounds)
    assert max(losses.values()) - min(losses.values()) < 0.01, losses
    return raced


def grown(mode: str, name: str, hidden: int, with_deepspeed: bool) -> int:
    """Growth of one rank in bytes."""
    resize(hidden)
    return growth(contestants(mode, with_deepspeed)[name])


def equals(raced: Laps, names: list[str]) -> list[str]:
    """One line for each pair of torch's and Stretto's contestants that do equal work."""
    lines = list[str]()
    for peer in [name for name in names if name.startswith("torch")]:
        work = peer.partition(", ")[2] if "FSDP2" in peer else ""
        for timing in compare(raced, peer):
            plain = timing.name.removesuffix(BLAS)
            if plain == "Stretto" or plain == f"Stretto, {work}":
                lines.append(
                    f"{timing.name} over {peer}: {timing.speedup:.2f} ({timing.low:.2f} to {timing.high:.2f})"
                )
    return lines


def memory(
    mode: str, names: list[str], ranks: int, hidden: int, with_deepspeed: bool, out: Path | None
) -> None:
    """Each contestant alone in fresh processes."""
    title = f"{ranks} ranks, {mode}, hidden {hidden}: MiB a process grows by"
    print(f"### {title}\n\n| | most | by rank |\n|---|---|---|")
    rows = dict[str, list[int]]()
    for name in names:
        rows[name] = on_ranks(ranks, grown, mode, name, hidden, with_deepspeed)
        each = [f"{size / 2**20:.0f}" for size in rows[name]]
        print(f"| {name} | {max(rows[name]) / 2**20:.0f} | {', '.join(each)} |", flush=True)
    print(f"\n{where()}\n", flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps({"title": title, "where": where(), "rows": rows}) + "\n")


def main() -> None:
    args = arguments(__doc__, rounds=11, ranks=2, hidden=256, deepspeed=0, memory=1, race=1, mode="all")
    ranks, hidden, with_deepspeed = args.ranks, args.hidden, bool(args.deepspeed)
    for mode in MODES if args.mode == "all" else args.mode.split(","):
        names = list(contestants(mode, with_deepspeed))
        if args.race:
            raced: Laps = on_ranks(ranks, compete, mode, hidden, args.rounds, with_deepspeed)[0]
            torchs = [name for name in names if name.startswith("torch")]
            reference = min(torchs, key=lambda name: median(raced.walls[name]))
            report(f"{ranks} ranks, {mode}, hidden {hidden}", compare(raced, reference), reference, args.out)
            print(*equals(raced, names), "", sep="\n", flush=True)
        if args.memory:
            alone = [name for name in names if not name.endswith(BLAS)]
            memory(mode, alone, ranks, hidden, with_deepspeed, args.out)


if __name__ == "__main__":
    main()
