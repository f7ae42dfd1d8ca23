"""What checks of weights and AdamW's states cost beside one step of the small GPT of the step benchmarks, on
data-parallel ranks, by the processor time of rank 0: one comparison of all copies (guard.check_replicas), and
the checksums at both ends of a step (guard.check_memory).

A comparison reads every number that a rank holds once, checksums at both ends read it twice. A model of real
size computes far longer on each of them in a step than this one does, so the shares are upper bounds.

    python benchmarks/guard.py [--rounds 20] [--ranks 2]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import small_gpt
import torch
import torch.distributed as dist
from harness import arguments

from stretto.engine.optim.rate import LearningRate
from stretto.engine.parallel.memory_check import MemoryCheck
from stretto.engine.parallel.replica_check import ReplicaConsistencyCheck
from stretto.run.data.dataset import Batch
from stretto.run.launch.local import run_ranks
from stretto.run.train.language_task import LanguageTask, TextProgress
from stretto.run.train.rank_model import replicated_tensors
from stretto.run.train.trainer import Trainer


class Samples:
    """The same random samples again and again."""

    def batch(self, indices: Sequence[int]) -> Batch:
        draw = torch.Generator().manual_seed(1)
        shape = (len(indices), small_gpt.SEQUENCE)
        tokens = torch.randint(0, small_gpt.VOCAB, shape, generator=draw)
        return Batch(inputs=tokens, targets=tokens)


@dataclass(frozen=True)
class Costs:
    """Seconds of the processor, tensors compared, and bytes of weights and states."""

    step: float
    comparison: float
    checksums: float
    compared: int
    state_bytes: int


def measure(ranks: int, rounds: int) -> Costs:
    """On rank 0 what each costs, as a median."""
    dist.init_process_group("gloo")
    replica = small_gpt.replica(small_gpt.config(layout__dp=ranks))
    trainer = Trainer(
        LanguageTask(replica, Samples(), LearningRate.of(replica.job.optimiser, 1000)), TextProgress()
    )
    copies, memory = ReplicaConsistencyCheck(), MemoryCheck()
    steps, comparisons, checksums = list[float](), list[float](), list[float]()
    for number in range(rounds + 2):
        started = time.process_time()
        trainer.step()
        stepped = time.process_time()
        assert not copies.differences(replicated_tensors(replica))
        compared = time.process_time()
        memory.begin({name: tensor for name, (tensor, _) in replicated_tensors(replica).items()})
        assert not memory.changed(torch.device("cpu"))
        if number > 1:
            steps.append(stepped - started)
            comparisons.append(compared - stepped)
            checksums.append(time.process_time() - compared)
    state_bytes = sum(tensor.nbytes for tensor, _ in replicated_tensors(replica).values())
    replica.close()
    dist.destroy_process_group()
    return Costs(
        step=median(steps),
        comparison=median(comparisons),
        checksums=median(checksums),
        compared=copies.compared,
        state_bytes=state_bytes,
    )


def main() -> None:
    options = arguments(__doc__, rounds=20, ranks=2)
    costs = run_ranks(options.ranks, measure, options.ranks, options.rounds)[0]
    print(
        f"step {1000 * costs.step:.1f} ms, comparison {1000 * costs.comparison:.2f} ms, checksums "
        f"{1000 * costs.checksums:.2f} ms of the processor ({costs.compared} tensors, "
        f"{costs.state_bytes / 1e6:.1f} MB, compared at "
        f"{costs.state_bytes / costs.comparison / 1e9:.1f} GB/s)"
    )
    for name, cost in (("check_replicas", costs.comparison), ("check_memory", costs.checksums)):
        for every in (1, 10, 100):
            print(f"guard.{name}={every}: {100 * cost / costs.step / every:.3f}% of the step")


if __name__ == "__main__":
    main()
