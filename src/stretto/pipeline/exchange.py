"""Messages of one rank: calls that post receives, hand out what has come, and start sends.

A message is what one stage hands to the next: one or several tensors. Their shapes are known beforehand, and
buffers are preallocated; or they may differ from microbatch to microbatch (`boundaries` None), and every
message begins with its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stretto.errors import StrettoError
from stretto.pipeline.inbox import Inbox, boundaries_of, pack
from stretto.pipeline.live import Boundaries, Bundle, Call, Live, assign_slots, microbatch_of
from stretto.pipeline.transfer import BACKWARD, FORWARD, Channel, Transfer
from stretto.schedule.action import Action, Kind
from stretto.schedule.program import Program


class Exchange:
    """Makes the calls of one rank's transfers.

    Args:
        boundaries: what enters each stage of the model but the first, by its number in one copy; None where
            shapes differ between microbatches.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        live: Live,
        transfer: Transfer,
        boundaries: Mapping[int, Boundaries] | None,
        device: torch.device,
        trains: bool,
    ) -> None:
        self.program, self.rank, self.live, self.device = program, rank, live, device
        self.transfer, self.boundaries, self.trains = transfer, boundaries, trains
        self.slots = assign_slots(program.orders[rank])
        self.memory = dict[tuple[int, Kind, int], Bundle]()
        self._inboxes = dict[Channel, Inbox]()

    # ------------------------------------------------------------------ receiving

    def receive(self, action: Action) -> Call:
        """Post the receive; who uses the message waits for it."""
        post, channel, receives = self.transfer.receive, self._channel(action), self.live.receives
        if self.boundaries is None:
            return lambda: self._inbox(channel).expect(action)
        raw = [buffer.detach() for buffer in self._buffers(action)]
        if len(raw) == 1:
            (only,) = raw

            def single() -> None:
                receives[action] = (post(only, channel),)

            return single

        def several() -> None:
            receives[action] = [post(tensor, channel) for tensor in raw]

        return several

    def incoming(self, action: Action) -> Callable[[], Bundle]:
        """Wait for the message of a receive and hand it out."""
        receives, channel = self.live.receives, self._channel(action)
        if self.boundaries is None:
            leaf = self.trains and action.kind is Kind.RECV_F

            def varying() -> Bundle:
                tensors = self._inbox(channel).take(action)
                return tuple(t.requires_grad_(leaf and t.is_floating_point()) for t in tensors)

            return varying
        buffers = self._buffers(action)

        def fixed() -> Bundle:
            for work in receives.pop(action):
                work.wait()
            return buffers

        return fixed

    def wait(self, action: Action) -> Call:
        """Wait for a message and leave it where its user finds it."""
        receives, channel = self.live.receives, self._channel(action)
        if self.boundaries is None:
            return lambda: self._inbox(channel).open(action)

        def call() -> None:
            for work in receives[action]:
                work.wait()
            receives[action] = ()

        return call

    def _inbox(self, channel: Channel) -> Inbox:
        if channel not in self._inboxes:
            self._inboxes[channel] = Inbox(self.transfer, channel, self.device)
        return self._inboxes[channel]

    def _buffers(self, action: Action) -> Bundle:
        """The buffers of one receive; activations are leaves, so that their gradients gather in them."""
        key = (action.stage, action.kind, self.slots[action])
        if key not in self.memory:
            forward = action.kind is Kind.RECV_F
            leaf = forward and self.trains
            made = list[Tensor]()
            for b in self._expected(action.stage if forward else action.stage + 1):
                if forward or b.has_gradient:
                    buffer = torch.empty(b.shape, dtype=b.dtype, device=self.device)
                    made.append(buffer.requires_grad_(leaf and b.has_gradient))
            self.memory[key] = tuple(made)
        return self.memory[key]

    def _expected(self, stage: int) -> Boundaries:
        assert self.boundaries is not None
        return self.boundaries[stage % self.program.depth]

    def _channel(self, transfer: Action) -> Channel:
        placement, (stage, kind, _) = self.program.placement, transfer
        if kind is Kind.SEND_F:
            return self.rank, placement[stage + 1], FORWARD
        if kind is Kind.SEND_B:
            return self.rank, placement[stage - 1], BACKWARD
        if kind is Kind.RECV_F:
            return placement[stage - 1], self.rank, FORWARD
        return placement[stage + 1], self.rank, BACKWARD

    # ------------------------------------------------------------------ sending

    def send(self, action: Action) -> Call:
        """Start sending activations on, or input gradients back."""
        stage, mb, forward = action.stage, microbatch_of(action), action.kind is Kind.SEND_F
        here, start, sends, channel = (
            self.live.stages[stage],
            self.transfer.send,
            self.live.sends,
            self._channel(action),
        )
        outgoing = here.y if forward else here.dx
        if self.boundaries is None:
            device = self.device

            def varying() -> None:
                tensors, outgoing[mb] = [t.contiguous() for t in outgoing[mb]], None
                tensors.insert(0, pack(boundaries_of(tuple(tensors)), device))
                sends[action] = ([start(t, channel) for t in tensors], tensors)

            return varying
        expected = self._expected(stage + 1 if forward else stage)
        expected = tuple(b for b in expected if forward or b.has_gradient)
        if len(expected) == 1:
            shape, dtype = torch.Size(expected[0].shape), expected[0].dtype

            def single() -> None:
                tensors, outgoing[mb] = outgoing[mb], None
                tensor = tensors[0].contiguous()
                # the receiver would take anything else for what it expects
                if tensor.shape != shape or tensor.dtype != dtype or len(tensors) != 1:
                    raise _unexpected(stage, tensors, expected)
                sends[action] = ([start(tensor, channel)], tensor)

            return single

        def several() -> None:
            tensors, outgoing[mb] = tuple(t.contiguous() for t in outgoing[mb]), None
            if boundaries_of(tensors) != expected:
                raise _unexpected(stage, tensors, expected)
            sends[action] = ([start(t, channel) for t in tensors], tensors)

        return several

    def release(self, send: Action) -> Call:
        """Wait for a send that is certainly done, and free its tensors."""
        sends = self.live.sends

        def call() -> None:
            for work in sends.pop(send)[0]:
                work.wait()

        return call


def _unexpected(stage: int, tensors: Bundle, expected: Boundaries) -> StrettoError:
    def told(boundaries: Boundaries) -> str:
        return " and ".join(f"{list(b.shape)} {b.dtype}" for b in boundaries)

    return StrettoError(
        f"stage {stage} sends {told(boundaries_of(tensors))}, its neighbour expects {told(expected)}",
        hint="all microbatches have one shape, in evaluation too; for others give the pipeline varying=True",
    )
