"""Run the training code of one rank on tensors without values, and count what it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.recompute import Recompute
from stretto.engine.parallel.traffic import traffic
from stretto.layout.layout import Layout, axes_of
from stretto.run.dryrun.fake import BACKWARD, RECOMPUTE, Following, PhaseRecorder, fake_rank, without_values
from stretto.run.train.assemble import assemble
from stretto.run.train.memory_measured import name_kinds, passing_flats, random_step
from stretto.run.train.replica import Replica
from stretto.spec.job import Job

_KINDS = {"re-gather": "all-gather"}  # the cost model counts both as one kind


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What one rank does in a step after the first, and holds.

    Attributes:
        rank, coordinates: the rank, and where it sits.
        flops: of matrix products, by phase ("forward", "recompute", "backward", "update") and kind
            ("products", "attention").
        bytes: of the whole of every collective and of each message sent, by axes and kind.
        calls: how many, by axes and kind.
        sent: bytes that leave the rank, as `engine.parallel.traffic` counts them.
        phases: bytes by phase, axes and kind.
        peak: most bytes of tensors at once, temporaries included.
        at: the action during which that was.
        kinds: bytes at that moment, by kind.
        operators: calls of torch's operators in the step.
        seconds: that all of the dry run took.
    """

    rank: int
    coordinates: dict[str, int]
    flops: dict[tuple[str, str], int]
    bytes: dict[tuple[str, str], int]
    calls: dict[tuple[str, str], int]
    sent: int
    phases: dict[tuple[str, str, str], int]
    peak: int
    at: str
    kinds: dict[str, int]
    operators: int
    seconds: float


@dataclass(kw_only=True)
class _Heard:
    """Counts the calls of collectives."""

    layout: Layout
    following: Following
    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter[tuple[str, str, str]])
    calls: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _axes: dict[str, str] = field(default_factory=dict[str, str])

    def __call__(self, group: ProcessGroup, kind: str, size: int) -> None:
        name = group.group_name
        if name not in self._axes:
            self._axes[name] = axes_of(self.layout, dist.get_process_group_ranks(group))
        key = self._axes[name], _KINDS.get(kind, kind)
        self.bytes[self.following.phase, *key] += size
        self.calls[key] += 1


def dry_run(job: Job, rank: int, steps: int = 2) -> DryRun:
    """Run a rank's code, and count its last step.

    The first step makes what stays: buffers of messages, states of optimisers, the order of reductions.

    Args:
        job: a legal one.
        rank: of its layout, 0 to world - 1.
        steps: at least 1; with 1, in half the time, states of optimisers are made before, and reductions come
            at the end of their stage's last backward as in every first step.

    Raises:
        StrettoError: no such rank.
    """
    started = time.perf_counter()
    with fake_rank(job.layout, rank, native=not job.one_memory) as mesh, without_values():
        return _run(job, mesh, steps, started)


def _run(job: Job, mesh: Mesh, steps: int, started: float) -> DryRun:
    following = Following()
    heard = _Heard(layout=mesh.layout, following=following)
    with following:
        replica = assemble(job, mesh, seed=0, fresh=False)
        try:
            replica.pipeline.train()
            if steps == 1:
                replica.optimizer.ensure_states()
            for step in range(1, steps):
                random_step(replica, step)
            name_kinds(following, replica)
            following.watch(_coming_and_going(replica))
            following.look()  # for storages freed without an operator
            following.restart()
            following.flops.clear()
            before, recorder = following.operators, PhaseRecorder(following)
            with traffic(heard) as sent, _again(replica, following):
                random_step(replica, steps, recorder)
            operators = following.operators - before
        finally:
            replica.close()
    fullest = max(recorder.actions, key=lambda action: action[2])
    by_group = Counter[tuple[str, str]]()
    for (_, axes, kind), size in heard.bytes.items():
        by_group[axes, kind] += size
    return DryRun(
        rank=mesh.rank,
        coordinates=dict(mesh.coordinates),
        flops=dict(following.flops),
        bytes=dict(by_group),
        calls=dict(heard.calls),
        sent=sent.total,
        phases=dict(heard.bytes),
        peak=following.peak,
        at="the update" if following.peak > fullest[2] else fullest[0],
        kinds={kind: size for kind, size in following.at_peak.items() if size},
        operators=operators,
        seconds=time.perf_counter() - started,
    )


def _coming_and_going(replica: Replica) -> list[Tensor]:
    """Whole weights and gradients that exist only transiently."""
    units = [unit for units in replica.states.units.values() for unit in units]
    if any(unit.split for unit in units) or any(b.frees for b in replica.pipeline.buffers.values()):
        return list(passing_flats(replica))
    return []


@contextmanager
def _again(replica: Replica, following: Following) -> Generator[None]:
    """While inside, forwards that a backward runs again count as a phase of their own."""
    checkpointed = [
        forward
        for stage in replica.pipeline.stages.values()
        for module in stage.modules()
        if isinstance(forward := module.__dict__.get("forward"), Recompute)
    ]
    plain = [one.run for one in checkpointed]
    for one, run in zip(checkpointed, plain, strict=True):
        one.run = _counted(run, following)
    try:
        yield
    finally:
        for one, run in zip(checkpointed, plain, strict=True):
            one.run = run


def _counted(run: Callable[..., Any], following: Following) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        before = following.phase
        following.phase = RECOMPUTE if before == BACKWARD else before
        try:
            return run(*arguments)
        finally:
            following.phase = before

    return call
