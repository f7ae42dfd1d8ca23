"""The proof of a schedule that updates after the step: loss, gradients, norm and updated weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from stretto.run.launch.failure import TrainingFailed
from stretto.run.train.rank_model import RankModel
from stretto.verify.compare import TOLERANCE, Comparison, Quantity, Snapshot, worst_quantities
from stretto.verify.diagnose import explain
from stretto.verify.evidence import Evidence, NormPart, Sum, Verdict
from stretto.verify.language.cases import describe
from stretto.verify.language.reference import Trial
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
    only_unread,
    run_steps,
    same_bits_late,
    with_wrong_use,
    wrong_use_verdict,
)


def prove_synchronous(fresh: Fresh, trial: Trial, reference: Sequence[Snapshot]) -> Verdict:
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
            quantities = worst_quantities([last.quantities, ran.quantities(TOLERANCE)])
            verdict = replace(last, quantities=quantities)
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
    job, shape, mesh = replica.job, replica.shape, replica.mesh
    weights, masters, updated_here = _weights(replica, expected)
    # none of the parameters of routed experts is held anywhere else
    experts = [name for name in expected.weights if ".experts." in name] if shape.moe else []
    squares = [float(expected.gradients[n].square().sum()) for n in experts if n in expected.gradients]
    stacks = ["encoder", "blocks"] if shape.relative else []
    tokens = ["embed.tok.weight"] if shape.tied or shape.encoder_layers else []
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
        tied=[*tokens, *(f"{stack}.0.attn.relative" for stack in stacks)],
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
