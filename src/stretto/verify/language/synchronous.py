"""The proof of a schedule that updates after the step: loss, gradients, norm and updated weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stretto.run.launch.failure import TrainingFailed
from stretto.run.train.rank_model import RankModel
from stretto.verify.compare import Comparison, compare, relative
from stretto.verify.diagnose import TOLERANCE, Evidence, Sum, Verdict, diagnose
from stretto.verify.language.cases import describe
from stretto.verify.language.reference import LanguageSnapshot, Trial
from stretto.verify.language.step import (
    SCALE,
    TrialTask,
    copies_of,
    loss_of,
    masters_of,
    own_part,
    trial_trainer,
    worst,
    wrongly_held,
)
from stretto.verify.language.unread import (
    Fresh,
    Ran,
    only_unread,
    run_steps,
    same_bits_late,
    with_wrong_use,
    wrong_use_verdict,
)


def prove_synchronous(fresh: Fresh, trial: Trial, reference: Sequence[LanguageSnapshot]) -> Verdict:
    """Steps as training makes them, with nothing read between them, and one more whose gradients are read.
    Collective.

    Steps that differ are made again and read one by one, to say where.
    """
    unread, verdict = reference[:-1], None
    with fresh() as replica:
        job, wrong = replica.job, wrongly_held(replica, reference[0].weights)
        ran = run_steps(replica, trial, unread, late=not trial.twice)
        if ran.equal(TOLERANCE):
            last = observe(replica, trial, reference, wrong, first=len(unread), scaled=True)
            verdict = _with(last, ran)
    if verdict is not None:
        again = verdict.equal and trial.twice
        return same_bits_late(verdict, ran, fresh, trial, unread) if again else verdict
    if ran.broken:
        return wrong_use_verdict(describe(job), ran)
    with fresh() as replica:
        verdict = observe(replica, trial, unread, wrong)
    if verdict.equal:
        verdict = only_unread(verdict, ran)
    return with_wrong_use(verdict, ran, fresh, trial, unread)


def _with(verdict: Verdict, ran: Ran) -> Verdict:
    """A verdict on steps that were read, with the errors of those before that were not."""
    assert ran.weights is not None
    weights, worst_weight = verdict.weight_error, verdict.worst_weight
    if ran.weights.error > weights:
        weights, worst_weight = ran.weights.error, ran.weights.worst
    return replace(
        verdict,
        loss_error=max(verdict.loss_error, *ran.losses),
        norm_error=max(verdict.norm_error or 0.0, *ran.norms),
        weight_error=weights,
        worst_weight=worst_weight,
    )


def observe(
    replica: RankModel,
    trial: Trial,
    reference: Sequence[LanguageSnapshot],
    wrong: Mapping[str, str],
    *,
    first: int = 0,
    scaled: bool = False,
) -> Verdict:
    """Make steps beside the reference's, and read gradients and weights of each. Collective.

    Args:
        wrong: what is wrong with who holds what (`wrongly_held`).
        first: the step to begin with; the replica has made those before.
        scaled: scale the loss, as training in float16 does.
    """
    job, verdicts = replica.job, list[Verdict]()
    experts = _experts(replica, reference[0])
    task = TrialTask(replica, trial)
    task.observed = True
    scaled = scaled and task.scale_losses()
    trainer = trial_trainer(task, first)
    for step in range(first, len(reference)):
        expected = reference[step]
        try:
            (done,) = trainer.step()
        except TrainingFailed as failed:
            verdicts.append(failed_verdict(describe(job), str(failed)))
            break
        loss, local = loss_of(done), task.gradients
        gradients = compare(local.tensors, local.places, expected.gradients, expected.gradient_scales)
        assert done.norm is not None
        (norm,) = worst([done.norm], [expected])
        weights, masters, updated_here = _weights(replica, expected)
        evidence = Evidence(
            loss=loss,
            reference_loss=float(expected.loss),
            gradients=gradients,
            norm=norm,
            reference_norm=float(expected.norm),
            weights=weights,
            microbatches=replica.pipeline.program.microbatches * job.layout.dp,
            sums=_sums(replica),
            tied=_tied(replica),
            misplaced=wrong,
            tp=job.layout.tp,
            experts=experts,
            expert_copies=replica.mesh.size("expert_dp"),
            expert_square=_square(expected, experts),
            recompute=job.recompute.mode,
            masters=masters,
            updated_here=updated_here,
            shards=_shards(replica),
        )
        verdict = _verdict(describe(job), evidence)
        if scaled and not verdict.equal:
            message = f"with a loss scale of {SCALE:g}, as in float16: {verdict.diagnosis}"
            verdict = replace(verdict, diagnosis=message)
        verdicts.append(verdict)
        if not verdict.equal:  # what comes after it follows from it
            break
    return _worst(verdicts)


def _tied(replica: RankModel) -> list[str]:
    """Names of parameters that several layers share."""
    shape = replica.shape
    stacks = ["encoder", "blocks"] if shape.relative else []
    tokens = ["embed.tok.weight"] if shape.tied or shape.encoder_layers else []
    return [*tokens, *(f"{stack}.0.attn.relative" for stack in stacks)]


def failed_verdict(layout: str, failure: str) -> Verdict:
    """Of a step that failed."""
    nothing = float("inf")
    return Verdict(
        layout=layout,
        loss_error=nothing,
        grad_error=nothing,
        worst_gradient=None,
        norm_error=nothing,
        weight_error=nothing,
        worst_weight="-",
        diagnosis=failure,
    )


def _weights(
    replica: RankModel, expected: LanguageSnapshot
) -> tuple[Comparison, Comparison, Comparison | None]:
    """What modules compute with, what optimisers updated, and where these are not the same, what of the first
    is each rank's own to update.
    """
    local = masters_of(replica)
    masters = compare(local.tensors, local.places, expected.weights, expected.weight_scales)
    with replica.states.full_weights() as computed:
        weights = compare(computed, replica.places, expected.weights, expected.weight_scales)
        if weights.error <= TOLERANCE:  # the same on every rank
            return weights, masters, None
        part = own_part(computed, replica)
        return weights, masters, compare(part.tensors, part.places, expected.weights, expected.weight_scales)


def _shards(replica: RankModel) -> list[Sum]:
    """What the gradients of shards are summed over, each rank keeping a part."""
    copies = copies_of(replica, "tp")[0]
    if replica.states.dp.mode == "server":
        return [Sum(copies, "ranks of the server", "")] if copies > 1 else []
    counts = replica.states.sizes.for_copies(copies).levels(copies)
    kinds = ("parameters", "gradients", "states")
    sums = [Sum(n, f"ranks that share {kind}", "") for n, kind in zip(counts, kinds, strict=False)]
    return [total for total in sums if total.holders > 1]


def _sums(replica: RankModel) -> list[Sum]:
    """What the gradients of all but experts are summed over, beside microbatches."""
    return [
        Sum(replica.pipeline.program.copies, "copies of the weights", "the sum over the copies"),
        Sum(replica.mesh.size("dp"), "replicas", "the data-parallel reduction"),
        Sum(replica.mesh.size("cp"), "context-parallel ranks", "the sum over cp"),
        *_same_shards(replica),
    ]


def _same_shards(replica: RankModel) -> list[Sum]:
    """Copies of shards, of which the gradients are summed as well."""
    copies, states = copies_of(replica, "tp")
    sharded = replica.states.dp.mode != "server" and 1 < states < copies
    operation = "the sum over copies of a shard"
    return [Sum(states, "ranks that keep the same shards", operation)] if sharded else []


def _experts(replica: RankModel, reference: LanguageSnapshot) -> list[str]:
    """Names of the parameters of routed experts; none of them is held anywhere else."""
    return [name for name in reference.weights if ".experts." in name] if replica.shape.moe else []


def _square(expected: LanguageSnapshot, names: Sequence[str]) -> float:
    """The part of these parameters in the squared norm."""
    squares = (expected.gradients[name].square().sum() for name in names if name in expected.gradients)
    return sum(map(float, squares)) / float(expected.norm) ** 2


def _verdict(layout: str, evidence: Evidence) -> Verdict:
    return Verdict(
        layout=layout,
        loss_error=relative(evidence.loss, evidence.reference_loss),
        grad_error=evidence.gradients.error,
        worst_gradient=evidence.gradients.worst,
        norm_error=relative(evidence.norm, evidence.reference_norm),
        weight_error=evidence.weights.error,
        worst_weight=evidence.weights.worst,
        diagnosis=diagnose(evidence),
    )


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The largest errors of all steps; the diagnosis of the one that differs, which is the last."""
    gradient, weight = (
        max(verdicts, key=lambda v: v.grad_error or 0.0),
        max(verdicts, key=lambda v: v.weight_error),
    )
    return Verdict(
        layout=verdicts[0].layout,
        loss_error=max(v.loss_error for v in verdicts),
        grad_error=gradient.grad_error,
        worst_gradient=gradient.worst_gradient,
        norm_error=max(v.norm_error or 0.0 for v in verdicts),
        weight_error=weight.weight_error,
        worst_weight=weight.worst_weight,
        diagnosis=verdicts[-1].diagnosis,
    )
