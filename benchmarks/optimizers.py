"""The cost of an update with each optimiser relative to AdamW, on a GPT's fragments.

With several ranks, every rank holds its part of one flat unit (ZeRO 1), and LAMB, Adafactor and Muon
communicate.

    python benchmarks/optimizers.py --ranks 2 --only lamb,adafactor
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from harness import Timing, arguments, on_ranks, race, report
from torch import nn

from stretto.engine.optim.build import build_optimizer
from stretto.engine.parallel.fragment import ParameterFragment, ShardPlacement
from stretto.job.optimiser import Optimiser
from stretto.job.parameters import parameter_shapes
from stretto.job.shape import ModelShape
from stretto.layout.shards import padded

CONFIGS = {
    "adamw": Optimiser(),
    "adamw bfloat16": Optimiser(states="bfloat16"),
    "lamb": Optimiser(name="lamb"),
    "adafactor": Optimiser(name="adafactor"),
    "muon": Optimiser(name="muon"),
}


def fragments_of(shape: ModelShape) -> list[ParameterFragment]:
    """Random weights and gradients: all of them, or this rank's part of a single unit."""
    shapes = parameter_shapes(shape)
    fragments = list[ParameterFragment]()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        for name, size in shapes.items():
            parameter = nn.Parameter(torch.randn(size) * 0.02)
            fragments.append(
                ParameterFragment(name=name, parameter=parameter, placed=ShardPlacement.unsharded(name, size))
            )
    else:
        n, rank, at = dist.get_world_size(), dist.get_rank(), 0
        part = padded(sum(map(prod, shapes.values())), n) // n
        for name, size in shapes.items():
            low = min(max(rank * part - at, 0), prod(size))
            high = min(max((rank + 1) * part - at, 0), prod(size))
            parameter = nn.Parameter(torch.randn(high - low) * 0.02)
            placed = ShardPlacement.unsharded(name, size).part(size, low, high)
            fragments.append(
                ParameterFragment(
                    name=name, parameter=parameter, placed=placed, gradient=None, holders=dist.group.WORLD
                )
            )
            at += prod(size)
    for fragment in fragments:
        fragment.parameter.grad = torch.randn_like(fragment.parameter)
    return fragments


def run(layers: int, hidden: int, rounds: int, names: Sequence[str]) -> list[Timing]:
    shape = ModelShape(family="gpt", layers=layers, hidden=hidden, heads=8, vocab=4096, sequence=128)
    steps: dict[str, Callable[[], object]] = {}
    for name in names:
        steps[name] = build_optimizer(fragments_of(shape), CONFIGS[name]).step
    return race(steps, "adamw", rounds=rounds)


def main() -> None:
    args: argparse.Namespace = arguments(__doc__, rounds=15, ranks=1, layers=6, hidden=384, only="")
    names = ["adamw", *args.only.split(",")] if args.only else list(CONFIGS)
    timings = on_ranks(args.ranks, run, args.layers, args.hidden, args.rounds, names)[0]
    title = f"one update, GPT of {args.layers} layers of {args.hidden}, {args.ranks} ranks"
    report(title, timings, "adamw", args.out)


if __name__ == "__main__":
    main()
