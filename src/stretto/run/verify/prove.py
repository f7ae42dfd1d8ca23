"""Run layouts on real ranks beside the reference, in float64, and report how far apart they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from stretto.engine.parallel.mesh import Mesh
from stretto.run.config.schema import TrainConfig
from stretto.run.train.assemble import assemble
from stretto.run.train.banner import program_of
from stretto.run.verify.asynchronous import Delays, promised, prove_asynchronous, run_delayed
from stretto.run.verify.cases import Case
from stretto.run.verify.every import content
from stretto.run.verify.locate import first_difference, modules_of, recorded
from stretto.run.verify.reference import Snapshot, build_reference, run_reference, share_all
from stretto.run.verify.step import Batch, run_step
from stretto.run.verify.synchronous import prove_synchronous
from stretto.run.verify.verdict import Verdict
from stretto.spec.shape import ModelShape

__all__ = ["Verdict", "prove"]


def prove(
    config: TrainConfig,
    shape: ModelShape,
    cases: Sequence[Case],
    steps: Sequence[Batch],
    report: Callable[[Verdict], None] | None = None,
) -> list[Verdict]:
    """Compare every case with one process. Collective over the default group, whose size all cases share.

    Of cases whose programs are the same, action by action, on the same layout, the first is run.

    Args:
        steps: the global batch of each step, the same on every rank.
        report: called on rank 0 after each case.
    """
    references, verdicts = References(shape, steps), list[Verdict]()
    known = dict[object, Verdict]()
    for case in cases:
        applied = case.apply(config)
        key = (case.where, content(program_of(applied)))
        if key in known:
            first = known[key]
            verdict = replace(first, layout=str(case), seconds=0.0, same_as=first.layout)
        else:
            verdict = known[key] = _prove(case, applied, references)
        verdicts.append(verdict)
        if _first() and report is not None:
            report(verdict)
    return verdicts


class References:
    """What one process computes, on all ranks; each run once and kept. Collective.

    Args:
        steps: the global batch of each step.
    """

    def __init__(self, shape: ModelShape, steps: Sequence[Batch]) -> None:
        self.shape, self.steps = shape, steps
        self._plain: list[Snapshot] | None = None
        self._delayed: dict[object, list[Snapshot]] = {}

    def plain(self, config: TrainConfig) -> list[Snapshot]:
        """Of synchronous schedules, whatever the layout."""
        if self._plain is None:
            own = run_reference(config, self.shape, self.steps) if _first() else None
            self._plain = share_all(own, self.shape, len(self.steps))
        return self._plain

    def delayed(self, config: TrainConfig, delays: Delays, steps: int) -> list[Snapshot]:
        """Of an asynchronous schedule; its microbatches depend on the data-parallel size."""
        key = (delays, config.layout.dp, steps)
        if key not in self._delayed:
            own = run_delayed(config, self.shape, self.steps[:steps], delays) if _first() else None
            self._delayed[key] = share_all(own, self.shape, steps, gradients=False)
        return self._delayed[key]


_PADDING = "no output of the first microbatch differs, so padding may be in the loss"


def _prove(case: Case, config: TrainConfig, references: References) -> Verdict:
    started = time.perf_counter()
    shape = references.shape
    steps = references.steps
    delays = promised(case, config.microbatches) if program_of(config).versions else None
    replica = assemble(config, shape, Mesh(config.layout.to_layout()))
    padding = replica.split.padded > replica.split.length
    try:
        if delays is None:
            verdict = prove_synchronous(case, config, replica, steps, references.plain(config))
        else:

            def replay(late: Delays, count: int) -> list[Snapshot]:
                return references.delayed(config, late, count)

            verdict = prove_asynchronous(
                case=case, config=config, replica=replica, steps=steps, delays=delays, replay=replay
            )
    finally:
        replica.close()
    if delays is None and not verdict.loss_error <= verdict.tolerance:
        where = _locate(config, shape, steps[0])
        if where is not None or padding:
            told = f"the first output that differs is {where}'s" if where is not None else _PADDING
            verdict = replace(verdict, diagnosis=f"{verdict.diagnosis}; {told}")
    return replace(verdict, seconds=time.perf_counter() - started)


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


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
