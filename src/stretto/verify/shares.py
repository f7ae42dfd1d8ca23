"""Which ways of sharing parameters, gradients and optimiser states are proved.

All of their product would be hundreds for each layout. These have each mode with each place of the states,
each moment of reducing with each unit of gathering, and each size that can be smaller than the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Way = dict[str, Any]  # fields of a case that are not as usual

_ALONE: tuple[Way, ...] = ({}, {"offload": "cpu"}, {"offload": "nvme"})

_SHARED: tuple[Way, ...] = (
    *_ALONE,
    {"mode": "server"},
    {"mode": "server", "offload": "cpu"},
    {"mode": "zero1"},
    {"mode": "zero1", "offload": "cpu"},
    {"mode": "zero1", "offload": "nvme"},
    {"mode": "zero2", "reduce": "step"},
    {"mode": "zero2", "reduce": "microbatch", "offload": "cpu"},
    {"mode": "zero2", "reduce": "step", "offload": "nvme"},
    {"mode": "zero3", "reduce": "microbatch", "gather": "layer"},
    {"mode": "zero3", "reduce": "step", "gather": "stage"},
    {"mode": "zero3", "reduce": "step", "gather": "layer", "offload": "cpu", "offload_parameters": "cpu"},
    {"mode": "zero3", "reduce": "microbatch", "gather": "stage", "offload": "nvme"},
    {"mode": "zero3", "reduce": "microbatch", "gather": "layer", "offload_parameters": "nvme"},
)


def ways(copies: int) -> Iterator[Way]:
    """Of ranks that hold `copies` copies of the parameters; one copy is shared with nobody."""
    yield from _SHARED if copies > 1 else _ALONE
    part = next((n for n in range(2, copies) if copies % n == 0), None)
    if part is not None:
        yield {"mode": "zero1", "shard_states": part}
        yield {"mode": "zero2", "reduce": "microbatch", "shard_gradients": part}
        yield {"mode": "zero3", "gather": "layer", "reduce": "step", "shard_parameters": part}
        yield {"mode": "zero3", "gather": "stage", "reduce": "microbatch", "shard_states": part}
        yield {"mode": "zero3", "gather": "layer", "reduce": "microbatch", "shard_gradients": part}


def values(way: Way) -> set[str]:
    """What is to be met with each schedule and each feature: the mode, and what changes the order of things:
    when gradients are reduced, what is gathered at once, where the states are.
    """
    return {way.get("mode", "ddp"), *(f"{name}={way[name]}" for name in _MET if name in way)}


_MET = ("reduce", "gather", "offload")
