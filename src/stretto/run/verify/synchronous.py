"""The proof of a schedule that updates after the step: loss, gradients, norm and updated weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from stretto.prove.compare import Comparison, compare, relative
from stretto.prove.diagnose import TOLERANCE, Evidence, Sum, Verdict, diagnose
from stretto.run.train.replica import Replica
from stretto.run.verify.cases import describe
from stretto.run.verify.reference import Snapshot, Trial
from stretto.run.verify.step import (
    copies_of,
    gradients_of,
    masters_of,
    own_part,
    run_step,
    wrongly_held,
)


def prove_synchronous(replica: Replica, trial: Trial, reference: Sequence[Snapshot]) -> Verdict:
    """Steps of the replica beside the reference's. Collective."""
    job = replica.job
    rate, verdicts = trial.rate(job), list[Verdict]()
    wrong = wrongly_held(replica, reference[0].weights)
    experts = _experts(replica, reference[0])
    for step, (batch, expected) in enumerate(zip(trial.batches, reference, strict=True)):
        replica.set_rate(rate(step))
        loss = run_step(replica, step, batch)
        local = gradients_of(replica)
        gradients = compare(local.tensors, local.places, expected.gradients, expected.gradient_scales)
        norm = _worst_norm(float(replica.update(rate(step))), float(expected.norm))
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
            tied=["embed.tok.weight"] if replica.shape.tied else [],
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
        verdicts.append(_verdict(describe(job), evidence))
        if not verdicts[-1].equal:  # what comes after it follows from it
            break
    return _worst(verdicts)


def _weights(replica: Replica, expected: Snapshot) -> tuple[Comparison, Comparison, Comparison | None]:
    """What modules compute with, what optimisers updated, and where these are not the same, what of the first
    is each rank's own to update.
    """
    held = masters_of(replica)
    masters = compare(held.tensors, held.places, expected.weights, expected.weight_scales)
    with replica.states.whole() as ours:
        weights = compare(ours, replica.places, expected.weights, expected.weight_scales)
        if weights.error <= TOLERANCE:  # the same on every rank
            return weights, masters, None
        part = own_part(ours, replica)
        return weights, masters, compare(part.tensors, part.places, expected.weights, expected.weight_scales)


def _shards(replica: Replica) -> list[Sum]:
    """What the gradients of shards are summed over, each rank keeping a part."""
    copies = copies_of(replica, "tp")[0]
    if replica.states.dp.mode == "server":
        return [Sum(copies, "ranks of the server", "")] if copies > 1 else []
    counts = replica.states.sizes.for_copies(copies).levels(copies)
    kept = ("parameters", "gradients", "states")
    sums = [Sum(n, f"ranks that share {what}", "") for n, what in zip(counts, kept, strict=False)]
    return [one for one in sums if one.holders > 1]


def _sums(replica: Replica) -> list[Sum]:
    """What the gradients of all but experts are summed over, beside microbatches."""
    return [
        Sum(replica.pipeline.program.copies, "copies of the weights", "the sum over the copies"),
        Sum(replica.mesh.size("dp"), "replicas", "the data-parallel reduction"),
        Sum(replica.mesh.size("cp"), "context-parallel ranks", "the sum over cp"),
        *_same_shards(replica),
    ]


def _same_shards(replica: Replica) -> list[Sum]:
    """Copies of shards, of which the gradients are summed as well."""
    copies, states = copies_of(replica, "tp")
    sharded = replica.states.dp.mode != "server" and 1 < states < copies
    said = "the sum over copies of a shard"
    return [Sum(states, "ranks that keep the same shards", said)] if sharded else []


def _experts(replica: Replica, reference: Snapshot) -> list[str]:
    """Names of the parameters of routed experts; none of them is held anywhere else."""
    return [name for name in reference.weights if ".experts." in name] if replica.shape.moe else []


def _square(expected: Snapshot, names: Sequence[str]) -> float:
    """The part of these parameters in the squared norm."""
    return sum(float(expected.gradients[name].square().sum()) for name in names) / float(expected.norm) ** 2


def _worst_norm(norm: float, expected: float) -> float:
    """Of all ranks' norms the one that is farthest off."""
    norms = torch.zeros(dist.get_world_size() if dist.is_initialized() else 1, dtype=torch.float64)
    norms[dist.get_rank() if dist.is_initialized() else 0] = norm
    if len(norms) > 1:
        dist.all_reduce(norms)
    return max(norms.tolist(), key=lambda one: relative(one, expected))


def _verdict(layout: str, seen: Evidence) -> Verdict:
    return Verdict(
        layout=layout,
        loss_error=relative(seen.loss, seen.reference_loss),
        grad_error=seen.gradients.error,
        worst_gradient=seen.gradients.worst,
        norm_error=relative(seen.norm, seen.reference_norm),
        weight_error=seen.weights.error,
        worst_weight=seen.weights.worst,
        diagnosis=diagnose(seen),
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
