"""Bind one action to this rank's stages and buffers: a call without arguments that looks nothing up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from stretto.errors import StrettoError
from stretto.parallel.gradients import GradientBuffer
from stretto.pipeline.live import Boundary, Call, Deferred, Live, assign_slots
from stretto.pipeline.transfer import BACKWARD, FORWARD, Transfer
from stretto.schedule.action import Action, Kind
from stretto.schedule.program import Program

# The engine itself: torch.autograd.backward adds 10 us of checks to every call.
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward  # pyright: ignore


class Binder:
    """Makes the calls of one rank.

    Args:
        boundaries: activation entering each stage that another rank feeds or whose gradient another rank
            sends: `boundaries[s]` is what stage s receives, and what stage s-1 gets back.
        loss: (output of the last stage, targets) to a scalar; None keeps the outputs instead.
        before_forward: called with the microbatch's number before each forward.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        live: Live,
        transfer: Transfer | None,
        boundaries: Mapping[int, Boundary],
        loss: Callable[[Tensor, Any], Tensor] | None,
        buffers: Mapping[int, GradientBuffer],
        before_forward: Callable[[int], None] | None,
        device: torch.device,
    ) -> None:
        self.program, self.rank, self.live = program, rank, live
        self.transfer, self.boundaries = transfer, boundaries
        self.loss, self.buffers, self.before = loss, buffers, before_forward
        self.device = device
        self.slots = assign_slots(program.orders[rank])
        self.memory = dict[tuple[int, Kind, int], Tensor]()
        self.trains = any(a.kind in (Kind.B, Kind.I) for a in program.orders[rank])
        self.split = {a.stage for a in program.orders[rank] if a.kind is Kind.W}
        queue: Deferred = []  # one for all: stages of this rank may share a layer, and each I empties it
        for stage in self.split:
            live.stages[stage].split_backward(queue)
        self.make: dict[Kind, Callable[[Action], Call]] = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.backward,
            Kind.W: self.weights,
            Kind.SEND_F: self.send,
            Kind.SEND_B: self.send,
            Kind.RECV_F: self.receive,
            Kind.RECV_B: self.receive,
            Kind.REDUCE_GRAD: self.reduce,
        }

    def __call__(self, action: Action) -> Call:
        return self.make[action.kind](action)

    # ------------------------------------------------------------------ compute

    def forward(self, action: Action) -> Call:
        """x = input; y = stage(x); keep where backward starts."""
        stage, mb = action.stage, _microbatch(action)
        here, fetch, before = self.live.stages[stage], self._input(action), self.before
        module, xs = here.module, here.x
        finish = self._last(stage, mb) if stage == self.program.stages - 1 else self._middle(stage, mb)

        def call() -> None:
            x = fetch()
            xs[mb] = x
            finish(module(x))

        def keyed() -> None:
            assert before is not None
            before(mb)
            call()

        return call if before is None else keyed

    def _input(self, action: Action) -> Callable[[], Any]:
        stage, mb = action.stage, _microbatch(action)
        live, receive = self.live, Action(stage, Kind.RECV_F, mb)
        if stage == 0:
            return lambda: live.inputs[mb]
        if receive not in self.slots:  # the previous stage is on this rank
            outputs, trains = live.stages[stage - 1].y, self.trains

            def local() -> Any:
                y, outputs[mb] = outputs[mb], None
                return y.requires_grad_(trains)

            return local
        buffer, receives = self._buffer(receive), live.receives

        def remote() -> Any:
            receives.pop(receive).wait()
            return buffer

        return remote

    def _middle(self, stage: int, mb: int) -> Callable[[Tensor], None]:
        here, trains = self.live.stages[stage], self.trains
        ys, roots = here.y, here.root

        def train(y: Tensor) -> None:
            if y.requires_grad:  # not where the first stage is frozen
                roots[mb] = get_gradient_edge(y)  # keeps the graph, not the output
            ys[mb] = y.detach()

        def infer(y: Tensor) -> None:
            x, here.x[mb] = here.x[mb], None
            ys[mb] = y.clone() if _same_memory(x, y) else y  # the buffer of x is about to be reused

        return train if trains else infer

    def _last(self, stage: int, mb: int) -> Callable[[Tensor], None]:
        live, loss = self.live, self.loss
        here, trains, losses, outputs = live.stages[stage], self.trains, live.losses, live.outputs

        def keep(y: Tensor) -> None:
            x, here.x[mb] = here.x[mb], None
            outputs[mb] = y.clone() if _same_memory(x, y) else y

        def close(y: Tensor) -> None:
            assert loss is not None
            value = loss(y, live.targets[mb])
            if trains:
                here.root[mb] = value
            else:
                here.x[mb] = None
            losses[mb] = value.detach()

        return keep if loss is None else close

    def backward(self, action: Action) -> Call:
        """Run the graph of one microbatch back to the stage's input; a B on a split stage does its W at
        once.
        """
        stage, mb = action.stage, _microbatch(action)
        here, fetch = self.live.stages[stage], self._gradient(action)
        roots, xs, dxs, queue, deferred = here.root, here.x, here.dx, here.queue, here.deferred
        passes_on, splits, whole = stage > 0, stage in self.split, action.kind is Kind.B
        received = Action(stage, Kind.RECV_B, mb) in self.slots

        def call() -> None:
            root, roots[mb] = roots[mb], None
            dy = fetch()
            if root is not None:
                _run_backward((root,), (dy,), False, False, (), True, True)
            x, xs[mb] = xs[mb], None
            if passes_on:
                dx, x.grad = x.grad, None
                # a stage that only reshapes hands dy on, in the buffer that the next message comes to
                dxs[mb] = dx.clone() if received and _same_memory(dx, dy) else dx

        if not splits:
            return call
        weights = self.weights(Action(stage, Kind.W, mb))

        def split() -> None:
            call()
            deferred[mb] = list(queue)
            queue.clear()
            if whole:
                weights()

        return split

    def _gradient(self, action: Action) -> Callable[[], Any]:
        stage, mb = action.stage, _microbatch(action)
        live, receive = self.live, Action(stage, Kind.RECV_B, mb)
        if stage == self.program.stages - 1:
            return lambda: live.scale
        if receive not in self.slots:
            gradients = live.stages[stage + 1].dx

            def local() -> Any:
                dy, gradients[mb] = gradients[mb], None
                return dy

            return local
        buffer, receives = self._buffer(receive), live.receives

        def remote() -> Any:
            receives.pop(receive).wait()
            return buffer

        return remote

    def weights(self, action: Action) -> Call:
        """The weight gradients that I left undone."""
        deferred, mb = self.live.stages[action.stage].deferred, _microbatch(action)

        def call() -> None:
            entries, deferred[mb] = deferred[mb], []
            with torch.no_grad():  # which the engine sees to in B
                for layer, x, dy in entries:
                    layer.add_weight_gradient(x, dy)

        return call

    # ------------------------------------------------------------------ communication

    def receive(self, action: Action) -> Call:
        """Post the receive; who uses the message waits for it."""
        assert self.transfer is not None
        placement, stage = self.program.placement, action.stage
        forward = action.kind is Kind.RECV_F
        source = placement[stage - 1 if forward else stage + 1]
        channel = (source, self.rank, FORWARD if forward else BACKWARD)
        post, raw, receives = self.transfer.receive, self._buffer(action).detach(), self.live.receives

        def call() -> None:
            receives[action] = post(raw, channel)

        return call

    def send(self, action: Action) -> Call:
        """Start sending an activation on, or an input gradient back."""
        assert self.transfer is not None
        placement, stage, mb = self.program.placement, action.stage, _microbatch(action)
        forward = action.kind is Kind.SEND_F
        target = placement[stage + 1 if forward else stage - 1]
        channel = (self.rank, target, FORWARD if forward else BACKWARD)
        here, start, sends = self.live.stages[stage], self.transfer.send, self.live.sends
        outgoing = here.y if forward else here.dx
        expected = self.boundaries[stage + 1 if forward else stage]
        shape, dtype = torch.Size(expected.shape), expected.dtype

        def call() -> None:
            tensor, outgoing[mb] = outgoing[mb].contiguous(), None
            # the receiver would take anything else for what it expects
            if tensor.shape != shape or tensor.dtype != dtype:
                told = f"stage {stage} sends {list(tensor.shape)} {tensor.dtype}"
                raise StrettoError(
                    f"{told}, its neighbour expects {list(shape)} {dtype}",
                    hint="all microbatches have one shape, in evaluation too",
                )
            sends[action] = (start(tensor, channel), tensor)

        return call

    def release(self, send: Action) -> Call:
        """Wait for a send that is certainly done, and free its tensor."""
        sends = self.live.sends

        def call() -> None:
            sends.pop(send)[0].wait()

        return call

    def reduce(self, action: Action) -> Call:
        """All gradients of the stage are in: reduce those not under way yet."""
        buffer = self.buffers.get(action.stage)
        return buffer.flush if buffer is not None else _nothing

    def _buffer(self, receive: Action) -> Tensor:
        """The buffer of one receive; activations are leaves, so that their gradient gathers in them."""
        key = (receive.stage, receive.kind, self.slots[receive])
        if key not in self.memory:
            forward = receive.kind is Kind.RECV_F
            boundary = self.boundaries[receive.stage if forward else receive.stage + 1]
            made = torch.empty(boundary.shape, dtype=boundary.dtype, device=self.device)
            self.memory[key] = made.requires_grad_(forward and self.trains)
        return self.memory[key]


def _nothing() -> None:
    pass


def _same_memory(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
