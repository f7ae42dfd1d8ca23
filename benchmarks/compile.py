"""Forward and backward of a model whose blocks are compiled, compared with the same model as it is.

Both are replicas as training assembles them, on one rank and one thread, and take the same random tokens.
What compiling took and how many graphs there are is printed first.

    python benchmarks/compile.py [--hidden 512] [--sequence 512] [--dtype bfloat16] [--families llama,qwen3]
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from time import perf_counter

import torch
from harness import Step, Timing, arguments, on_ranks, race, report

from stretto.engine.parallel.mesh import Mesh
from stretto.job.data_parallel import Dtype, Precision
from stretto.job.families import FAMILY_DEFAULTS, Family
from stretto.job.job import Job
from stretto.job.shape import ModelShape
from stretto.run.train.assemble import assemble
from stretto.run.train.rank_model import RankModel

EAGER, COMPILED = "eager", "compiled"
BATCH, BLOCKS, VOCAB = 2, 4, 512  # a small vocabulary, for the head is not compiled


def shape_of(family: Family, hidden: int, sequence: int) -> ModelShape:
    """A model of the family with heads of 64 features."""
    return ModelShape(
        family=family,
        layers=BLOCKS,
        hidden=hidden,
        heads=hidden // 64,
        kv_heads=hidden // 64 if family == "gpt" else max(hidden // 256, 1),
        vocab=VOCAB,
        sequence=sequence,
        **FAMILY_DEFAULTS[family].shape,
    )


def step_of(replica: RankModel) -> Step:
    """Forward and backward of one microbatch."""
    job = replica.job
    ids = torch.randint(
        VOCAB, (job.micro_batch, job.sequence + 1), generator=torch.Generator().manual_seed(0)
    )
    inputs, targets = [ids[:, :-1].contiguous()], [ids[:, 1:].contiguous()]
    replica.samples[:] = [range(job.micro_batch)]
    replica.pipeline.train()
    return lambda: replica.step(inputs, targets, torch.ones(1))


def raced(job: Job, rounds: int) -> tuple[str, list[Timing]]:
    """What was compiled, and the times of both."""
    replicas = {
        name: assemble(replace(job, compile=how), Mesh(job.layout), seed=0)
        for name, how in ((EAGER, "off"), (COMPILED, "blocks"))
    }
    steps = {name: step_of(replica) for name, replica in replicas.items()}
    started = perf_counter()
    steps[COMPILED]()
    compiler = replicas[COMPILED].compiler
    assert compiler is not None
    summary = f"{compiler.news()}; the first step took {perf_counter() - started:.1f} s"
    timings = race(steps, EAGER, rounds, warmup=2)
    for replica in replicas.values():
        replica.close()
    return summary, timings


def on_rank(args: Namespace, family: Family) -> tuple[str, list[Timing]]:
    """One family's race."""
    dtype: Dtype = args.dtype
    job = Job(
        shape=shape_of(family, args.hidden, args.sequence),
        global_batch=BATCH,
        micro_batch=BATCH,
        precision=Precision(dtype=dtype),
        unified_memory=True,
    )
    return raced(job, args.rounds)


def main() -> None:
    args = arguments(
        __doc__, 15, hidden=512, sequence=512, dtype="float32", families="llama,qwen3,gemma2,gpt"
    )
    for family in args.families.split(","):
        summary, timings = on_ranks(1, on_rank, args, family)[0]
        print(summary)
        size = f"hidden {args.hidden}, {BATCH} x {args.sequence} tokens, {args.dtype}"
        report(f"{family}, {BLOCKS} blocks of {size}", timings, EAGER, args.out)


if __name__ == "__main__":
    main()
