"""The proof as a job: data prepared here, ranks started, verdicts brought back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.config.schema import TrainConfig
from stretto.cost.shape import ModelShape
from stretto.data.dataset import Samples
from stretto.data.indexed import TokenFolder
from stretto.launch.local import run_ranks
from stretto.train.prepare import prepare_data
from stretto.verify.cases import Case
from stretto.verify.prove import Verdict, prove


def verify(
    config: TrainConfig,
    cases: Sequence[Case],
    steps: int = 2,
    on_rank: Callable[[], None] | None = None,
    quiet: bool = True,
) -> list[Verdict]:
    """Prove the cases on as many local ranks as they need.

    Args:
        cases: all for the same number of ranks.
        steps: training steps of each; two, so that the optimiser's state and the emptied buffers are used too.
        on_rank: called on every rank first.
        quiet: print nothing on the way.

    Raises:
        RankFailed: a rank raised or died.
    """
    folder = prepare_data(config)
    shape = config.shape(folder.index.vocab)
    ranks = cases[0].tp * cases[0].dp * cases[0].pp
    return run_ranks(ranks, _rank, config, shape, list(cases), str(folder.path), steps, on_rank, quiet)[0]


def _rank(
    config: TrainConfig,
    shape: ModelShape,
    cases: list[Case],
    folder: str,
    steps: int,
    on_rank: Callable[[], None] | None,
    quiet: bool,
) -> list[Verdict]:
    torch.set_num_threads(config.train.threads)
    dist.init_process_group("gloo")
    if on_rank is not None:
        on_rank()
    try:
        return prove(config, shape, cases, batches(config, folder, steps), None if quiet else _print)
    finally:
        dist.destroy_process_group()


def batches(config: TrainConfig, folder: str, steps: int) -> list[tuple[Tensor, Tensor]]:
    """The first global batches of the training split: what `stretto train` sees."""
    samples = Samples(
        TokenFolder(folder), "train", config.data.sequence, config.train.seed, ratio=config.data.split
    )
    size = config.batch.global_size
    return [samples.batch(range(step * size, (step + 1) * size)) for step in range(steps)]


def _print(verdict: Verdict) -> None:
    mark = "equal " if verdict.equal else "DIFFERS"
    print(f"{mark} {verdict.layout}  ({verdict.seconds:.1f} s)", flush=True)
