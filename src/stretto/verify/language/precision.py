"""A language model's second pass: training in the job's types beside the float64 reference.

What rounding hides is looked at bit by bit: whether reduced gradients have digits that 16-bit types lack, and
whether modules compute with the optimiser's values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.precision import HALVES
from stretto.job.job import Job
from stretto.job.rules import problems
from stretto.run.train.assemble import DTYPES, assemble
from stretto.run.train.rank_model import RankModel
from stretto.verify.compare import Snapshot, mean_errors, placed_pairs, relative
from stretto.verify.evidence import Verdict, listing
from stretto.verify.language.cases import describe, one_process
from stretto.verify.language.reference import Trial, run_reference, share_all
from stretto.verify.language.step import SCALE, TrialTask, loss_of, masters_of, own_part, trial_trainer
from stretto.verify.precision import STEPS, Errors, prove_rounded

_ENOUGH = 64  # elements of a sum of 16-bit numbers, about half of which have more digits


@dataclass(frozen=True, kw_only=True)
class OneProcess:
    """What one process computes on the first samples, as many as one update of the layout takes.

    Attributes:
        exact: in float64, by step.
        errors: of the job's own types, beside it.
    """

    exact: Sequence[Snapshot]
    errors: Sequence[Errors]


def with_fewest_microbatches(job: Job) -> Job:
    """Return the job with the fewest legal microbatches, so that each sum over ranks stands alone."""
    unit = job.layout.dp * job.micro_batch
    for count in (1, job.layout.pp, 2 * job.layout.pp):
        fewer = replace(job, global_batch=unit * count)
        if fewer.global_batch < job.global_batch and not problems(fewer):
            return fewer
    return job


def first_samples(trial: Trial, job: Job) -> Trial:
    """Return a trial of two steps with as many samples as the job takes in a step."""
    samples = [batch.take(slice(0, job.global_batch)) for batch in trial.batches[:STEPS]]
    return replace(trial, batches=samples)


def run_one_process(job: Job, trial: Trial) -> OneProcess:
    """Train in one process, in float64 and in the job's own types. Without a process group."""
    job = with_fewest_microbatches(job)
    trial = first_samples(trial, job)
    exact = run_reference(job, trial)
    replica = assemble(one_process(job), Mesh(one_process(job).layout), seed=trial.seed)
    try:
        return OneProcess(exact=exact, errors=_errors(replica, trial, exact)[0])
    finally:
        replica.close()


def prove_layout_rounded(job: Job, trial: Trial, alone: OneProcess | None) -> Verdict:
    """Compare a layout in the job's own types with one process. Collective.

    Args:
        job: with the types that it trains in.
        alone: on rank 0, what `run_one_process` returned for it.
    """
    job = with_fewest_microbatches(job)
    trial = first_samples(trial, job)
    exact = share_all(None if alone is None else list(alone.exact), job, STEPS)
    eps = torch.finfo(DTYPES[job.precision.dtype]).eps

    def train() -> tuple[list[Errors], list[str]]:
        replica = assemble(job, Mesh(job.layout, timeout=trial.timeout), seed=trial.seed)
        try:
            return _errors(replica, trial, exact)
        finally:
            replica.close()

    return prove_rounded(describe(job), job.precision.dtype, eps, alone and alone.errors, train)


def _errors(replica: RankModel, trial: Trial, exact: Sequence[Snapshot]) -> tuple[list[Errors], list[str]]:
    """Train beside the float64 reference: relative errors of each step, and marks of wrong types. Collective.

    Weights are those that the optimiser updates, in its own type.
    """
    task = TrialTask(replica, trial)
    task.observed = True
    if replica.loss_scale is not None:
        replica.loss_scale.value = SCALE  # far from an overflow, which would skip the update
    # Adam turns the rounding of a gradient near 0 into a whole step of its sign: in 16 bits of many elements
    adaptive = replica.job.precision.half and replica.job.optimiser.name != "sgd"
    trainer, steps = trial_trainer(task), list[Errors]()
    marks = list[str]()
    for expected in exact:
        (done,) = trainer.step()
        gradients, masters = task.gradients, masters_of(replica)
        compared = expected.compare_placed("gradients", gradients.tensors, gradients.places)
        updated = {n: t for n, t in expected.weights.items() if n in expected.gradients}
        assert done.norm is not None
        steps.append(
            {
                "loss": {"": relative(loss_of(done), expected.loss)},
                "gradients": compared.errors,
                "norm": {"": relative(done.norm, expected.norm)},
            }
        )
        if not adaptive:
            steps[-1]["weights"] = mean_errors(placed_pairs(masters.tensors, masters.places, updated))
        marks += _marks(replica, gradients.tensors)
    return steps, marks


def _marks(replica: RankModel, gradients: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with the types of reduced gradients and weights in 16-bit training. Collective."""
    precision = replica.job.precision
    dtype, marks = DTYPES[precision.dtype], list[str]()
    if dtype not in HALVES:
        return marks
    if precision.gradients == "float32" and replica.job.copies > 1:
        counts = dict[str, list[int]]()
        for name, gradient in gradients.items():
            # rows of an embedding may come from the tokens of a single rank
            if replica.parameters[name].dtype == dtype and not name.startswith("embed."):
                nonzero = gradient[gradient != 0]
                counts[name] = [int((nonzero.to(dtype).to(nonzero.dtype) == nonzero).sum()), nonzero.numel()]
        rounded, total = Counter[str](), Counter[str]()
        for rank in gather_json(counts):
            for name, (in_16_bits, elements) in rank.items():
                rounded[name] += in_16_bits
                total[name] += elements
        if names := [name for name, count in total.items() if rounded[name] == count >= _ENOUGH]:
            marks.append(
                f"every element of the reduced gradient of {listing(names)} is a number of "
                f"{precision.dtype}: it is summed or sent in the type of the weights, and not in float32 "
                "(precision.gradients)"
            )
    masters = masters_of(replica)
    with replica.states.full_weights() as full:
        placed = own_part(full, replica).tensors
        stale = [
            name
            for name, master in masters.tensors.items()
            for piece in masters.places[name].pieces
            if not torch.equal(piece.of_local(master).to(placed[name].dtype), piece.of_full(placed[name]))
        ]
    if names := [name for rank in gather_json(stale) for name in rank]:
        marks.append(f"modules compute with other values of {listing(names)} than the optimiser's, rounded")
    return marks
