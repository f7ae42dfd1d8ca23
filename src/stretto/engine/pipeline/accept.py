"""Validation of what a pipeline is made from, and the forward-only program for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from stretto.errors import StrettoError
from stretto.program.action import Action, Kind
from stretto.program.program import Program


def forward_only(program: Program, microbatches: int) -> Program:
    """The forwards of a program's stages for any number of microbatches, in an order that always completes;
    of its first copy, where it has several.
    """
    orders = tuple(
        tuple(
            Action(s, Kind.F, i)
            for i in range(microbatches)
            for s in program.stages_of(rank)
            if s < program.depth
        )
        for rank in range(program.ranks)
    )
    return replace(
        program,
        name="forward-only",
        microbatches=microbatches,
        orders=orders,
        tied=(),
        lowered=False,
        trains=False,
        pairs=frozenset(),
        versions=(),
    )


def check_cut(cut: Sequence[range], layers: int, stages: int) -> None:
    """Check that every layer is in one stage, in order.

    Raises:
        StrettoError: it is not.
    """
    if len(cut) != stages or [layer for stage in cut for layer in stage] != list(range(layers)):
        raise StrettoError(
            f"cut {[(stage.start, stage.stop) for stage in cut]} of {layers} layers into {stages} stages",
            hint=f"give {stages} ranges that follow one another and hold layers 0 to {layers - 1}",
        )


def check_asynchronous(program: Program, optimizer: bool, tied: Sequence[tuple[int, ...]]) -> None:
    """Only an asynchronous program comes with an optimiser, and no two of its stages share a parameter.

    Args:
        optimizer: whether the weights have one.
        tied: sets of stages that share a parameter.
    """
    if program.versions and not optimizer:
        raise StrettoError(
            f"schedule {program.name} updates weights within the step, but the pipeline has no optimizer",
            hint="give it one: Pipeline(..., weights=ReplicatedWeights(optimizer=lambda p: "
            "torch.optim.SGD(p, lr=0.1)))",
        )
    if optimizer and not program.versions:
        raise StrettoError(
            f"schedule {program.name} updates weights after the step, but the pipeline has an optimizer",
            hint="leave optimizer out and call your own after step()",
        )
    if program.versions and tied:
        raise StrettoError(
            f"schedule {program.name} updates each stage separately, but stages {tied[0]} share a parameter",
            hint="untie it, or use a schedule that updates at the end, such as 1f1b",
        )


def parameter_counts(layers: Sequence[nn.Module]) -> list[float]:
    """Cost of each layer for an even cut: its parameters, and 1, so that layers without any count too."""
    return [1.0 + sum(p.numel() for p in layer.parameters()) for layer in layers]
