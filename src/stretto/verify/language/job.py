"""Run a proof: prepare the data, start the ranks, collect their verdicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from stretto.errors import StrettoError
from stretto.job.devices import HOST
from stretto.job.job import Job
from stretto.job.parameters import count_parameters
from stretto.run.config.device_checks import compiler_problems
from stretto.run.config.run_checks import raise_first
from stretto.run.config.schema import TrainConfig
from stretto.run.data.prepare import check_samples, prepare_data
from stretto.run.data.sentinels import vocabulary
from stretto.run.launch.local import check_ranks, prepare, run_ranks
from stretto.run.train.launch import PRELOAD

if TYPE_CHECKING:
    from stretto.run.data.dataset import Batch
    from stretto.run.data.token_source import TokenData
    from stretto.verify.diagnose import Verdict

_COPIES = 4  # float64 copies of the model on a rank: weights, gradients, two optimiser states


def verify(
    config: TrainConfig,
    cases: Sequence[Job],
    steps: int = 2,
    twice: bool = False,
    on_rank: Callable[[], None] | None = None,
    quiet: bool = True,
) -> list[Verdict]:
    """Prove the cases on as many local ranks as they need.

    Args:
        config: of data, seed and steps.
        cases: all for the same number of ranks.
        steps: training steps of each with nothing read between them; one more is made whose gradients are
            read.
        twice: make the steps both as messages come, and with every message late, and compare the bits; else
            with every message late.
        on_rank: called on every rank first.
        quiet: print nothing on the way.

    Raises:
        StrettoError: bad text, or more ranks or memory needed than this machine has.
        RankFailed: a rank failed.
    """
    ranks = cases[0].layout.world
    check_ranks(ranks)
    if (compile := cases[0].compile) != "off":
        raise_first([*compiler_problems(compile, HOST)])
    prepare(PRELOAD)
    source = prepare_data(config, quiet=quiet)
    shape = config.shape(vocabulary(source, config))
    proved = [replace(case, shape=shape) for case in cases]
    _check_memory(proved, steps + 1)
    check_samples(config, source)
    return run_ranks(ranks, _rank, config, proved, source, steps, twice, on_rank, quiet)[0]


def _rank(
    config: TrainConfig,
    cases: list[Job],
    source: TokenData,
    steps: int,
    twice: bool,
    on_rank: Callable[[], None] | None,
    quiet: bool,
) -> list[Verdict]:
    """Run one rank. Imports are inside, so that the launching process does not load torch."""
    import torch
    import torch.distributed as dist

    from stretto.verify.language.prove import prove
    from stretto.verify.language.reference import Trial

    torch.set_num_threads(config.train.threads)
    timeout = timedelta(seconds=config.train.timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    if on_rank is not None:
        on_rank()
    try:
        report = None if quiet else Progress(len(cases))
        trial = Trial(
            batches=batches(config, source, steps + 1),
            seed=config.train.seed,
            total_steps=config.train.steps,
            twice=twice,
            timeout=timeout,
        )
        return prove(cases, trial, report)
    finally:
        dist.destroy_process_group()


def batches(config: TrainConfig, source: TokenData, steps: int) -> list[Batch]:
    """The first global batches of the training split: what `stretto train` sees, but with an edge in most of
    the samples that would be inside one document where documents are kept apart, and with padding after most
    of those that an encoder reads. Proofs have few and short samples, and without these they would not see
    what mixes documents up, or attends to padding.
    """
    from stretto.run.data.mixture import training_samples

    samples = training_samples(source, config)
    size = config.batch.global_size
    wanted = [range(step * size, (step + 1) * size) for step in range(steps)]
    return [_with_padding(_with_edges(samples.batch(indices), indices), indices) for indices in wanted]


def _with_padding(batch: Batch, indices: range) -> Batch:
    """Three of four samples of an encoder with other numbers of real tokens."""
    import torch

    if batch.decoder is None or batch.lengths is not None:
        return batch
    whole = batch.inputs.shape[1]
    lengths = [whole - (3 * index % whole if index % 4 else 0) for index in indices]
    return replace(batch, lengths=torch.tensor(lengths, dtype=torch.int64))


def _with_edges(batch: Batch, indices: range) -> Batch:
    """Three of four samples of one document cut in two, each in another place."""
    from stretto.engine.models.language import IGNORED

    if batch.begins is None:
        return batch
    begins, targets = batch.begins.clone(), batch.targets.clone()
    last = begins.shape[1] - 1
    for row, index in enumerate(indices):
        if last > 0 and index % 4 and not begins[row].any():
            edge = 1 + 7 * index % last
            begins[row, edge:], targets[row, edge - 1] = edge, IGNORED
    return replace(batch, begins=begins, targets=targets)


def _check_memory(cases: Sequence[Job], steps: int) -> None:
    """Check that the reference of every step and each rank's share of the model fit into the memory of this
    machine.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    model, ranks = 8 * count_parameters(cases[0].shape).total, cases[0].layout.world
    share = max(_COPIES / (case.layout.tp * case.layout.pp) for case in cases)
    needed = model * (ranks * (2 * steps + share) + _COPIES)
    if needed > memory:
        raise StrettoError(
            f"proving this model in float64 on {ranks} ranks takes about {needed / 2**30:.0f} GiB, "
            f"this machine has {memory / 2**30:.0f}",
            hint="layers are alike: prove it with fewer and narrower ones, such as model.layers=2",
        )


class Progress:
    """A line for each case that is done, and how many there are."""

    def __init__(self, cases: int) -> None:
        self._cases, self._done = cases, 0

    def __call__(self, verdict: Verdict) -> None:
        self._done += 1
        mark = "equal  " if verdict.equal else "DIFFERS"
        took = f"{verdict.seconds:.1f} s" if verdict.same_as is None else f"as {verdict.same_as}"
        print(f"[{self._done}/{self._cases}] {mark} {verdict.layout}  ({took})", flush=True)
