"""Run layouts on real ranks beside the reference, in float64, and report how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.config.schema import TrainConfig
from stretto.cost.shape import ModelShape
from stretto.data.sampler import microbatch_indices
from stretto.optim.build import build_rate
from stretto.parallel.mesh import Mesh
from stretto.train.assemble import Replica, assemble
from stretto.verify.cases import Case
from stretto.verify.compare import Comparison, compare, relative
from stretto.verify.diagnose import TOLERANCE, diagnose
from stretto.verify.reference import Snapshot, run_reference, share

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
    seconds: float

    @property
    def equal(self) -> bool:
        """Everything within TOLERANCE."""
        errors = (self.loss_error, self.grad_error, self.norm_error, self.weight_error)
        return all(error <= TOLERANCE for error in errors)


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
    reference = share(snapshots, shape, len(steps))
    verdicts = list[Verdict]()
    for case in cases:
        verdicts.append(_prove(case, case.apply(config), shape, steps, reference))
        if first and report is not None:
            report(verdicts[-1])
    return verdicts


def _prove(
    case: Case, config: TrainConfig, shape: ModelShape, steps: Sequence[Batch], reference: Sequence[Snapshot]
) -> Verdict:
    started = time.perf_counter()
    replica = assemble(config, shape, Mesh(config.layout.to_layout()))
    rate, found = build_rate(config), list[Verdict]()
    try:
        for step, (batch, expected) in enumerate(zip(steps, reference, strict=True)):
            loss = run_step(replica, config, step, batch)
            local = {n: p.grad for n, p in replica.parameters.items() if p.grad is not None}
            gradients = compare(local, replica.places, expected.gradients, case.dp)
            norm = float(replica.update(rate(step)))
            held = {n: p.detach() for n, p in replica.parameters.items()}
            weights = compare(held, replica.places, expected.weights, case.dp)
            found.append(_verdict(case, config, replica, expected, loss, gradients, norm, weights))
    finally:
        replica.close()
    return _worst(found, time.perf_counter() - started)


def run_step(replica: Replica, config: TrainConfig, step: int, batch: Batch) -> float:
    """Forward and backward of one global batch on this layout; returns the loss, the same on every rank."""
    inputs, targets = batch
    mesh, m, size = replica.mesh, config.microbatches, config.batch.micro_size
    replica.samples[:] = [
        microbatch_indices(step, j, mesh.index("dp"), mesh.size("dp"), size, m) for j in range(m)
    ]
    first = step * config.batch.global_size
    rows = [slice(r.start - first, r.stop - first) for r in replica.samples]
    tokens = int((targets != -100).sum())
    losses = replica.pipeline.step([inputs[r] for r in rows], [targets[r] for r in rows], 1.0 / tokens)
    total = torch.zeros((), dtype=torch.float64)
    if losses is not None and mesh.index("tp") == 0:
        total += losses.sum()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return float(total) / tokens


def _verdict(
    case: Case,
    config: TrainConfig,
    replica: Replica,
    expected: Snapshot,
    loss: float,
    gradients: Comparison,
    norm: float,
    weights: Comparison,
) -> Verdict:
    norm_error = relative(norm, float(expected.norm))
    return Verdict(
        str(case),
        relative(loss, float(expected.loss)),
        gradients.error,
        gradients.worst,
        norm_error,
        weights.error,
        weights.worst,
        diagnose(
            loss,
            float(expected.loss),
            gradients.errors,
            gradients.ratios,
            norm_error,
            weights.errors,
            config.microbatches * config.layout.dp,
            ["embed.tok.weight"] if replica.shape.tied else [],
        ),
        0.0,
    )


def _worst(found: Sequence[Verdict], seconds: float) -> Verdict:
    """The largest errors of all steps; the diagnosis of the first step that differs."""

    def largest(key: Callable[[Verdict], float]) -> Verdict:
        return max(found, key=lambda v: float("inf") if key(v) != key(v) else key(v))

    gradient, weight = largest(lambda v: v.grad_error), largest(lambda v: v.weight_error)
    return Verdict(
        found[0].layout,
        largest(lambda v: v.loss_error).loss_error,
        gradient.grad_error,
        gradient.worst_gradient,
        largest(lambda v: v.norm_error).norm_error,
        weight.weight_error,
        weight.worst_weight,
        next((v.diagnosis for v in found if v.diagnosis), None),
        seconds,
    )
