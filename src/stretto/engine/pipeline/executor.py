"""Run a lowered program on this rank's stages.

The program is bound once into a flat list of calls on preallocated buffers: the step loop looks nothing up.
Receives are posted where the program says and waited for by the action that uses them; a send is waited for
where the program proves that it is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.engine.parallel.data.stage_weights import SHARED, StageWeights
from stretto.engine.pipeline.compute import Compute
from stretto.engine.pipeline.exchange import Exchange, Transfer
from stretto.engine.pipeline.live import Boundaries, Call, Live, StageLive
from stretto.engine.pipeline.recorder import Recorder
from stretto.engine.pipeline.versions import WeightVersions
from stretto.program.action import Action, Kind
from stretto.program.checks.residency import USES
from stretto.program.lower import send_releases
from stretto.program.messages import channel_of, needed_by
from stretto.program.program import Program

_WAIT_FOR = "the wait for "  # a message that was sent


class Awaited(NamedTuple):
    """A message that an action waits for: with which pipeline rank, and whether it is sent or received."""

    peer: int
    sends: bool


class PipelineError(RuntimeError):
    """A rank failed in the middle of a step: at which action, and why.

    awaited: the message that the action waits for; None: it waits for none.
    """

    awaited: Awaited | None = None


def error_text(error: Exception) -> str:
    """What an error says; with its type where the text says little alone, such as the key of a KeyError."""
    kind, text = type(error).__name__, str(error)
    if not text:
        return kind
    return f"{kind}: {text}" if isinstance(error, LookupError | AssertionError) else text


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank's program works on and with.

    Attributes:
        stages: this rank's stage modules by stage number.
        weights: owns their parameters and gradients, and acts where the program says.
        loss: (output of the last stage, targets) to a scalar; None keeps outputs instead.
        transfer: messages to the other pipeline ranks; None when there are none.
        boundaries: what enters each stage of the model but the first; None where shapes differ between
            microbatches.
        reduce_tied: called once, at this rank's last REDUCE_TIED.
        before_forward: called with the microbatch's number before each forward.
        versions: of each stage, where weights change within the step.
    """

    stages: Mapping[int, nn.Module]
    weights: StageWeights
    loss: Callable[[Any, Any], Tensor] | None = None
    transfer: Transfer | None = None
    boundaries: Mapping[int, Boundaries] | None = None
    reduce_tied: Call | None = None
    before_forward: Callable[[int], None] | None = None
    versions: Mapping[int, WeightVersions] = field(default_factory=dict[int, WeightVersions])


class Executor:
    """A lowered program bound to one rank of the pipeline: its actions as a flat list of calls."""

    def __init__(self, program: Program, rank: int, work: Work, device: torch.device | str = "cpu") -> None:
        assert program.lowered
        m, device = program.microbatches, torch.device(device)
        self.program = program
        self.rank = rank
        self.work = work
        self.device = device
        self.live = Live(
            stages={s: StageLive(module, m) for s, module in work.stages.items()},
            losses=[None] * m,
            outputs=[None] * m,
        )
        trains = any(a.kind in (Kind.B, Kind.I) for a in program.orders[rank])
        self._exchange = (
            Exchange(
                program=program,
                rank=rank,
                live=self.live,
                transfer=work.transfer,
                boundaries=work.boundaries,
                device=device,
                trains=trains,
            )
            if work.transfer is not None
            else None
        )
        self._compute = Compute(
            program=program,
            rank=rank,
            live=self.live,
            exchange=self._exchange,
            loss=work.loss,
            before=work.before_forward,
            versions=dict(work.versions),
        )
        self.calls: list[Call] = []
        self.labels: list[str] = []
        self.waits: list[Call | None] = []  # the wait for a message that a call begins with, for recorders
        self._bind()

    def run(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        scales: Sequence[Tensor | None] = (),
        recorder: Recorder | None = None,
    ) -> None:
        """One step: forward and backward of all microbatches, gradients summed into the buffers.

        Args:
            inputs: one per microbatch, read by the first stage.
            targets: one per microbatch, read by the loss.
            scales: gradient of each microbatch's loss.
            recorder: times every call; None disables timing.
        """
        live, at = self.live, 0
        live.inputs = inputs
        live.targets = targets
        live.scales = scales
        try:
            if recorder is None:
                for at, call in enumerate(self.calls):  # noqa: B007 (read when a call fails)
                    call()
            else:
                for at, call in enumerate(self.calls):
                    recorder.record(self.labels[at], call, self.waits[at])
        except Exception as error:
            what = f"pipeline rank {self.rank} at {self.labels[at]}"
            failed = PipelineError(f"{what}: {error_text(error)}")
            failed.awaited = self._awaited(self.labels[at])
            raise failed from error
        finally:
            live.clear()

    # ------------------------------------------------------------------ binding

    def _bind(self) -> None:
        order, weights = self.program.orders[self.rank], self.work.weights
        buffers = weights.buffers
        releases = defaultdict[Action | None, list[Action]](list)
        for send, point in send_releases(self.program, self.rank).items():
            releases[point].append(send)
        last = {} if self.program.versions else {a.stage: a for a in order if a.kind in (Kind.B, Kind.W)}
        # a stage in two sets has the same action twice
        joined = max((at for at, a in enumerate(order) if a.kind is Kind.REDUCE_TIED), default=-1)
        opened = set[int]()
        coming = set[int]()
        reduced = list[int]()
        for at, action in enumerate(order):
            if action.kind is Kind.UNSHARD:
                coming.add(action.stage)
            elif action.stage in coming and action.kind in USES:
                coming.remove(action.stage)
                if weights.gathers:
                    self._add(partial(weights.await_stage, action.stage), f"the weights of {action}")
            if action.kind in (Kind.B, Kind.I) and action.stage not in opened:
                if not opened and SHARED in buffers:
                    self._add(buffers[SHARED].open, "the gradients that stages share")
                opened.add(action.stage)
                for stage in reduced if buffers[action.stage].frees else ():
                    self._add(buffers[stage].wait, f"the sums of stage {stage}")
                self._add(buffers[action.stage].open, f"the gradients of {action}")
            for send in releases[action]:
                self._release(send)
            if last.get(action.stage) == action:
                self._add(buffers[action.stage].arm, f"the start of {action}")
            if action.kind is Kind.REDUCE_GRAD:
                reduced.append(action.stage)
            if action.kind is not Kind.REDUCE_TIED:
                if call := self._call(action):
                    self._add(call, str(action), self._wait(action))
                # a stage without an input gradient runs its graph in W
                if action.kind in (Kind.B, Kind.I, Kind.W) and weights.gathers:
                    self._add(partial(weights.end_backward, action.stage), f"the end of {action}")
            elif at == joined and self.work.reduce_tied is not None:
                self._add(self.work.reduce_tied, str(action))
        for send in releases[None]:
            self._release(send)

    def _call(self, action: Action) -> Call | None:
        """The call of one action; None where there is nothing to do."""
        compute = self._compute
        exchange = self._exchange
        work = self.work
        stage = action.stage
        match action.kind:
            case Kind.F:
                return compute.forward(action)
            case Kind.B | Kind.I:
                return compute.backward(action)
            case Kind.W:
                return compute.weights(action)
            case Kind.RECOMPUTE:
                return compute.recompute(action)
            case Kind.OFFLOAD:
                return compute.offload(action)
            case Kind.RELOAD:
                return compute.reload(action)
            case Kind.SEND_F | Kind.SEND_B:
                assert exchange is not None
                return exchange.send(action)
            case Kind.RECV_F | Kind.RECV_B:
                assert exchange is not None
                return exchange.receive(action)
            case Kind.REDUCE_GRAD:
                return partial(work.weights.reduce, stage)
            case Kind.UPDATE:
                return work.versions[stage].update
            case Kind.UNSHARD | Kind.RESHARD:
                if not work.weights.gathers:
                    return None
                call = work.weights.gather if action.kind is Kind.UNSHARD else work.weights.release
                return partial(call, stage)
            case Kind.REDUCE_TIED:
                raise AssertionError("bound with all others of the rank")

    def _wait(self, action: Action) -> Call | None:
        receive = needed_by(self.program, action)
        return self._exchange.wait(receive) if receive and self._exchange is not None else None

    def _release(self, send: Action) -> None:
        assert self._exchange is not None
        self._add(self._exchange.release(send), f"{_WAIT_FOR}{send}")

    def _awaited(self, label: str) -> Awaited | None:
        """The message that the call with this label waits for."""
        for action in self.program.orders[self.rank]:
            message = action if label == f"{_WAIT_FOR}{action}" else None
            if label == str(action):
                message = needed_by(self.program, action)
            if message is not None:
                source, target, _ = channel_of(self.program, message)
                return Awaited(target if source == self.rank else source, sends=source == self.rank)
        return None

    def _add(self, call: Call, label: str, wait: Call | None = None) -> None:
        self.calls.append(call)
        self.labels.append(label)
        self.waits.append(wait)
