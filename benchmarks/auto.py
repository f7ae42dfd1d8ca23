"""The searched schedule on unequal stages, compared with the best named schedule and the lower bound.

Times are the profile of Qi et al. 2024 ("Zero bubble pipeline parallelism", appendix) for a 1.5B model on
8 ranks with 32 microbatches, in milliseconds: F 18.513, B (here I) 18.086, W 9.331, one transfer 0.626.
Stages are unequal: the first, with the embedding, takes 0.7 times as long, the last, with the head, 1.5
times, and every time varies randomly by up to 10%. Nothing is executed; everything is replayed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random

from stretto.program.replay import Costs
from stretto.program.search import search

RANKS, MICROBATCHES = 8, 32
F, I, W, HOP = 18.513, 18.086, 9.331, 0.626
LIMITS = (8.0, 5.0, 4.0)  # microbatches: those of 1F1B and ZB-V, of V-Half, of V-Min


def unequal(chunks: int, seed: int) -> Costs:
    """Costs of `chunks` stages per rank."""
    random = Random(seed)
    stages = RANKS * chunks
    times: list[tuple[float, float, float]] = []
    for stage in range(stages):
        scale = {0: 0.7, stages - 1: 1.5}.get(stage, 1.0) / chunks
        f, i, w = (time * scale * random.uniform(0.9, 1.1) for time in (F, I, W))
        times.append((f, i, w))
    return Costs(hop=HOP, per_stage=times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", type=float, default=1.0, help="of the search")
    parser.add_argument("--seeds", type=int, default=1, help="how many draws of the noise")
    parser.add_argument("--out", type=Path, help="append the figures to this file as JSON lines")
    args = parser.parse_args()
    print("| stages | seed | limit | best by name | its ms | auto ms | gain | bound ms | above it | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for chunks in (1, 2):
        for seed in range(args.seeds):
            for limit in LIMITS:
                begin = time.process_time()
                result = search(RANKS, MICROBATCHES, unequal(chunks, seed), limit, effort=args.effort)
                taken = time.process_time() - begin
                by_name = f"{result.fixed_value:.1f}" if result.fixed_value else "-"
                gain = f"{1 - result.value / result.fixed_value:.1%}" if result.fixed_value else "-"
                print(
                    f"| {RANKS * chunks} | {seed} | {limit:g} | {result.fixed or 'none'} | {by_name} "
                    f"| {result.value:.1f} | {gain} | {result.bound:.1f} "
                    f"| {result.value / result.bound - 1:.1%} | {taken:.1f} |",
                    flush=True,
                )
                if args.out:
                    row = {"stages": RANKS * chunks, "seed": seed, "limit": limit, "by_name": result.fixed}
                    row |= {
                        "by_name_ms": result.fixed_value,
                        "auto_ms": result.value,
                        "bound_ms": result.bound,
                    }
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row | {"effort": args.effort, "cpu_s": taken}) + "\n")


if __name__ == "__main__":
    main()
