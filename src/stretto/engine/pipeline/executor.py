"""Runs a lowered program on this rank's stages.

The program is bound once to a flat list of calls on preallocated buffers, cut at the ends of steps: the step
loop does no lookups. Receives are posted where the program posts them, and the action that uses a message
waits for it; a send is waited for where the program proves that it is done.
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
from stretto.engine.pipeline.compute import ComputeCalls
from stretto.engine.pipeline.exchange import Transfer, TransferCalls
from stretto.engine.pipeline.graphs import MicrobatchGraph
from stretto.engine.pipeline.rank_buffers import Batch, Boundaries, Call, RankBuffers, microbatch_of
from stretto.engine.pipeline.recorder import Recorder
from stretto.engine.pipeline.steady_state import SteadyState
from stretto.engine.pipeline.versions import WeightVersions
from stretto.engine.pipeline.words import in_words
from stretto.engine.progress import PROGRESS, Label, label
from stretto.program.action import Action, ActionKind
from stretto.program.checks.residency import USES
from stretto.program.lower import send_releases
from stretto.program.messages import channel_of, needed_by

_WAIT_FOR = "the wait for "  # a sent message
Enter = Callable[[int], Batch]  # from the index of a step in its window to its batch


class Awaited(NamedTuple):
    """A message that an action waits for: the other pipeline rank, and True if the message is sent."""

    peer: int
    sends: bool


class PipelineError(RuntimeError):
    """A rank failed within a step; the message has the action and the cause.

    Attributes:
        awaited: the message that the action waits for, or None.
    """

    awaited: Awaited | None = None


def error_text(error: Exception) -> str:
    """Return the text of an error, with its type if the text is unclear alone, such as a KeyError's key."""
    kind, text = type(error).__name__, str(error)
    if not text:
        return kind
    return f"{kind}: {text}" if isinstance(error, LookupError | AssertionError) else text


@dataclass(frozen=True, kw_only=True)
class ExecutorInputs:
    """Modules, weights and messages that a rank's program uses.

    Attributes:
        stages: this rank's stage modules by stage.
        weights: owner of their parameters and gradients, which gathers, reduces and updates them.
        loss: maps (output of the last stage, targets) to a scalar; None stores outputs instead.
        transfer: messages to the other pipeline ranks, or None without other ranks.
        boundaries: inputs of each stage of the model but the first, or None if shapes differ between
            microbatches.
        reduce_tied: called once, at this rank's last REDUCE_TIED.
        before_forward: called before each forward with the microbatch's slot in the ring
            (`SteadyState.ring`); within one step that is its index.
        versions: versions of each stage, if weights change within the step.
        graphs: the device replays each microbatch as one graph.
    """

    stages: Mapping[int, nn.Module]
    weights: StageWeights
    loss: Callable[[Any, Any], Tensor] | None = None
    transfer: Transfer | None = None
    boundaries: Mapping[int, Boundaries] | None = None
    reduce_tied: Call | None = None
    before_forward: Callable[[int], None] | None = None
    versions: Mapping[int, WeightVersions] = field(default_factory=dict[int, WeightVersions])
    graphs: bool = False


@dataclass(kw_only=True)
class _Segment:
    """The calls of a rank in one step, to its last action of the step; the lists are parallel.

    Attributes:
        calls: calls in order.
        labels: label of each call; empty if it is not recorded.
        waits: the wait for a message with which each call begins, if any.
        messages: the message that each call waits for, if any.
        marks: progress marks of each call and of its wait.
        microbatches: microbatch of each call; in a window that ends before it, the call is left out.
        newest: largest of these microbatches.
    """

    calls: list[Call] = field(default_factory=list[Call])
    labels: list[str] = field(default_factory=list[str])
    waits: list[Call | None] = field(default_factory=list["Call | None"])
    messages: list[Action | None] = field(default_factory=list["Action | None"])
    marks: list[tuple[Label, Label]] = field(default_factory=list[tuple[Label, Label]])
    microbatches: list[int] = field(default_factory=list[int])
    newest: int = 0

    def before(self, microbatch: int) -> _Segment:
        """Return the calls of earlier microbatches."""
        chosen = [at for at, mb in enumerate(self.microbatches) if mb < microbatch]
        return _Segment(
            calls=[self.calls[at] for at in chosen],
            labels=[self.labels[at] for at in chosen],
            waits=[self.waits[at] for at in chosen],
            messages=[self.messages[at] for at in chosen],
            marks=[self.marks[at] for at in chosen],
            microbatches=[self.microbatches[at] for at in chosen],
        )


class Executor:
    """A lowered program bound to one rank of the pipeline: its actions as flat lists of calls, one per step.

    Args:
        rounds: the program, and the steps of it that are repeated.

    Attributes:
        step: index of the next step in the window; 0 if the pipeline is drained.
        place: slot of the first microbatch of the last step.
    """

    def __init__(
        self, rounds: SteadyState, rank: int, work: ExecutorInputs, device: torch.device | str = "cpu"
    ) -> None:
        program, device = rounds.program, torch.device(device)
        assert program.lowered
        self.rounds = rounds
        self.program = program
        self.rank = rank
        self.work = work
        self.device = device
        self.live = RankBuffers(work.stages, rounds.ring)
        trains = any(a.kind in (ActionKind.B, ActionKind.I) for a in program.orders[rank])
        self._exchange = (
            TransferCalls(
                program=program,
                rank=rank,
                live=self.live,
                slots=rounds.slots(rank),
                transfer=work.transfer,
                boundaries=work.boundaries,
                device=device,
                trains=trains,
            )
            if work.transfer is not None
            else None
        )
        self._compute = ComputeCalls(
            program=program,
            rank=rank,
            live=self.live,
            exchange=self._exchange,
            loss=work.loss,
            before=work.before_forward,
            versions=dict(work.versions),
        )
        self._graph = (
            MicrobatchGraph(
                program=program,
                rank=rank,
                stages=work.stages,
                loss=work.loss,
                before=work.before_forward,
                device=device,
            )
            if work.graphs
            else None
        )
        self.step = self.place = 0
        self._entered = 0  # steps of the window whose batches have been fetched
        self._fetch: Enter | None = None
        self._segments = [_Segment()]
        self._bind()

    def run(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        scales: Sequence[Tensor | None] = (),
        recorder: Recorder | None = None,
    ) -> None:
        """Run a window of one step: forward and backward of all microbatches, with gradients summed into the
        buffers.

        Args:
            inputs: input of each microbatch, read by the first stage.
            targets: target of each microbatch, read by the loss.
            scales: gradient of each microbatch's loss.
            recorder: times every call; None disables timing.
        """
        self.advance(lambda _: (inputs, targets, scales), 1, recorder)

    def advance(self, enter: Enter, steps: int, recorder: Recorder | None = None) -> None:
        """Run to this rank's last action of the next step of a window, including the actions of later steps
        before it.

        Args:
            enter: returns the batch of a step; called once for each step of the window, in order, when this
                rank first needs it.
            steps: number of steps of the window. It may shrink while it runs, but not below the finished
                steps and `SteadyState.ahead` more.
            recorder: times every call; None disables timing.
        """
        rounds, m = self.rounds, self.rounds.microbatches
        assert steps == 1 or rounds.cycle, "the program is one step"
        at = rounds.bound(self.step)
        left = (
            steps - self.step + at
        ) * m  # the first microbatch beyond the window, as the program numbers it
        for versions in self.work.versions.values():
            versions.left = left
        segment = self._segments[at]
        if segment.newest >= left:
            segment = segment.before(left)
        self._fetch = enter
        if not rounds.cycle:
            self._enter()
        try:
            self._run(segment, recorder)
        except BaseException:
            self._reset_window()
            raise
        self.place = self.step * m % rounds.ring
        self.live.clear_batch(self.place, m)
        self.step += 1
        if self.step == steps:
            for works, _ in self.live.sends.values():  # no later message proves these to be done
                for work in works:
                    work.wait()
            self.live.sends.clear()
            self._reset_window()

    def _reset_window(self) -> None:
        """End the window: the next step starts with an empty pipeline."""
        self.step = self._entered = 0
        self._fetch = None
        self.live.clear_batch(0, self.rounds.ring)

    def _run(self, segment: _Segment, recorder: Recorder | None) -> None:
        at = 0
        try:
            if recorder is None:
                mark, marks = PROGRESS.mark, segment.marks
                for at, call in enumerate(segment.calls):
                    begins, awaits = marks[at]
                    if (wait := segment.waits[at]) is not None:
                        mark(awaits)
                        wait()
                    mark(begins)
                    call()
                return
            for at, call in enumerate(segment.calls):
                PROGRESS.mark(segment.marks[at][0])
                if segment.labels[at]:
                    recorder.record(segment.labels[at], call, segment.waits[at])
                else:
                    call()
        except Exception as error:
            description = f"pipeline rank {self.rank} at {segment.labels[at] or 'the batch'}"
            failed = PipelineError(f"{description}: {error_text(error)}")
            failed.awaited = self._awaited(segment.messages[at])
            raise failed from error

    def _enter(self) -> None:
        """Fetch the batch of the next step."""
        assert self._fetch is not None
        m = self.rounds.microbatches
        self.live.set_batch(self._entered * m % self.rounds.ring, m, self._fetch(self._entered))
        self._entered += 1

    # ------------------------------------------------------------------ binding

    def _bind(self) -> None:
        rounds, weights = self.rounds, self.work.weights
        m, ends = rounds.microbatches, rounds.ends(self.rank)
        order = self.program.orders[self.rank][: ends[-1]]
        buffers = weights.buffers
        releases = defaultdict[Action | None, list[Action]](list)
        for send, point in send_releases(self.program, self.rank).items():
            releases[point].append(send)
        last = (
            {}
            if self.program.versions
            else {a.stage: a for a in order if a.kind in (ActionKind.B, ActionKind.W)}
        )
        # a stage in two sets has the same action twice
        joined = max((at for at, a in enumerate(order) if a.kind is ActionKind.REDUCE_TIED), default=-1)
        updates = iter([a.microbatch for a in order if a.kind is ActionKind.UPDATE])
        opened = set[int]()
        coming = set[int]()
        reduced = list[int]()
        entered = 0
        for at, action in enumerate(order):
            if at == ends[len(self._segments) - 1]:
                self._segments.append(_Segment())
            if rounds.cycle and action.kind is ActionKind.F and microbatch_of(action) == entered * m:
                self._add(self._enter, "", entered * m)
                entered += 1
            if action.kind is ActionKind.UNSHARD:
                coming.add(action.stage)
            elif action.stage in coming and action.kind in USES:
                coming.remove(action.stage)
                if weights.gathers:
                    self._add(partial(weights.await_stage, action.stage), f"the weights of {action}")
            if action.kind in (ActionKind.B, ActionKind.I) and action.stage not in opened:
                if not opened and SHARED in buffers:
                    self._add(buffers[SHARED].open, "the gradients that stages share")
                opened.add(action.stage)
                for stage in reduced if buffers[action.stage].frees_after_reduce else ():
                    self._add(buffers[stage].wait, f"the sums of stage {stage}")
                self._add(buffers[action.stage].open, f"the gradients of {action}")
            for send in releases[action]:
                self._release(send)
            if last.get(action.stage) == action and self._graph is None:  # no hook runs within a graph
                self._add(buffers[action.stage].arm, f"the start of {action}")
            if action.kind is ActionKind.REDUCE_GRAD:
                reduced.append(action.stage)
            if action.kind is not ActionKind.REDUCE_TIED:
                # gradients are reduced for the update that follows, if there is one
                of = (
                    next(updates)
                    if action.kind is ActionKind.REDUCE_GRAD and rounds.cycle
                    else action.microbatch
                )
                if call := self._call(action):
                    message = needed_by(self.program, action)
                    self._add(call, self._label(action), of or 0, self._wait(message), message, does=action)
                # a stage without an input gradient runs its graph in W
                if action.kind in (ActionKind.B, ActionKind.I, ActionKind.W) and weights.gathers:
                    call = partial(weights.end_backward, action.stage)
                    self._add(call, f"the end of {self._label(action)}", of or 0)
            elif at == joined and self.work.reduce_tied is not None:
                self._add(self.work.reduce_tied, str(action), does=action)
        for send in releases[None]:
            if not rounds.cycle:
                self._release(send)

    def _call(self, action: Action) -> Call | None:
        """Return the call of one action, or None if it needs none."""
        compute = self._compute
        exchange = self._exchange
        work = self.work
        stage = action.stage
        graph = self._graph
        match action.kind:
            case ActionKind.F if graph is not None:  # the graph includes the forward
                return partial(work.weights.await_stage, stage) if work.weights.gathers else None
            case ActionKind.B if graph is not None:
                return partial(graph.run, self.live, self.live.place(action))
            case ActionKind.F:
                return compute.forward(action)
            case ActionKind.B | ActionKind.I:
                return compute.backward(action)
            case ActionKind.W:
                return compute.weights(action)
            case ActionKind.RECOMPUTE:
                return compute.recompute(action)
            case ActionKind.OFFLOAD:
                return compute.offload(action)
            case ActionKind.RELOAD:
                return compute.reload(action)
            case ActionKind.SEND_F | ActionKind.SEND_B:
                assert exchange is not None
                return exchange.send(action)
            case ActionKind.RECV_F | ActionKind.RECV_B:
                assert exchange is not None
                return exchange.receive(action)
            case ActionKind.REDUCE_GRAD:
                return partial(work.weights.reduce, stage)
            case ActionKind.UPDATE:
                return compute.update(action)
            case ActionKind.UNSHARD | ActionKind.RESHARD:
                if not work.weights.gathers:
                    return None
                call = work.weights.gather if action.kind is ActionKind.UNSHARD else work.weights.release
                return partial(call, stage)
            case ActionKind.REDUCE_TIED:
                raise AssertionError("bound together with the rank's other reductions of tied parameters")

    def _label(self, action: Action) -> str:
        """Return the text of an action with the index of its microbatch within the step."""
        if action.microbatch is None:
            return str(action)
        return str(action._replace(microbatch=action.microbatch % self.rounds.microbatches))

    def _wait(self, receive: Action | None) -> Call | None:
        return self._exchange.wait(receive) if receive and self._exchange is not None else None

    def _release(self, send: Action) -> None:
        assert self._exchange is not None
        name = f"{_WAIT_FOR}{self._label(send)}"
        self._add(self._exchange.release(send), name, microbatch_of(send), message=send)

    def _awaited(self, message: Action | None) -> Awaited | None:
        """Return the peer of a message, and its direction."""
        if message is None:
            return None
        source, target, _ = channel_of(self.program, message)
        return Awaited(target if source == self.rank else source, sends=source == self.rank)

    def _add(
        self,
        call: Call,
        name: str,
        microbatch: int = 0,
        wait: Call | None = None,
        message: Action | None = None,
        does: Action | None = None,
    ) -> None:
        segment, m = self._segments[-1], self.rounds.microbatches
        awaits = label("" if message is None else in_words(message, m))
        if (exchanged := self._awaited(message)) is not None:
            PROGRESS.messages[awaits] = exchanged
        if does is None and message is not None:
            begins = awaits
        else:
            begins = label((name or "the batch") if does is None else in_words(does, m))
        segment.calls.append(call)
        segment.labels.append(name)
        segment.marks.append((begins, awaits))
        segment.waits.append(wait)
        segment.messages.append(message)
        segment.microbatches.append(microbatch)
        segment.newest = max(segment.newest, microbatch)
