"""Claim: at least 1,000,000 actions of a program are replayed per second on one core.

Half a million with costs that make the order of events depend on times: links that carry one message after
another, alone or shared by the ranks of a node, blocking sends, activations moved to host memory and back.

CPU seconds, best of several. "first" sorts the program (once for its lifetime) and replays it; "again" is
every later replay, for example with other costs. Last, an edit as the page asks for it: an action of 16 ranks
and 64 microbatches moved, the program checked and replayed, at most 100 ms.

    python benchmarks/replay.py [--ranks 64] [--microbatches 256] [--repeats 3]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from time import process_time

from stretto.program import Program, lower, schedule
from stretto.program.replay import Costs, simulate
from stretto.program.transforms.activations import offload
from stretto.web.edits import edit

CASES = {"1f1b": {}, "zb-h1": {}, "interleaved": {"chunks": 2}, "interleaved, 4 chunks": {"chunks": 4}}
PLAIN = Costs(F=1.0, I=1.25, W=0.5, hop=0.05)
CONTENDED = replace(PLAIN, message_bytes=1.0, bandwidth=20.0, contention=True)
NODE = 8  # ranks


def shared(ranks: int) -> Costs:
    """Costs with one link from each node to each other."""
    pairs = ((a, b) for a in range(ranks) for b in range(ranks) if a != b)
    return replace(CONTENDED, links={(a, b): f"{a // NODE} to {b // NODE}" for a, b in pairs})


def seconds(work: Callable[[], object]) -> float:
    start = process_time()
    work()
    return process_time() - start


def rates(program: Program, costs: Costs, repeats: int) -> tuple[float, float]:
    """Actions per second: on the first replay of a program, and on later ones."""
    actions = sum(map(len, program.orders))
    fresh = [replace(program) for _ in range(repeats)]  # equal programs, none of them replayed before
    first = min(seconds(lambda each=each: simulate(each, costs)) for each in fresh)
    again = min(seconds(lambda: simulate(fresh[0], costs)) for _ in range(repeats))
    return actions / first, actions / again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(f"p={args.ranks} m={args.microbatches}; million actions a CPU second")
    print(f"{'schedule':24}{'':20}{'actions':>9}{'first':>8}{'again':>8}")
    for name, options in CASES.items():
        plain = schedule(name.partition(",")[0], args.ranks, args.microbatches, **options)
        lowered = lower(plain)
        for kind, program, costs in (
            ("unlowered", plain, PLAIN),
            ("lowered", lowered, PLAIN),
            ("contention", plain, CONTENDED),
            ("contention, lowered", lowered, CONTENDED),
            ("shared links", plain, shared(args.ranks)),
            ("blocking", plain, replace(PLAIN, blocking=True)),
            ("offloading", offload(plain), replace(PLAIN, offload=0.5, reload=0.5)),
        ):
            actions = sum(map(len, program.orders))
            first, again = rates(program, costs, args.repeats)
            print(f"{name:24}{kind:20}{actions:9}{first / 1e6:8.2f}{again / 1e6:8.2f}", flush=True)
    for name in ("1f1b", "zb-v", "interleaved", "dualpipe-v"):
        row = [*map(str, schedule(name, 16, 64).orders[3])]
        row.insert(len(row) // 2 + 1, row.pop(len(row) // 2))
        orders = [",".join(row) if rank == 3 else "" for rank in range(16)]
        program = {"name": name, "ranks": 16, "microbatches": 64, "orders": orders}
        taken = min(seconds(lambda program=program: edit({"program": program})) for _ in range(args.repeats))
        print(f"{name:24}{'edit of 16 x 64':20}{1e3 * taken:9.1f} ms", flush=True)


if __name__ == "__main__":
    main()
