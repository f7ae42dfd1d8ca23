"""Which jobs are legal: the rules that tie model, layout, schedule and batch together.

The config is checked by them before a process starts, and the planner proposes nothing that breaks one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from stretto.cost.shape import ModelShape
from stretto.errors import StrettoError
from stretto.layout.layout import Layout
from stretto.schedule import schedule


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
    chunks: int | None = None
    group: int | None = None
    world: int | None = None
    devices: int | None = None

    @property
    def microbatches(self) -> int | None:
        """Microbatches of a step in each replica; None where the batch does not divide."""
        whole, rest = divmod(self.global_batch, self.layout.dp * self.micro_batch)
        return None if rest else whole


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
    if job.microbatches is None:
        return  # the batch is wrong already, and which schedules fit depends on it
    pp = job.layout.pp
    stages, why, fix = _stages(job.schedule, pp, job.microbatches, job.chunks, job.group)
    if why is not None:
        yield Problem("schedule", _describe(job), why, fix)
        return
    # cut as embedding, blocks and head, each stage at least one of them
    layers, chunks = job.shape.layers + 2, max(1, stages // pp)
    if stages > layers:
        yield Problem(
            "layout.pp",
            pp,
            f"{stages} stages (pp x {chunks} chunks) for {layers} layers, each stage needs one "
            f"(embedding, {job.shape.layers} blocks, head)",
            f"largest that fits: layout.pp={layers // chunks}" if layers >= chunks else "use fewer chunks",
        )


@cache
def _stages(
    name: str, ranks: int, microbatches: int, chunks: int | None, group: int | None
) -> tuple[int, str | None, str | None]:
    """Number of stages of a schedule; or why there is no such program, and what to do."""
    try:
        return schedule(name, ranks, microbatches, chunks, group).stages, None, None
    except StrettoError as error:
        return 0, error.message, error.hint


def _describe(job: Job) -> str:
    options = {
        "pp": job.layout.pp,
        "microbatches": job.microbatches,
        "chunks": job.chunks,
        "group": job.group,
    }
    given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f"{job.schedule} with {given}"


def _sequence(job: Job) -> Iterator[Problem]:
    if job.sequence > job.shape.sequence:
        yield Problem(
            "data.sequence",
            job.sequence,
            f"the model has {job.shape.sequence} positions",
            f"data.sequence={job.shape.sequence}, or model.positions={job.sequence}",
        )


RULES: tuple[Rule, ...] = (_axes_that_run, _ranks, _tensor, _batch, _pipeline, _sequence)
