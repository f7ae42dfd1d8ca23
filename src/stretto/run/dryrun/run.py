"""Run the training code of one rank on tensors without values, and count what it did."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.parallel.data.gradients import MAX_IN_FLIGHT
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.recompute import RecomputedForward
from stretto.engine.parallel.traffic import traffic
from stretto.errors import StrettoError
from stretto.job.job import Job
from stretto.layout.layout import Layout, axes_of
from stretto.program.action import Action, ActionKind
from stretto.run.dryrun.fake import BACKWARD, RECOMPUTE, Following, fake_rank, without_values
from stretto.run.dryrun.repeats import PhaseRecorder, repeating, tiles_once
from stretto.run.train.assemble import assemble
from stretto.run.train.memory_measured import name_kinds, passing_flats, random_step
from stretto.run.train.rank_model import RankModel

_KINDS = {"re-gather": "all-gather"}  # the cost model counts both as one kind


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Operations, traffic and memory of one rank in a step after the first.

    Attributes:
        rank, coordinates: the rank and its index on each axis.
        flops: FLOPs of matrix products, by phase ("forward", "recompute", "backward", "update") and kind
            ("products", "attention").
        bytes: full size of every collective and every message sent, by axes and kind.
        calls: number of calls, by axes and kind.
        sent: bytes that leave the rank, as `engine.parallel.traffic` counts them.
        phases: bytes by phase, axes and kind.
        peak: peak memory of tensors, temporaries included, bytes.
        peak_action: the action during which the peak occurs.
        kinds: bytes at the peak, by kind.
        operators: calls of torch's operators in the step.
        seconds: duration of the dry run.
    """

    rank: int
    coordinates: dict[str, int]
    flops: dict[tuple[str, str], int]
    bytes: dict[tuple[str, str], int]
    calls: dict[tuple[str, str], int]
    sent: int
    phases: dict[tuple[str, str, str], int]
    peak: int
    peak_action: str
    kinds: dict[str, int]
    operators: int
    seconds: float


@dataclass(kw_only=True)
class _CollectiveCounter:
    """Counts collectives: bytes by phase, axes and kind, and calls by axes and kind."""

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


Progress = Callable[[str, int, int], None]


def dry_run(job: Job, rank: int, *, quick: bool = False, progress: Progress | None = None) -> DryRun:
    """Run two steps of a rank's code, and count the second.

    The first step creates what persists: message buffers, optimiser states, the order of reductions. In it,
    microbatches that repeat the work of others are not run.

    Args:
        job: a legal job.
        rank: rank in the job's layout, 0 to world - 1.
        quick: do not run repeated microbatches in the second step either, but count them like those that they
            repeat: the same counts in a fraction of the time. If a microbatch depends on earlier ones, all
            are run.
        progress: called with the current part, the units of it that are done, and their total.

    Raises:
        StrettoError: no such rank, or an optimiser whose messages cannot be followed.
    """
    sharded = {
        "layout.tp": job.layout.tp > 1,
        "layout.ep": job.layout.ep > 1,
        "dp.mode": job.dp.mode.startswith("zero") and job.layout.dp * job.layout.cp > 1,
    }
    # what Muon sends of sharded matrices depends on messages, which have no content in a dry run
    if job.optimiser.name == "muon" and any(sharded.values()):
        field_name = next(name for name, is_sharded in sharded.items() if is_sharded)
        raise StrettoError(
            f"optim.name is muon: a dry run does not follow how it gathers matrices that {field_name} shards",
            hint="optim.name=adamw: everything but the update is the same",
        )
    started = time.perf_counter()
    with fake_rank(job.layout, rank, native=not job.unified_memory) as mesh, without_values():
        return _run(job, mesh, quick, progress or _no_progress, started)


def _no_progress(_part: str, _done: int, _all: int) -> None:
    return


def _run(job: Job, mesh: Mesh, quick: bool, progress: Progress, started: float) -> DryRun:
    following = Following()
    counter = _CollectiveCounter(layout=mesh.layout, following=following)
    with following, tiles_once(following):
        progress("assembly of the stages", 0, 1)
        # nothing that compiles code for values, as there are none
        attention = "auto" if job.attention == "flex" else job.attention
        uncompiled = replace(job, compile="off", graphs="off", attention=attention)
        replica = assemble(uncompiled, mesh, seed=0, fresh=False)
        try:
            replica.pipeline.train()
            order = replica.pipeline.program.orders[replica.pipeline.rank]
            actions = sum(action.microbatch is not None for action in order)
            repeated = _skippable(replica, order)
            random_step(
                replica, 1, PhaseRecorder(following, repeated=repeated, progress=_step(progress, 1, actions))
            )
            name_kinds(following, replica)
            following.watch(_transient_tensors(replica))
            following.look()  # for storages freed without an operator
            following.restart()
            following.flops.clear()
            before = following.operators
            with traffic(counter) as sent, _recomputed_phase(replica, following):
                recorder = PhaseRecorder(
                    following,
                    (following.flops, counter.bytes, counter.calls, sent.bytes),
                    repeated if quick else frozenset(),
                    _step(progress, 2, actions),
                )
                random_step(replica, 2, recorder)
            operators = following.operators - before
        finally:
            replica.close()
    fullest = max(recorder.actions, key=lambda action: action[2])
    by_group = Counter[tuple[str, str]]()
    for (_, axes, kind), size in counter.bytes.items():
        by_group[axes, kind] += size
    return DryRun(
        rank=mesh.rank,
        coordinates=dict(mesh.coordinates),
        flops=dict(following.flops),
        bytes=dict(by_group),
        calls=dict(counter.calls),
        sent=sent.total,
        phases=dict(counter.bytes),
        peak=following.peak,
        peak_action="the update" if following.peak > fullest[2] else fullest[0],
        kinds={kind: size for kind, size in following.peak_kinds.items() if size},
        operators=operators,
        seconds=time.perf_counter() - started,
    )


def _skippable(replica: RankModel, order: Sequence[Action]) -> frozenset[int]:
    """Return the microbatches that need not be run: none if one depends on earlier ones by weights that
    change or are gathered, or by gradients that every microbatch reduces and half backwards leave incomplete.
    """
    job, buffers = replica.job, replica.pipeline.buffers.values()
    each = any(gradient.per_microbatch for buffer in buffers for gradient in buffer.gradients)
    halves = any(action.kind is ActionKind.W for action in order)
    if replica.asynchronous or job.dp.gathers(job.layout.pp) is not None or (each and halves):
        return frozenset()
    # a stage of one unit has all reductions in flight that it ever has only after MAX_IN_FLIGHT microbatches
    return repeating(order, 1 + MAX_IN_FLIGHT if each else 2)


def _step(progress: Progress, number: int, actions: int) -> Callable[[int], None]:
    return lambda done: progress(f"step {number} of 2", done, actions)


def _transient_tensors(replica: RankModel) -> list[Tensor]:
    """Return full weights and gradients that exist only transiently."""
    units = [unit for units in replica.states.units.values() for unit in units]
    if any(unit.split for unit in units) or any(
        b.frees_after_reduce for b in replica.pipeline.buffers.values()
    ):
        return list(passing_flats(replica))
    return []


@contextmanager
def _recomputed_phase(replica: RankModel, following: Following) -> Generator[None]:
    """Inside the `with`, count forwards that a backward repeats as a separate phase."""
    checkpointed = [
        forward
        for stage in replica.pipeline.stages.values()
        for module in stage.modules()
        if isinstance(forward := module.__dict__.get("forward"), RecomputedForward)
    ]
    plain = [forward.run for forward in checkpointed]
    for forward, run in zip(checkpointed, plain, strict=True):
        forward.run = _in_recompute_phase(run, following)
    try:
        yield
    finally:
        for forward, run in zip(checkpointed, plain, strict=True):
            forward.run = run


def _in_recompute_phase(run: Callable[..., Any], following: Following) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        before = following.phase
        following.phase = RECOMPUTE if before == BACKWARD else before
        try:
            return run(*arguments)
        finally:
            following.phase = before

    return call
