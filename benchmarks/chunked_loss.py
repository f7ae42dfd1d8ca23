"""Head and loss in chunks of tokens, compared with all logits at once: time, and peak of the last stage.

The model is the quickstart's with a vocabulary of 128k, on two pipeline ranks. The peak is that of all
tensors during a step of training, predicted and measured, whole and beside weights, gradients and optimiser
states.

    python benchmarks/chunked_loss.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from harness import arguments, race, report
from torch import Tensor, nn

from stretto.cli.jobs import load_language
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.chunked_loss import ChunkedCrossEntropy
from stretto.engine.parallel.tensor.linear import ParallelLinear
from stretto.engine.parallel.tensor.vocabulary import VocabParallelCrossEntropy
from stretto.job.job import Job
from stretto.planner.memory.job import memory_of
from stretto.planner.memory.ranks import one_rank
from stretto.run.config.job import job_of
from stretto.run.launch.local import run_ranks
from stretto.run.train.memory_measured import MeasuredMemory, measure

VOCAB, HIDDEN, SAMPLES, LENGTH = 131072, 256, 4, 128
CHUNKS = (64, 128, 256)
CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
LASTING = ("weights", "gradients", "optimizer", "masters")
MIB = 2**20


def step(chunk: int) -> Tensor:
    """Forward and backward of head and loss, with the weight's gradient accumulated; returns the loss."""
    weight, x, targets = HEAD
    out, part = ParallelLinear(weight, None), VocabParallelCrossEntropy(0, VOCAB, None)
    x.grad = None
    if chunk:
        loss = ChunkedCrossEntropy(out, part, chunk)
        loss.expect(targets)
        value = loss.of(x)
    else:
        value = part(out(x), targets)
    value.backward()
    return value.detach()


HEAD = (
    nn.Parameter(torch.randn(VOCAB, HIDDEN) / 16),
    torch.randn(SAMPLES, LENGTH, HIDDEN, requires_grad=True),
    torch.randint(VOCAB, (SAMPLES, LENGTH)),
)


def measure_memory(job: Job) -> MeasuredMemory:
    """What this rank held in a step of training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return measure(job, Mesh(job.layout))
    finally:
        dist.destroy_process_group()


def memory(micro: int) -> None:
    """Peaks of the last stage with `micro` samples in a microbatch."""
    overrides = [f"model.vocab={VOCAB}", f"data.vocab={VOCAB}", "layout.dp=1", f"batch.micro_size={micro}"]
    job = job_of(load_language(str(CONFIG), overrides), vocab=VOCAB)
    peaks = dict[str, tuple[float, float, float]]()
    for name, chunk in (("all at once", 0), ("in chunks", None)):
        chosen = replace(job, loss_chunk=chunk)
        last = next(measured for measured in run_ranks(2, measure_memory, chosen) if measured.pipeline == 1)
        lasting = sum(last.kinds.get(kind, 0) for kind in LASTING)
        predicted = one_rank(memory_of(chosen), 1).total
        peaks[name] = last.peak / MIB, (last.peak - lasting) / MIB, predicted / MIB
    full, chunks = peaks.values()
    print(f"\n### Last stage, {micro} samples of {LENGTH} tokens in a microbatch, MiB\n")
    print("| logits | peak | predicted | beside weights, gradients, states |\n|---|---|---|---|")
    for name, (peak, activations, predicted) in peaks.items():
        print(f"| {name} | {peak:.0f} | {predicted:.0f} | {activations:.0f} |")
    print(f"| ratio | {chunks[0] / full[0]:.2f} | | {chunks[1] / full[1]:.2f} |")


def main() -> None:
    args = arguments(__doc__, rounds=11)
    torch.set_num_threads(1)
    full = step(0)
    for chunk in CHUNKS:
        torch.testing.assert_close(step(chunk), full, rtol=1e-5, atol=0.0)
    contestants = {"all at once": lambda: step(0)}
    contestants |= {f"{chunk} tokens": (lambda chunk=chunk: step(chunk)) for chunk in CHUNKS}
    title = f"head and loss of {SAMPLES * LENGTH} tokens, {HIDDEN} features, vocabulary {VOCAB}"
    report(title, race(contestants, "all at once", rounds=args.rounds, warmup=1), "all at once", args.out)
    for micro in (4, 16):
        memory(micro)


if __name__ == "__main__":
    main()
