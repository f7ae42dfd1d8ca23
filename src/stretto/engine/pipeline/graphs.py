"""Forward and backward of a microbatch as one device graph, captured once and replayed for all others.

A graph reads and writes the memory that it was captured with. So each microbatch is copied to the memory of
the first one: the model's inputs, its targets, and the gradient of its loss with the loss scale. Gradients
accumulate in the parameters' flat tensors, whose memory is fixed, and are zeroed outside of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.engine.device import Graph, has_graphs
from stretto.engine.pipeline.compute import ComputeCalls
from stretto.engine.pipeline.rank_buffers import RankBuffers
from stretto.errors import StrettoError
from stretto.program.action import ActionKind
from stretto.program.checks.in_turn import in_turn
from stretto.program.program import Program

WARM_UP = 3  # microbatches before the capture


def check_capturable(program: Program, device: torch.device, autocast: torch.dtype | None) -> None:
    """Check that a pipeline's microbatches can be captured as graphs.

    Raises:
        StrettoError: they cannot, with the reason.
    """
    if not has_graphs(device.type):
        raise StrettoError(f"this torch has no graphs for device {device.type}", hint="train without them")
    if not in_turn(program):
        raise StrettoError(
            f"schedule {program.name} on {program.ranks} ranks does not finish a microbatch before it begins "
            "the next, and a graph has the memory of one",
            hint="use 1f1b on one rank, or no graphs",
        )
    if autocast is not None:
        raise StrettoError(
            "autocast caches converted weights, and a graph would read those of its capture",
            hint="give parameters the type to compute in, or use no graphs",
        )


class MicrobatchGraph:
    """Runs microbatches in sequence: the first `WARM_UP` eagerly, later ones by a graph.

    Args:
        program: a program that finishes one microbatch before it begins the next.
        stages, loss, before: as in `ExecutorInputs`; `before` must prepare the same for all microbatches.
    """

    def __init__(
        self,
        *,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module],
        loss: Callable[[Any, Any], Tensor] | None,
        before: Callable[[int], None] | None,
        device: torch.device,
    ) -> None:
        self._live = RankBuffers(stages, 1)
        compute = ComputeCalls(
            program=program, rank=rank, live=self._live, exchange=None, loss=loss, before=before
        )
        order = program.orders[rank]
        self._forward = compute.forward(next(action for action in order if action.kind is ActionKind.F))
        self._backward = compute.backward(next(action for action in order if action.kind is ActionKind.B))
        self._graph = Graph(device)
        self._batch: list[Tensor] = []  # memory from which the graph reads inputs, targets, loss gradient
        self._warmed = 0

    def run(self, live: RankBuffers, at: int) -> None:
        """Run forward and backward of the microbatch at index `at` of the buffers, and store its loss there.

        Raises:
            StrettoError: its shapes differ from those of the first one, or it cannot be captured.
        """
        batch: list[Any] = [live.inputs[at], live.targets[at], live.scales[at]]
        if not all(isinstance(tensor, Tensor) for tensor in batch):
            raise StrettoError(
                "a graph reads one tensor of inputs, one of targets and the gradient of the loss",
                hint="give the pipeline these, or use no graphs",
            )
        if not self._batch:
            self._batch = [torch.empty_like(tensor) for tensor in batch]
        for captured, new in zip(self._batch, batch, strict=True):
            if (captured.shape, captured.dtype) != (new.shape, new.dtype):
                raise StrettoError(
                    f"a microbatch has {new.dtype} {list(new.shape)}, but its graph reads {captured.dtype} "
                    f"{list(captured.shape)}",
                    hint="give all microbatches one shape, or use no graphs",
                )
            captured.copy_(new)
        if self._warmed < WARM_UP:
            self._graph.warm_up(self._compute)
            self._warmed += 1
        else:
            if not self._graph.captured:
                try:
                    self._graph.capture(self._compute)
                except RuntimeError as error:
                    raise StrettoError(
                        f"a microbatch cannot be captured as a graph: {error}", hint="train.graphs=off"
                    ) from error
            self._graph.replay()
        live.losses[at] = self._live.losses[0].clone()

    def _compute(self) -> None:
        live = self._live
        live.inputs[0], live.targets[0], live.scales[0] = self._batch
        self._forward()
        self._backward()
