"""Claim: two context-parallel ranks need at most 0.55 of one process's activations, at a sequence of 8192.

A stack of GPT blocks in float32, forward and backward, ring and all-to-all (Ulysses). The reference is the
plain stack on one rank while the second rank waits. Activations are the distinct storages that autograd
keeps for the backward; the growth of the process at its peak is reported too, each contestant in fresh
processes.

    python benchmarks/context.py
"""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Step, Timing, arguments, on_ranks, race, report, where
from torch import Tensor, nn

from stretto.engine.models.build import build
from stretto.engine.models.sharding import sharding_plan
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.parallelize import parallelize
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.job.attention import ContextKind
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.layout.layout import Layout

ALONE = "one process"
METHODS: tuple[ContextKind, ...] = ("ring", "ulysses")
RANKS = 2


@dataclass(frozen=True)
class Size:
    sequence: int
    hidden: int
    heads: int
    layers: int

    @property
    def shape(self) -> ModelShape:
        """A small vocabulary, since head and loss are excluded."""
        return ModelShape(
            family="gpt",
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocab=64,
            sequence=self.sequence,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of one contestant on the rank that needs the most."""

    name: str
    activations: int
    grown: int  # of the process, from before the forward to its peak


class Stack(nn.Module):
    """A model's blocks, whole or as this rank's share, with an input for its positions."""

    def __init__(self, size: Size, method: ContextKind, mesh: Mesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = build(size.shape)
        x = torch.randn(1, size.sequence, size.hidden)
        if mesh is not None:
            parallelize(model, sharding_plan(Job(shape=size.shape, layout=mesh.layout, context=method)), mesh)
            x = SequenceSplit.of(mesh, size.sequence, False).take(x, 1, 0.0)
        self.blocks = nn.Sequential(*model.blocks)
        self.x = x.requires_grad_()

    def forward(self) -> Tensor:
        return self.blocks(self.x)

    def step(self) -> None:
        """Forward and backward."""
        y = self()
        y.backward(torch.ones_like(y))
        self.zero_grad(set_to_none=True)
        self.x.grad = None


def stack_of(name: str, size: Size) -> Stack:
    for method in METHODS:
        if name == method:
            return Stack(size, method, Mesh(Layout(cp=dist.get_world_size())))
    return Stack(size, METHODS[0], None)


def needed(name: str, size: Size) -> tuple[int, int]:
    """Bytes kept for the backward, and the growth of the process."""
    stack = stack_of(name, size)
    if name == ALONE and dist.get_rank():
        return 0, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    saved = dict[int, int]()
    weights = {p.untyped_storage().data_ptr() for p in stack.parameters()}

    def pack(t: Tensor) -> Tensor:
        memory = t.untyped_storage()
        if memory.data_ptr() not in weights:
            saved[memory.data_ptr()] = memory.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = stack()
    y.backward(torch.ones_like(y))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return sum(saved.values()), grown * 1024


def only_first(step: Step) -> Step:
    return step if dist.get_rank() == 0 else lambda: None


def compete(size: Size, rounds: int) -> list[Timing]:
    contestants: dict[str, Step] = {name: stack_of(name, size).step for name in METHODS}
    contestants[ALONE] = only_first(stack_of(ALONE, size).step)
    return race(contestants, ALONE, rounds=rounds, warmup=1)


def table(memories: list[Memory]) -> str:
    """Memory as Markdown."""
    first = memories[0]
    rows = [
        "| | activations, MiB | of one process's | process grew, MiB | of one process's |",
        "|---|---|---|---|---|",
    ]
    rows += [
        f"| {m.name} | {m.activations / 2**20:.1f} | {m.activations / first.activations:.3f} "
        f"| {m.grown / 2**20:.1f} | {m.grown / first.grown:.3f} |"
        for m in memories
    ]
    return "\n".join(rows)


def memory(size: Size, out: Path | None) -> None:
    """Print the memory of each contestant."""
    memories = list[Memory]()
    for name in (ALONE, *METHODS):
        ranks = on_ranks(RANKS, needed, name, size)
        memories.append(Memory(name, max(r[0] for r in ranks), max(r[1] for r in ranks)))
    print(table(memories), flush=True)
    if out is not None:
        with out.open("a") as file:
            rows = [vars(m) for m in memories]
            file.write(json.dumps({"title": "memory", "where": where(), "rows": rows}) + "\n")


def main() -> None:
    args = arguments(__doc__, rounds=5, sequence=8192, hidden=256, heads=4, layers=4)
    size = Size(args.sequence, args.hidden, args.heads, args.layers)
    model = f"{size.layers} GPT blocks of width {size.hidden}, sequence {size.sequence}"
    title = f"{RANKS} context-parallel ranks, {model}"
    print(f"### {title}: memory\n")
    memory(size, args.out)
    if args.rounds:
        report(title, on_ranks(RANKS, compete, size, args.rounds)[0], ALONE, args.out)


if __name__ == "__main__":
    main()
