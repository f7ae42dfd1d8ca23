"""Which jobs are legal: the rules that tie model, layout, schedule and batch together.

The config is checked by them before a process starts, and the planner proposes nothing that breaks one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stretto.cost.shape import ModelShape
from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.plan.program import build_program
from stretto.schedule.program import Program


@dataclass(frozen=True)
class Problem:
    """A broken rule: the field as the config names it, its value, what must hold, and the nearest fix.

    The value is None where the rule tells it.
    """

    field: str
    value: object
    rule: str
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.field}{'' if self.value is None else f' is {self.value}'}: {self.rule}"

    def error(self) -> StrettoError:
        """The problem as a user's error."""
        return StrettoError(str(self), hint=self.fix)


@dataclass(frozen=True)
class Job:
    """What the rules look at: one model on one layout.

    `world` is the number of processes and `devices` the number of accelerators, where they are known.
    """

    shape: ModelShape
    layout: Layout
    global_batch: int  # samples of a step
    micro_batch: int  # samples of a microbatch
    sequence: int  # tokens of a sample
    schedule: str = "1f1b"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the schedule
    world: int | None = None
    devices: int | None = None
    clip: float | None = None  # largest gradient norm

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step in each replica; None where the batch does not divide."""
        whole, rest = divmod(self.global_batch, self.layout.dp * self.micro_batch)
        return None if rest else whole

    def program(self) -> Program:
        """The compute actions of a step; only with a batch that divides.

        Raises:
            StrettoError: there is no such schedule, or not with these ranks, microbatches and options.
        """
        assert self.microbatches
        return build_program(
            self.schedule, self.layout.pp, self.microbatches, self.options, self.shape, self.sequence
        )


Rule = Callable[[Job], Iterator[Problem]]


def problems(job: Job) -> list[Problem]:
    """Every broken rule; empty for a legal job."""
    return [problem for rule in RULES for problem in rule(job)]


def fits_tp(shape: ModelShape, tp: int) -> bool:
    """Whether heads, key/value heads, MLP and vocabulary can be split over `tp` ranks."""
    return (
        shape.heads % tp == 0
        and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
        and shape.ffn % tp == 0
        and shape.vocab >= tp
    )


def nearest_values(value: int, legal: Iterable[int]) -> list[int]:
    """The nearest legal value below and above `value`, the nearer first; at most two."""
    below = [n for n in legal if n < value][-1:]
    above = [n for n in legal if n > value][:1]
    return sorted(below + above, key=lambda n: abs(n - value))


def _either(field: str, values: list[int]) -> str | None:
    return f"nearest: {field}={' or '.join(map(str, values))}" if values else None


def _axes_that_run(job: Job) -> Iterator[Problem]:
    for axis, what in (("cp", "context"), ("ep", "expert")):
        size = getattr(job.layout, axis)
        if size > 1:
            yield Problem(
                f"layout.{axis}", size, f"{what} parallelism comes later, only 1 runs now", f"use {axis}=1"
            )


def _ranks(job: Job) -> Iterator[Problem]:
    layout = job.layout
    product = f"tp={layout.tp} x cp={layout.cp} x dp={layout.dp} x pp={layout.pp} is {layout.world} ranks"
    if job.world is not None and job.world != layout.world:
        model_parallel = layout.world // layout.dp
        fits = job.world % model_parallel == 0
        yield Problem(
            "layout",
            layout.describe(),
            f"{product}, but {job.world} processes were started",
            f"start {layout.world} processes" + (f", or dp={job.world // model_parallel}" if fits else ""),
        )
    if job.devices is not None and layout.world > job.devices:
        yield Problem(
            "layout",
            layout.describe(),
            f"{product}, but there are {job.devices} devices, and each rank needs its own",
            "use a smaller layout, more machines, or train.device=cpu",
        )


def _tensor(job: Job) -> Iterator[Problem]:
    shape, tp = job.shape, job.layout.tp
    legal = [n for n in range(1, shape.heads + 1) if fits_tp(shape, n)]
    fix = _either("layout.tp", nearest_values(tp, legal))
    for name, size in (("heads", shape.heads), ("ffn", shape.ffn)):
        if size % tp:
            yield Problem("layout.tp", tp, f"it must divide model.{name}, which is {size}", fix)
    if shape.kv_heads % tp and tp % shape.kv_heads:
        rule = f"it must divide model.kv_heads, which is {shape.kv_heads}, or be a multiple of it"
        yield Problem("layout.tp", tp, rule, fix)
    if shape.vocab < tp:
        rule = f"each rank needs a part of the vocabulary, which has {shape.vocab} entries"
        yield Problem("layout.tp", tp, rule, fix)


def _batch(job: Job) -> Iterator[Problem]:
    unit = job.layout.dp * job.micro_batch
    if job.global_batch % unit:
        below = job.global_batch // unit * unit
        legal = [n for n in (below, below + unit) if n]
        yield Problem(
            "batch.global_size",
            job.global_batch,
            f"it must be a multiple of batch.micro_size={job.micro_batch} x layout.dp={job.layout.dp}",
            _either("batch.global_size", nearest_values(job.global_batch, legal)),
        )


def _pipeline(job: Job) -> Iterator[Problem]:
    if not job.microbatches:
        return  # the batch is wrong already, and which schedules fit depends on it
    pp = job.layout.pp
    try:
        program = job.program()
    except StrettoError as error:
        yield Problem("schedule", _describe(job), error.message, error.hint)
        return
    if not program.trains:
        yield Problem("schedule", job.schedule, "it has no backwards, so it cannot train", "use 1f1b")
        return
    # cut as embedding, blocks and head, each stage at least one of them
    layers, stages = job.shape.layers + 2, program.depth
    chunks = max(1, stages // pp)
    if stages > layers:
        yield Problem(
            "layout.pp",
            pp,
            f"{stages} stages (pp x {chunks} chunks) for {layers} layers, each stage needs one "
            f"(embedding, {job.shape.layers} blocks, head)",
            f"largest that fits: layout.pp={layers // chunks}" if layers >= chunks else "use fewer chunks",
        )
    if program.versions:
        yield from _updates_within(job, stages)


def _updates_within(job: Job, stages: int) -> Iterator[Problem]:
    """What an asynchronous schedule asks for: stages that update by themselves."""
    if stages > 1 and job.shape.tied:
        yield Problem(
            "model.tied",
            "true",
            f"schedule {job.schedule} updates each stage by itself, but the first and the last would share "
            "the embedding",
            "model.tied=false, layout.pp=1, or a schedule that updates after the step, such as 1f1b",
        )
    if job.clip is not None:
        yield Problem(
            "optim.clip",
            job.clip,
            f"schedule {job.schedule} updates each stage by itself, so nobody has the norm of all gradients",
            "optim.clip=null, or a schedule that updates after the step, such as 1f1b",
        )


def _describe(job: Job) -> str:
    given = {"pp": job.layout.pp, "microbatches": job.microbatches, **job.options}
    told = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    return f"{job.schedule} with {told}"


def _sequence(job: Job) -> Iterator[Problem]:
    if job.sequence > job.shape.sequence:
        yield Problem(
            "data.sequence",
            job.sequence,
            f"the model has {job.shape.sequence} positions",
            f"data.sequence={job.shape.sequence}, or model.positions={job.sequence}",
        )


RULES: tuple[Rule, ...] = (_axes_that_run, _ranks, _tensor, _batch, _pipeline, _sequence)
