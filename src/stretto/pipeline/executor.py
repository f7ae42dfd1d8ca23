"""Run a lowered program on this rank's stages.

The program is bound once into a flat list of calls on preallocated buffers: the step loop looks nothing up.
    Receives are posted where the program says and waited for by the action that uses them; a send is waited
    for where the program proves that it is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.parallel.gradients import GradientBuffer
from stretto.pipeline.bind import Binder
from stretto.pipeline.live import Boundary, Call, Live, StageLive
from stretto.pipeline.transfer import Transfer
from stretto.schedule.action import Action, Kind
from stretto.schedule.lower import send_releases
from stretto.schedule.program import Program


class PipelineError(RuntimeError):
    """A rank failed in the middle of a step: at which action, and why."""


class Executor:
    """A program bound to one rank.

    Args:
        program: lowered and checked.
        rank: this rank's place in the pipeline.
        stages: this rank's stage modules by stage number.
        transfer: messages to the other pipeline ranks; None when there are none.
        boundaries: activation that enters each stage (first stage excepted).
        loss: (output of the last stage, targets) to a scalar; None keeps outputs instead.
        buffers: gradient buffers by stage; reductions start where the program says.
        reduce_tied: called once, at this rank's last REDUCE_TIED.
        before_forward: called with the microbatch's number before each forward.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, nn.Module],
        transfer: Transfer | None,
        boundaries: Mapping[int, Boundary],
        loss: Callable[[Tensor, Any], Tensor] | None,
        buffers: Mapping[int, GradientBuffer] | None = None,
        reduce_tied: Call | None = None,
        before_forward: Callable[[int], None] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        assert program.lowered
        m = program.microbatches
        self.program, self.rank = program, rank
        self.live = Live({s: StageLive(module, m) for s, module in stages.items()}, [None] * m, [None] * m)
        self._binder = Binder(
            program,
            rank,
            self.live,
            transfer,
            boundaries,
            loss,
            buffers or {},
            before_forward,
            torch.device(device),
        )
        self.calls: list[Call] = []
        self.labels: list[str] = []
        self._bind(buffers or {}, reduce_tied)

    def run(self, inputs: Sequence[Any], targets: Sequence[Any], scale: Tensor | None = None) -> None:
        """One step: forward and backward of all microbatches, gradients summed into the buffers.

        Args:
            inputs: one per microbatch, read by the first stage.
            targets: one per microbatch, read by the loss.
            scale: gradient of each microbatch's loss; 1 by default.
        """
        live, at = self.live, 0
        live.inputs, live.targets, live.scale = inputs, targets, scale
        try:
            for at, call in enumerate(self.calls):  # noqa: B007 (read when a call fails)
                call()
        except Exception as error:
            raise PipelineError(f"pipeline rank {self.rank} at {self.labels[at]}: {error}") from error
        finally:
            live.clear()

    def _bind(self, buffers: Mapping[int, GradientBuffer], reduce_tied: Call | None) -> None:
        order = self.program.orders[self.rank]
        releases = defaultdict[Action | None, list[Action]](list)
        for send, point in send_releases(self.program, self.rank).items():
            releases[point].append(send)
        last = {a.stage: a for a in order if a.kind in (Kind.B, Kind.W)}
        tied = [a for a in order if a.kind is Kind.REDUCE_TIED]
        for action in order:
            for send in releases[action]:
                self._add(self._binder.release(send), f"the wait for {send}")
            if last.get(action.stage) == action and action.stage in buffers:
                self._add(buffers[action.stage].arm, str(action))
            if action.kind is not Kind.REDUCE_TIED:
                self._add(self._binder(action), str(action))
            elif action == tied[-1] and reduce_tied is not None:
                self._add(reduce_tied, str(action))
        for send in releases[None]:
            self._add(self._binder.release(send), f"the wait for {send}")

    def _add(self, call: Call, label: str) -> None:
        self.calls.append(call)
        self.labels.append(label)
