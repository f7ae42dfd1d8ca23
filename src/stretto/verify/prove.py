"""Run layouts on real ranks beside the reference, in float64, and report how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.config.schema import TrainConfig
from stretto.cost.shape import ModelShape
from stretto.data.sampler import microbatch_indices
from stretto.models.language import IGNORED
from stretto.optim.build import build_rate
from stretto.parallel.mesh import Mesh
from stretto.train.assemble import Replica, assemble
from stretto.verify.cases import Case
from stretto.verify.compare import compare, misplaced, relative
from stretto.verify.diagnose import TOLERANCE, Evidence, diagnose
from stretto.verify.locate import first_difference, modules_of, recorded
from stretto.verify.reference import Snapshot, build_reference, run_reference, share_all

Batch = tuple[Tensor, Tensor]  # inputs and targets, int64 [global batch, sequence]


@dataclass(frozen=True)
class Verdict:
    """One layout against the reference: largest relative errors over all steps, and where they are."""

    layout: str
    loss_error: float
    grad_error: float
    worst_gradient: str
    norm_error: float
    weight_error: float
    worst_weight: str
    diagnosis: str | None
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Everything within TOLERANCE, and nothing held in a wrong place."""
        errors = (self.loss_error, self.grad_error, self.norm_error, self.weight_error)
        return all(error <= TOLERANCE for error in errors) and self.diagnosis is None


def prove(
    config: TrainConfig,
    shape: ModelShape,
    cases: Sequence[Case],
    steps: Sequence[Batch],
    report: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Compare every case with one process. Collective over the default group, whose size all cases share.

    Args:
        steps: the global batch of each step, the same on every rank.
        report: called on rank 0 after each case.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    snapshots = run_reference(config, shape, steps) if first else None
    reference = share_all(snapshots, shape, len(steps))
    verdicts = list[Verdict]()
    for case in cases:
        applied = case.apply(config)
        verdict = _prove(case, applied, shape, steps, reference)
        if not verdict.loss_error <= TOLERANCE and (where := _locate(applied, shape, steps[0])):
            verdict = replace(
                verdict, diagnosis=f"{verdict.diagnosis}; the first output that differs is {where}'s"
            )
        verdicts.append(verdict)
        if first and report is not None:
            report(verdict)
    return verdicts


def _prove(
    case: Case, config: TrainConfig, shape: ModelShape, steps: Sequence[Batch], reference: Sequence[Snapshot]
) -> Verdict:
    started = time.perf_counter()
    replica = assemble(config, shape, Mesh(config.layout.to_layout()))
    rate, found = build_rate(config), list[Verdict]()
    try:
        wrong = misplaced(_weights(replica), replica.places, reference[0].weights, case.dp)
        for step, (batch, expected) in enumerate(zip(steps, reference, strict=True)):
            loss = run_step(replica, config, step, batch)
            local = {n: p.grad for n, p in replica.parameters.items() if p.grad is not None}
            gradients = compare(local, replica.places, expected.gradients)
            norm = _worst_norm(float(replica.update(rate(step))), float(expected.norm))
            weights = compare(_weights(replica), replica.places, expected.weights)
            evidence = Evidence(
                loss,
                float(expected.loss),
                gradients,
                norm,
                float(expected.norm),
                weights,
                config.microbatches * case.dp,
                case.dp,
                ["embed.tok.weight"] if shape.tied else [],
                wrong,
            )
            found.append(_verdict(case, evidence))
            if not found[-1].equal:  # what comes after it follows from it
                break
    finally:
        replica.close()
    return _worst(found, time.perf_counter() - started)


def _worst_norm(norm: float, expected: float) -> float:
    """Of all ranks' norms the one that is farthest off."""
    norms = torch.zeros(dist.get_world_size() if dist.is_initialized() else 1, dtype=torch.float64)
    norms[dist.get_rank() if dist.is_initialized() else 0] = norm
    if len(norms) > 1:
        dist.all_reduce(norms)
    return max(norms.tolist(), key=lambda one: relative(one, expected))


def _weights(replica: Replica) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in replica.parameters.items()}


def run_step(replica: Replica, config: TrainConfig, step: int, batch: Batch) -> float:
    """Forward and backward of one global batch on this layout; returns the loss, the same on every rank."""
    inputs, targets = batch
    mesh, m, size = replica.mesh, config.microbatches, config.batch.micro_size
    replica.samples[:] = [
        microbatch_indices(step, j, mesh.index("dp"), mesh.size("dp"), size, m) for j in range(m)
    ]
    first = step * config.batch.global_size
    rows = [slice(r.start - first, r.stop - first) for r in replica.samples]
    tokens = int((targets != IGNORED).sum())
    losses = replica.pipeline.step([inputs[r] for r in rows], [targets[r] for r in rows], 1.0 / tokens)
    total = torch.zeros((), dtype=torch.float64)
    if losses is not None and mesh.index("tp") == 0:
        total += losses.sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total) / tokens


def _locate(config: TrainConfig, shape: ModelShape, batch: Batch) -> str | None:
    """Run the first step again, and name the first module whose output is not the plain model's."""
    replica, reference = assemble(config, shape, Mesh(config.layout.to_layout())), None
    try:
        with recorded(modules_of(replica)) as ours:
            run_step(replica, config, 0, batch)
        if replica.mesh.rank == 0:
            model, keys = build_reference(config, shape)
            keys.samples = range(config.batch.micro_size)
            with torch.no_grad(), recorded(model.named_modules()) as reference:
                model(batch[0][: config.batch.micro_size])
        return first_difference(replica, ours, reference)
    finally:
        replica.close()


def _verdict(case: Case, seen: Evidence) -> Verdict:
    return Verdict(
        str(case),
        relative(seen.loss, seen.reference_loss),
        seen.gradients.error,
        seen.gradients.worst,
        relative(seen.norm, seen.reference_norm),
        seen.weights.error,
        seen.weights.worst,
        diagnose(seen),
    )


def _worst(found: Sequence[Verdict], seconds: float) -> Verdict:
    """The largest errors of all steps; the diagnosis of the one that differs, which is the last."""
    gradient, weight = max(found, key=lambda v: v.grad_error), max(found, key=lambda v: v.weight_error)
    return Verdict(
        found[0].layout,
        max(v.loss_error for v in found),
        gradient.grad_error,
        gradient.worst_gradient,
        max(v.norm_error for v in found),
        weight.weight_error,
        weight.worst_weight,
        found[-1].diagnosis,
        seconds,
    )
