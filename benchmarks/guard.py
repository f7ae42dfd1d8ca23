"""What comparing copies costs: one comparison of weights and AdamW's states beside one step of the small GPT
of the step benchmarks, on data-parallel ranks, by the processor time of rank 0.

A comparison reads every number that a rank holds once. A model of real size computes far longer on each of
them in a step than this one does, so the share printed here is an upper bound.

    python benchmarks/guard.py [--rounds 20] [--ranks 2]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import small_gpt
import torch
import torch.distributed as dist
from harness import arguments

from stretto.engine.optim.rate import Rate
from stretto.engine.parallel.copies import Copies
from stretto.run.data.dataset import Batch
from stretto.run.launch.local import run_ranks
from stretto.run.train.held import held_by
from stretto.run.train.step import TrainingStep


class Samples:
    """The same random samples again and again."""

    def batch(self, indices: Sequence[int]) -> Batch:
        draw = torch.Generator().manual_seed(1)
        shape = (len(indices), small_gpt.SEQUENCE)
        tokens = torch.randint(0, small_gpt.VOCAB, shape, generator=draw)
        return Batch(inputs=tokens, targets=tokens)


def measure(ranks: int, rounds: int) -> tuple[float, float, int, int]:
    """Seconds of the processor for a step and for a comparison, tensors compared, and bytes read."""
    dist.init_process_group("gloo")
    replica = small_gpt.replica(small_gpt.config(layout__dp=ranks))
    training = TrainingStep(replica, Rate.of(replica.job.optimiser, 1000))
    copies, samples = Copies(), Samples()
    steps, comparisons = list[float](), list[float]()
    for number in range(rounds + 2):
        started = time.process_time()
        training.run(samples, step=number, seen=0)
        stepped = time.process_time()
        assert not copies.differences(held_by(replica))
        if number > 1:
            steps.append(stepped - started)
            comparisons.append(time.process_time() - stepped)
    read = sum(tensor.nbytes for tensor, _ in held_by(replica).values())
    replica.close()
    dist.destroy_process_group()
    return median(steps), median(comparisons), copies.compared, read


def main() -> None:
    options = arguments(__doc__, rounds=20, ranks=2)
    step, comparison, compared, read = run_ranks(options.ranks, measure, options.ranks, options.rounds)[0]
    print(
        f"step {1000 * step:.1f} ms, comparison {1000 * comparison:.2f} ms of the processor "
        f"({compared} tensors, {read / 1e6:.1f} MB, {read / comparison / 1e9:.1f} GB/s)"
    )
    for every in (1, 10, 50, 100):
        print(f"guard.check_replicas={every}: {100 * comparison / step / every:.3f}% of the step")


if __name__ == "__main__":
    main()
