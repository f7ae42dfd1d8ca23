"""Which jobs a device can replay as graphs: a graph has the memory of one microbatch, and nothing in it waits
for the host or depends on values.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.errors import Problem, StrettoError
from stretto.program.checks.in_turn import in_turn
from stretto.spec.job import Job, batch_problem
from stretto.spec.reduction import reduction


def graphs(job: Job) -> Iterator[Problem]:
    """What `train.graphs` does not go with."""
    if job.graphs != "off":
        for rule, fix in _obstacles(job):
            yield Problem("train.graphs", job.graphs, rule, f"train.graphs=off, or {fix}")


def _obstacles(job: Job) -> Iterator[tuple[str, str]]:
    """Each rule that is broken, and what else would mend it."""
    layout, shape = job.layout, job.shape
    if layout.pp > 1:
        yield (
            f"layout.pp={layout.pp} has several microbatches in flight, and a graph is of one",
            "layout.pp=1",
        )
    elif batch_problem(job) is None:
        yield from _program(job)
    if layout.cp > 1:
        yield (
            f"layout.cp={layout.cp} exchanges keys and values in messages, which are not captured",
            "layout.cp=1",
        )
    if shape.moe is not None:
        yield "the host counts the tokens of each expert, and a graph cannot wait for it", "a dense model"
    if shape.encoder_layers:
        yield "the decoder reads samples of another length with each microbatch", "a model without an encoder"
    if shape.drops:
        yield (
            "the host computes the seed of each sample's dropout, which a graph would repeat",
            "model.dropout=0 and lora.dropout=0",
        )
    if job.dp.mode == "zero3":
        yield "dp.mode=zero3 gathers weights into memory that it frees, and a graph's stays", "dp.mode=zero2"
    if job.dp.mode == "server":
        yield (
            "dp.mode=server sends samples and weights in ways that were never tried with graphs",
            "dp.mode=ddp",
        )


def _program(job: Job) -> Iterator[tuple[str, str]]:
    """Obstacles in the order of a step's actions, and in when gradients are reduced."""
    try:
        program = job.program()
    except StrettoError:
        return  # told by the rule on schedules
    if not in_turn(program):
        yield (
            f"schedule {job.schedule_name} does not end a microbatch before it begins the next one",
            "schedule.name=1f1b",
        )
    elif job.dp.mode == "zero2" and reduction(program, "zero2", job.dp.reduce) == "microbatch":
        yield (
            "dp.mode=zero2 reduces gradients in the backward of each microbatch, by hooks that a graph does "
            "not run",
            "dp.reduce=step",
        )
