"""Run layouts on real ranks beside the reference, in float64, and report how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from stretto.engine.parallel.late import delay_messages
from stretto.engine.parallel.mesh import Mesh
from stretto.job.flops import layer_names
from stretto.job.job import Job
from stretto.run.launch.failure import TrainingFailed
from stretto.run.train.assemble import assemble
from stretto.run.train.rank_model import RankModel
from stretto.verify.compare import Snapshot
from stretto.verify.evidence import Verdict
from stretto.verify.language.asynchronous import Delays, promised, prove_asynchronous, run_delayed, windows_of
from stretto.verify.language.cases import describe, describe_layout
from stretto.verify.language.every import content
from stretto.verify.language.reference import Trial, build_reference, run_reference, share_all
from stretto.verify.language.step import TrialTask, trial_trainer
from stretto.verify.language.synchronous import prove_synchronous
from stretto.verify.outputs import beside_positions, first_difference, recorded, row_factors


def modules_of(replica: RankModel) -> list[tuple[str, nn.Module]]:
    """Every module held here, by its name in the plain model."""
    names = layer_names(replica.shape)
    modules = list[tuple[str, nn.Module]]()
    for stage, module in replica.pipeline.stages.items():
        for at, layer in zip(replica.pipeline.layers_of(stage), module.children(), strict=True):
            modules += [(f"{names[at]}.{inner}".rstrip("."), m) for inner, m in layer.named_modules()]
    return modules


__all__ = ["Verdict", "prove"]


def prove(
    cases: Sequence[Job], trial: Trial, report: Callable[[Verdict, int], None] | None = None
) -> list[Verdict]:
    """Compare every case with one process. Collective over the default group, whose size all cases share.

    Of cases whose programs are the same, action by action, on the same layout, the first is run.

    Args:
        cases: of one model and batch (`cases.configured_job`, `cases.vary`).
        trial: the same on every rank.
        report: called after each case, with the number of cases.
    """
    references, verdicts = LanguageReferences(trial), list[Verdict]()
    by_program = dict[object, Verdict]()
    for case in cases:
        key = (describe_layout(case), content(case.program()))
        if key in by_program:
            first = by_program[key]
            verdict = replace(first, layout=describe(case), seconds=0.0, same_as=first.layout)
        else:
            verdict = by_program[key] = _prove(case, references)
        verdicts.append(verdict)
        if report is not None:
            report(verdict, len(cases))
    return verdicts


class LanguageReferences:
    """What one process computes, on all ranks; each run once and kept. Collective."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._plain: list[Snapshot] | None = None
        self._delayed: dict[object, list[Snapshot]] = {}

    def plain(self, job: Job) -> list[Snapshot]:
        """Of synchronous schedules, whatever the layout."""
        if self._plain is None:
            snapshots = run_reference(job, self.trial) if _first() else None
            self._plain = share_all(snapshots, job, len(self.trial.batches))
        return self._plain

    def delayed(self, job: Job, delays: Delays, windows: tuple[int, ...]) -> list[Snapshot]:
        """Of an asynchronous schedule; its microbatches depend on the data-parallel size."""
        key = (delays, job.layout.dp, windows)
        if key not in self._delayed:
            snapshots = run_delayed(job, self.trial, delays, windows) if _first() else None
            self._delayed[key] = share_all(snapshots, job, sum(windows), gradients=False)
        return self._delayed[key]


_PADDING = "no output of the first microbatch differs, so padding may be in the loss"


def _prove(job: Job, references: LanguageReferences) -> Verdict:
    started, trial = time.perf_counter(), references.trial
    program = job.program()
    fresh = partial(_assembled, job, trial)
    if program.versions:
        verdict = prove_asynchronous(
            fresh,
            trial,
            promised(job.schedule_name, job.options, job.layout.pp, program.microbatches),
            windows_of(job, len(trial.batches)),
            lambda late, windows: references.delayed(job, late, windows),
        )
    else:
        verdict = prove_synchronous(fresh, trial, references.plain(job))
        if not verdict["loss"].equal:
            verdict = _located(verdict, job, trial)
    return replace(verdict, seconds=time.perf_counter() - started)


@contextmanager
def _assembled(job: Job, trial: Trial) -> Generator[RankModel]:
    """A new replica with its initial weights. Collective."""
    replica = assemble(job, Mesh(job.layout, timeout=trial.timeout), seed=trial.seed)
    try:
        yield replica
    finally:
        replica.close()


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


_EXPERTS = (".mlp", ".mlp.drop")  # what the outputs of experts are summed into


def _located(verdict: Verdict, job: Job, trial: Trial) -> Verdict:
    """Run the first step again, to name the first module whose output differs. Collective."""
    with _assembled(job, trial) as replica:
        padding, reference = replica.split.padded > replica.split.length, None
        # late: steps that use messages wrongly might hang as they come
        with delay_messages(trial.seed), recorded(modules_of(replica)) as actual, suppress(TrainingFailed):
            trial_trainer(TrialTask(replica, trial)).step()
        if replica.mesh.rank == 0:
            plain, first = build_reference(job, trial.seed), trial.batches[0].take(slice(0, job.micro_batch))
            plain.begin(range(job.micro_batch), first)
            with torch.no_grad(), recorded(plain.model.named_modules()) as reference:
                plain.model(first.inputs)
        outputs = actual if replica.mesh.index("dp") == 0 else {}
        align = partial(beside_positions, split=replica.split)
        location = first_difference(outputs, reference, align)
        detail = ""
        if replica.shape.moe is not None and location is not None and location.endswith(_EXPERTS):
            factors = row_factors(outputs, reference, align, location)
            if factors is None:
                others = "their outputs are summed with other weights or with none"
                detail = f": tokens go to other experts, or {others}"
            else:
                detail = (
                    f": each token's is {factors[0]:.4g} to {factors[1]:.4g} times the plain model's, so the "
                    "routing weights of a token do not sum to what they should, as if not normalised"
                )
    if location is None and not padding:
        return verdict
    locus = _PADDING if location is None else f"the first output that differs is {location}'s{detail}"
    return replace(verdict, diagnosis=f"{verdict.diagnosis}; {locus}")
