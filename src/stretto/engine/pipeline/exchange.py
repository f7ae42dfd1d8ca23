"""Point-to-point messages of one rank: calls that post receives, deliver received tensors, and start sends.

A message has the tensors, one or several, that one stage passes to the next. Either their shapes are known
and buffers are preallocated, or shapes differ between microbatches (`boundaries` is None) and every message
begins with its shapes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from stretto.engine.device import carrier
from stretto.engine.parallel.mesh import make_group
from stretto.engine.pipeline.rank_buffers import Boundaries, Boundary, Bundle, Call, RankBuffers
from stretto.errors import StrettoError
from stretto.program.action import Action, ActionKind
from stretto.program.program import Program

FORWARD, BACKWARD = 0, 1
Channel = tuple[int, int, int]  # source and destination pipeline rank, direction


def channels(program: Program) -> list[Channel]:
    """Return every channel that the lowered program sends on, in the same order on all ranks."""
    used = set[Channel]()
    for rank, order in enumerate(program.orders):
        for action in order:
            if action.kind is ActionKind.SEND_F:
                used.add((rank, program.placement[action.stage + 1], FORWARD))
            elif action.kind is ActionKind.SEND_B:
                used.add((rank, program.placement[action.stage - 1], BACKWARD))
    return sorted(used)


class Transfer:
    """Sends to and receives from the other ranks of one pipeline.

    Every channel has its own communicator. NCCL runs the messages of one communicator in order, so channels
    that share one would wait for each other; gloo's sender and receiver threads would contend for one lock
    (shared connections made the step of trivial stages 1.6 times as long).

    Args:
        pipelines: the global ranks of every pipeline of the job, in pipeline order. All ranks of the job
            create all groups in one order: torch names a group by the number of groups created before it.
        program: the lowered program, whose channels are created.
        timeout: longest wait for a message; by default torch's.
    """

    def __init__(
        self, pipelines: Sequence[Sequence[int]], program: Program, timeout: timedelta | None = None
    ) -> None:
        me = dist.get_rank()
        self._ends: dict[Channel, tuple[ProcessGroup, int]] = {}
        for channel in channels(program):
            for ranks in pipelines:
                ends = sorted((ranks[channel[0]], ranks[channel[1]]))
                group = make_group(ends, timeout)
                if group is not None:
                    self._ends[channel] = (group, 1 - ends.index(me))
                    self._connect(group, channel, sends=me == ranks[channel[0]])

    def _connect(self, group: ProcessGroup, channel: Channel, sends: bool) -> None:
        """Pass a first message on a channel.

        NCCL and its relatives create the communicator of a channel in its first message, and both ends wait
        there for each other. In a step they would deadlock: a receive posted ahead on one channel would wait
        for a sender that waits in its own first message, on another channel. Here all ranks take the channels
        in one order. Gloo's groups connect when they are created.
        """
        if dist.get_backend(group) != "gloo":
            first = torch.zeros(1, device=carrier(group))
            (self.send if sends else self.receive)(first, channel).wait()

    def send(self, tensor: Tensor, channel: Channel) -> Work:
        """Start sending; `tensor` must not change until the work is done."""
        group, peer = self._ends[channel]
        return group.send([tensor], peer, 0)

    def receive(self, tensor: Tensor, channel: Channel) -> Work:
        """Start receiving into `tensor`."""
        group, peer = self._ends[channel]
        return group.recv([tensor], peer, 0)

    def close(self) -> None:
        """Destroy the communicators."""
        for group, _ in self._ends.values():
            dist.destroy_process_group(group)
        self._ends.clear()


DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)
MOST_DIMENSIONS = 8
MOST_TENSORS = 16  # per message
_ROW = MOST_DIMENSIONS + 2
HEADER = MOST_TENSORS * _ROW


def pack(boundaries: Boundaries, device: torch.device) -> Tensor:
    """Encode shapes and dtypes as one int64 tensor [HEADER].

    Raises:
        StrettoError: a message has too many tensors or dimensions, or an unsupported type.
    """
    rows: list[int] = []
    for boundary in boundaries:
        if boundary.dtype not in DTYPES or len(boundary.shape) > MOST_DIMENSIONS:
            raise StrettoError(
                f"a {boundary.dtype} tensor of shape {boundary.shape} cannot be sent to the next stage",
                hint=f"at most {MOST_DIMENSIONS} dimensions, types {', '.join(map(str, DTYPES))}",
            )
        row = [1 + DTYPES.index(boundary.dtype), len(boundary.shape), *boundary.shape]
        rows += row + [0] * (_ROW - len(row))
    if len(boundaries) > MOST_TENSORS:
        raise StrettoError(
            f"a stage returns {len(boundaries)} tensors", hint=f"at most {MOST_TENSORS}, skips included"
        )
    return torch.tensor(rows + [0] * (HEADER - len(rows)), dtype=torch.int64, device=device)


def unpack(header: Tensor) -> Boundaries:
    """Decode the header of `pack`."""
    boundaries: list[Boundary] = []
    for code, dims, *shape in header.view(MOST_TENSORS, _ROW).tolist():
        if code:
            boundaries.append(Boundary(tuple(shape[:dims]), DTYPES[code - 1]))
    return tuple(boundaries)


def boundaries_of(tensors: Bundle) -> Boundaries:
    """Return the shapes and types of tensors."""
    return tuple(Boundary(tuple(t.shape), t.dtype) for t in tensors)


class Inbox:
    """The incoming messages of one channel if shapes vary: for every message its shapes, then its tensors.

    Messages arrive in the order sent, so the receive of the next header is posted right after those of the
    current message's tensors, and no earlier; opening a later message first receives those before it.
    """

    def __init__(self, transfer: Transfer, channel: Channel, device: torch.device) -> None:
        self._transfer = transfer
        self._channel = channel
        self._device = device
        self._expected = deque[Action]()
        self._header: tuple[Work, Tensor] | None = None  # of the first expected message
        self._coming = dict[Action, tuple[list[Work], Bundle]]()

    def expect(self, action: Action) -> None:
        """Register the next message that the program receives."""
        self._expected.append(action)
        self._post_header()

    def open(self, action: Action) -> None:
        """Wait for a message."""
        while action not in self._coming:
            assert self._header is not None, "a message that was not expected"
            work, header = self._header
            work.wait()
            tensors = tuple(torch.empty(b.shape, dtype=b.dtype, device=self._device) for b in unpack(header))
            works = [self._transfer.receive(t, self._channel) for t in tensors]
            self._coming[self._expected.popleft()] = works, tensors
            self._header = None
            self._post_header()
        works, tensors = self._coming[action]
        for work in works:
            work.wait()
        self._coming[action] = [], tensors

    def take(self, action: Action) -> Bundle:
        """Return the tensors of a message and remove it."""
        self.open(action)
        return self._coming.pop(action)[1]

    def _post_header(self) -> None:
        """Post the receive of the next message's shapes, unless it is already posted."""
        if self._expected and self._header is None:
            header = torch.empty(HEADER, dtype=torch.int64, device=self._device)
            self._header = self._transfer.receive(header, self._channel), header


class TransferCalls:
    """Creates the calls of one rank's transfers.

    Args:
        slots: index of each receive's buffer, among those of its stage and direction.
        boundaries: inputs of each stage of the model but the first, by its index in one copy, or None if
            shapes differ between microbatches.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        live: RankBuffers,
        slots: Mapping[Action, int],
        transfer: Transfer,
        boundaries: Mapping[int, Boundaries] | None,
        device: torch.device,
        trains: bool,
    ) -> None:
        self.program = program
        self.rank = rank
        self.live = live
        self.device = device
        self.transfer = transfer
        self.boundaries = boundaries
        self.trains = trains
        self.slots = slots
        self.memory = dict[tuple[int, ActionKind, int], Bundle]()
        self._inboxes = dict[Channel, Inbox]()

    # ------------------------------------------------------------------ receiving

    def receive(self, action: Action) -> Call:
        """Bind the posting of a receive; the action that uses the message waits for it."""
        post = self.transfer.receive
        channel, key = self._channel(action), self.live.key(action)
        receives = self.live.receives
        if self.boundaries is None:
            return lambda: self._inbox(channel).expect(key)
        raw = [buffer.detach() for buffer in self._buffers(action)]
        if len(raw) == 1:
            (only,) = raw

            def single() -> None:
                receives[key] = (post(only, channel),)

            return single

        def several() -> None:
            receives[key] = [post(tensor, channel) for tensor in raw]

        return several

    def incoming(self, action: Action) -> Callable[[], Bundle]:
        """Return a function that waits for the message of a receive and returns its tensors."""
        receives, key = self.live.receives, self.live.key(action)
        channel = self._channel(action)
        if self.boundaries is None:
            leaf = self.trains and action.kind is ActionKind.RECV_F

            def varying() -> Bundle:
                tensors = self._inbox(channel).take(key)
                return tuple(t.requires_grad_(leaf and t.is_floating_point()) for t in tensors)

            return varying
        buffers = self._buffers(action)

        def fixed() -> Bundle:
            for work in receives.pop(key):
                work.wait()
            return buffers

        return fixed

    def wait(self, action: Action) -> Call:
        """Bind the wait for a message without consuming it, so that a recorder can time the wait
        separately.
        """
        receives, key = self.live.receives, self.live.key(action)
        channel = self._channel(action)
        if self.boundaries is None:
            return lambda: self._inbox(channel).open(key)

        def call() -> None:
            for work in receives[key]:
                work.wait()
            receives[key] = ()

        return call

    def _inbox(self, channel: Channel) -> Inbox:
        if channel not in self._inboxes:
            self._inboxes[channel] = Inbox(self.transfer, channel, self.device)
        return self._inboxes[channel]

    def _buffers(self, action: Action) -> Bundle:
        """Return the buffers of one receive; activations are leaves, whose gradients accumulate in
        `.grad`.
        """
        key = (action.stage, action.kind, self.slots[action])
        if key not in self.memory:
            forward = action.kind is ActionKind.RECV_F
            leaf = forward and self.trains
            tensors = list[Tensor]()
            for b in self._expected(action.stage if forward else action.stage + 1):
                if forward or b.has_gradient:
                    buffer = torch.empty(b.shape, dtype=b.dtype, device=self.device)
                    tensors.append(buffer.requires_grad_(leaf and b.has_gradient))
            self.memory[key] = tuple(tensors)
        return self.memory[key]

    def _expected(self, stage: int) -> Boundaries:
        assert self.boundaries is not None
        return self.boundaries[stage % self.program.depth]

    def _channel(self, transfer: Action) -> Channel:
        placement, (stage, kind, _) = self.program.placement, transfer
        if kind is ActionKind.SEND_F:
            return self.rank, placement[stage + 1], FORWARD
        if kind is ActionKind.SEND_B:
            return self.rank, placement[stage - 1], BACKWARD
        if kind is ActionKind.RECV_F:
            return placement[stage - 1], self.rank, FORWARD
        return placement[stage + 1], self.rank, BACKWARD

    # ------------------------------------------------------------------ sending

    def send(self, action: Action) -> Call:
        """Bind the start of a send of activations forward or input gradients backward."""
        stage = action.stage
        mb, key = self.live.place(action), self.live.key(action)
        forward = action.kind is ActionKind.SEND_F
        buffers = self.live.stages[stage]
        start = self.transfer.send
        sends = self.live.sends
        channel = self._channel(action)
        outgoing = buffers.y if forward else buffers.dx
        if self.boundaries is None:
            device = self.device

            def varying() -> None:
                tensors, outgoing[mb] = [t.contiguous() for t in outgoing[mb]], None
                tensors.insert(0, pack(boundaries_of(tuple(tensors)), device))
                sends[key] = ([start(t, channel) for t in tensors], tensors)

            return varying
        expected = self._expected(stage + 1 if forward else stage)
        expected = tuple(b for b in expected if forward or b.has_gradient)
        if len(expected) == 1:
            shape, dtype = torch.Size(expected[0].shape), expected[0].dtype

            def single() -> None:
                tensors, outgoing[mb] = outgoing[mb], None
                tensor = tensors[0].contiguous()
                # the receiver has no header to check: another shape would be read as the expected one
                if tensor.shape != shape or tensor.dtype != dtype or len(tensors) != 1:
                    raise _unexpected(stage, tensors, expected)
                sends[key] = ([start(tensor, channel)], tensor)

            return single

        def several() -> None:
            tensors, outgoing[mb] = tuple(t.contiguous() for t in outgoing[mb]), None
            if boundaries_of(tensors) != expected:
                raise _unexpected(stage, tensors, expected)
            sends[key] = ([start(t, channel) for t in tensors], tensors)

        return several

    def release(self, send: Action) -> Call:
        """Bind the wait for a send that the program proves to be done, which frees its tensors."""
        sends, key = self.live.sends, self.live.key(send)

        def call() -> None:
            for work in sends.pop(key)[0]:
                work.wait()

        return call


def _unexpected(stage: int, tensors: Bundle, expected: Boundaries) -> StrettoError:
    def describe(boundaries: Boundaries) -> str:
        return " and ".join(f"{list(b.shape)} {b.dtype}" for b in boundaries)

    return StrettoError(
        f"stage {stage} sends {describe(boundaries_of(tensors))}, its neighbour expects {describe(expected)}",
        hint="all microbatches have one shape, in evaluation too; for others give the pipeline varying=True",
    )
