"""The layouts that people use: what a search tries first, and what its result is compared with.

Each is a task narrowed to some values of its choices, so that it is searched like everything else. Where what
the user has fixed excludes a conventional layout, its search finds nothing.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), section 3: tensor parallelism within a node, then pipeline
parallelism until the model fits, then data parallelism. Zhao et al. 2023 (arXiv 2304.11277): FSDP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.planner.search.space import divisors
from stretto.planner.search.task import Task
from stretto.program import PLAIN, entry, names

FSDP = "FSDP"
TENSOR_PIPELINE = "tensor x pipeline"
_LONG = 8192  # tokens of a rank's sequence up to which few split it further
_MICRO = (1, 2, 4, 8)  # samples of a microbatch


def plain_layouts(task: Task) -> dict[str, Task]:
    """The task narrowed to what most people would run without a search, by name."""
    widest = max(_widths(task))
    none: dict[str, tuple[Any, ...]] = {"cp": (1,), "ep": (1,)}
    everywhere = {"shard_states": (None,)}  # over all copies
    narrowed = {
        FSDP: {**none, **everywhere, "tp": (1,), "pp": (1,), "mode": ("zero3",), "schedule": (PLAIN,)}
    }
    if widest > 1:
        narrowed[TENSOR_PIPELINE] = {
            **({} if task.shape.moe else none),
            **everywhere,
            "tp": (widest,),
            "cp": (1,),
            "sequence_parallel": (True,),
            "schedule": _common(),
            "mode": ("ddp", "zero1"),
            "micro_batch": _MICRO,
        }
    return {name: replace(task, narrowed=choices) for name, choices in narrowed.items()}


def conventional(task: Task) -> Task:
    """The task narrowed to the usual choices: tensor parallelism within a node; no context parallelism but
    for long sequences; schedules that most frameworks have; small microbatches.
    """
    longest = max(1, task.sequence // _LONG)
    narrowed: dict[str, tuple[Any, ...]] = {
        "tp": _widths(task),
        "cp": tuple(n for n in divisors(task.devices) if n <= longest),
        "shard_states": (None,),
        "context": ("ring",),
        "schedule": _common(),
        "micro_batch": _MICRO,
    }
    return replace(task, narrowed=narrowed)


def _common() -> tuple[str, ...]:
    return tuple(name for name in names() if entry(name).common)


def _widths(task: Task) -> tuple[int, ...]:
    """Tensor-parallel widths within a node that split the heads."""
    return tuple(n for n in divisors(task.cluster.node) if task.shape.heads % n == 0)
