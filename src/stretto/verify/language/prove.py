"""Run layouts on real ranks beside the reference, in float64, and report how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf

import torch
import torch.distributed as dist
from torch import nn

from stretto.engine.parallel.late import delay_messages
from stretto.engine.parallel.mesh import Mesh
from stretto.job.flops import layer_names
from stretto.job.job import Job
from stretto.job.user_shape import UserShape
from stretto.run.launch.failure import TrainingFailed
from stretto.run.train.assemble import assemble
from stretto.run.train.rank_model import RankModel
from stretto.verify.compare import TOLERANCE, Comparison, Quantity, Snapshot, worst_quantities
from stretto.verify.diagnose import explain
from stretto.verify.evidence import Evidence, NormPart, Sum, Verdict
from stretto.verify.language.asynchronous import Delays, promised, prove_asynchronous, run_delayed, windows_of
from stretto.verify.language.cases import describe, describe_layout
from stretto.verify.language.every import content
from stretto.verify.language.reference import Trial, build_reference, run_reference, share_all
from stretto.verify.language.step import (
    SCALE,
    Fresh,
    Steps,
    TrialTask,
    copies_of,
    loss_of,
    masters_of,
    only_unread,
    own_part,
    trial_trainer,
    worst,
    wrong_use_verdict,
    wrongly_held,
)
from stretto.verify.outputs import beside_positions, first_difference, recorded, row_factors


def modules_of(replica: RankModel) -> list[tuple[str, nn.Module]]:
    """Return every module of this rank, by its name in the plain model."""
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
        """Return the run that synchronous schedules must equal, on any layout."""
        if self._plain is None:
            snapshots = run_reference(job, self.trial) if _first() else None
            self._plain = share_all(snapshots, job, len(self.trial.batches))
        return self._plain

    def delayed(self, job: Job, delays: Delays, windows: tuple[int, ...]) -> list[Snapshot]:
        """Return the run of an asynchronous schedule; its microbatches depend on the data-parallel size."""
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
        location, _ = first_difference(outputs, reference, align)
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


def prove_synchronous(fresh: Fresh, trial: Trial, reference: Sequence[Snapshot]) -> Verdict:
    """Steps as training makes them, with nothing read between them, and one more whose gradients are read.
    Collective.

    Steps that differ are made again and read one by one, to say where.
    """
    unread, verdict = Steps(fresh, trial, reference[:-1]), None
    with fresh() as replica:
        job, wrong = replica.job, wrongly_held(replica, reference[0].weights)
        ran = unread.run(replica, late=not trial.twice)
        if ran.equal(TOLERANCE):
            last = observe(replica, trial, reference, wrong, first=len(unread.reference), scaled=True)
            quantities = worst_quantities([last.quantities, ran.quantities(TOLERANCE)])
            verdict = replace(last, quantities=quantities)
    if verdict is not None:
        return unread.same_bits_late(verdict, ran) if verdict.equal and trial.twice else verdict
    if ran.broken:
        return wrong_use_verdict(describe(job), ran)
    with fresh() as replica:
        verdict = observe(replica, trial, unread.reference, wrong)
    return unread.with_wrong_use(only_unread(verdict, ran) if verdict.equal else verdict, ran)


def observe(
    replica: RankModel,
    trial: Trial,
    reference: Sequence[Snapshot],
    wrong: Mapping[str, str],
    *,
    first: int = 0,
    scaled: bool = False,
) -> Verdict:
    """Make steps and compare gradients and weights after each, up to the first that differs: later ones would
    only follow from it. Collective.

    Args:
        wrong: what is wrong with who holds what (`wrongly_held`).
        first: the step to begin with; the replica has made those before.
        scaled: scale the loss, as training in float16 does.
    """
    steps, diagnosis = list[Sequence[Quantity]](), None
    task = TrialTask(replica, trial)
    task.observed = True
    scaled = scaled and task.scale_losses()
    trainer = trial_trainer(task, first)
    for step in range(first, len(reference)):
        expected = reference[step]
        try:
            (done,) = trainer.step()
        except TrainingFailed as failed:
            names = ("loss", "gradients", "norm", "weights")
            steps.append([Quantity(name, inf, TOLERANCE) for name in names])
            diagnosis = str(failed)
            break
        assert done.norm is not None
        (norm,) = worst([done.norm], [expected])
        evidence = _evidence(replica, task, expected, loss=loss_of(done), norm=norm, wrong=wrong)
        steps.append(evidence.quantities("loss", "gradients", "norm", "weights"))
        if cause := explain(evidence):
            scale = f"with a loss scale of {SCALE:g}, as in float16: " if scaled else ""
            diagnosis = f"{scale}{cause.sentence}"
            break
    return Verdict(layout=describe(replica.job), quantities=worst_quantities(steps), diagnosis=diagnosis)


def _evidence(
    replica: RankModel,
    task: TrialTask,
    expected: Snapshot,
    *,
    loss: float,
    norm: float,
    wrong: Mapping[str, str],
) -> Evidence:
    """The last step of a replica beside the reference's. Collective."""
    job = replica.job
    shape = replica.shape
    mesh = replica.mesh
    weights, masters, updated_here = _weights(replica, expected)
    # none of the parameters of routed experts is held anywhere else
    experts = [name for name in expected.weights if ".experts." in name] if shape.moe else []
    squares = [float(expected.gradients[n].square().sum()) for n in experts if n in expected.gradients]
    if isinstance(shape, UserShape):
        tied = list(shape.shared)
    else:
        stacks = ["encoder", "blocks"] if shape.relative else []
        tied = ["embed.tok.weight"] if shape.tied or shape.encoder_layers else []
        tied += [f"{stack}.0.attn.relative" for stack in stacks]
    return Evidence(
        loss=loss,
        reference_loss=expected.loss,
        gradients=expected.compare_placed("gradients", task.gradients.tensors, task.gradients.places),
        norm=norm,
        reference_norm=expected.norm,
        weights=weights,
        masters=masters,
        updated_here=updated_here,
        microbatches=replica.pipeline.program.microbatches * job.layout.dp,
        sums=_sums(replica),
        shards=_shards(replica),
        tied=tied,
        misplaced=wrong,
        tp=job.layout.tp,
        experts=experts,
        expert_copies=mesh.size("expert_dp"),
        norm_parts=[NormPart("experts", sum(squares) / expected.norm**2, "ep")] if squares else [],
        recompute=job.recompute.mode,
    )


def _weights(replica: RankModel, expected: Snapshot) -> tuple[Comparison, Comparison, Comparison | None]:
    """The weights that modules compute with, the values that optimisers updated, and if these differ, those
    of the weights that each rank's own optimiser updates.
    """
    local = masters_of(replica)
    masters = expected.compare_placed("weights", local.tensors, local.places)
    with replica.states.full_weights() as computed:
        weights = expected.compare_placed("weights", computed, replica.places)
        if weights.error <= TOLERANCE:  # the same on every rank
            return weights, masters, None
        part = own_part(computed, replica)
        return weights, masters, expected.compare_placed("weights", part.tensors, part.places)


def _shards(replica: RankModel) -> list[Sum]:
    """Sums of gradients of which each rank keeps a part."""
    copies = copies_of(replica, "tp")[0]
    if replica.states.dp.mode == "server":
        return [Sum(copies, "ranks of the server")] if copies > 1 else []
    counts = replica.states.sizes.for_copies(copies).levels(copies)
    kinds = ("parameters", "gradients", "states")
    sums = [Sum(n, f"ranks that share {kind}") for n, kind in zip(counts, kinds, strict=False)]
    return [total for total in sums if total.holders > 1]


def _sums(replica: RankModel) -> list[Sum]:
    """Sums of the gradients of all but experts, beside those over microbatches."""
    copies, states = copies_of(replica, "tp")
    sharded = replica.states.dp.mode != "server" and 1 < states < copies
    again = Sum(states, "ranks that keep the same shards", "the sum over copies of a shard")
    return [
        Sum(replica.pipeline.program.copies, "copies of the weights", "the sum over the copies"),
        Sum(replica.mesh.size("dp"), "replicas", "the data-parallel reduction"),
        Sum(replica.mesh.size("cp"), "context-parallel ranks", "the sum over cp"),
        *([again] if sharded else []),
    ]
