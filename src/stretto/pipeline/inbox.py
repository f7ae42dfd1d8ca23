"""Messages that begin with their shapes, for microbatches that differ."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from torch.distributed import Work

from stretto.errors import StrettoError
from stretto.pipeline.live import Boundaries, Boundary, Bundle
from stretto.pipeline.transfer import Channel, Transfer
from stretto.schedule.action import Action

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
MOST_TENSORS = 16  # of one message
_ROW = MOST_DIMENSIONS + 2
HEADER = MOST_TENSORS * _ROW


def pack(boundaries: Boundaries, device: torch.device) -> Tensor:
    """Shapes and types as one tensor of fixed size, for the wire.

    Raises:
        StrettoError: too many tensors or dimensions, or a type that no message carries.
    """
    rows: list[int] = []
    for boundary in boundaries:
        if boundary.dtype not in DTYPES or len(boundary.shape) > MOST_DIMENSIONS:
            raise StrettoError(
                f"a {boundary.dtype} tensor of shape {boundary.shape} cannot be handed to the next stage",
                hint=f"at most {MOST_DIMENSIONS} dimensions, types {', '.join(map(str, DTYPES))}",
            )
        row = [1 + DTYPES.index(boundary.dtype), len(boundary.shape), *boundary.shape]
        rows += row + [0] * (_ROW - len(row))
    if len(boundaries) > MOST_TENSORS:
        raise StrettoError(
            f"a stage hands on {len(boundaries)} tensors", hint=f"at most {MOST_TENSORS}, skips included"
        )
    return torch.tensor(rows + [0] * (HEADER - len(rows)), dtype=torch.int64, device=device)


def unpack(header: Tensor) -> Boundaries:
    """What `pack` packed."""
    found: list[Boundary] = []
    for code, dims, *shape in header.view(MOST_TENSORS, _ROW).tolist():
        if code:
            found.append(Boundary(tuple(shape[:dims]), DTYPES[code - 1]))
    return tuple(found)


def boundaries_of(tensors: Bundle) -> Boundaries:
    """Their shapes and types."""
    return tuple(Boundary(tuple(t.shape), t.dtype) for t in tensors)


class Inbox:
    """What comes in on one channel: for every message its shapes, then its tensors.

    All of it arrives in the order sent, so the shapes of the next message are asked for as soon as the
    tensors of the last are, and no earlier; who wants a later message takes in those before it first.
    """

    def __init__(self, transfer: Transfer, channel: Channel, device: torch.device) -> None:
        self._transfer, self._channel, self._device = transfer, channel, device
        self._expected = deque[Action]()
        self._header: tuple[Work, Tensor] | None = None  # of the first message expected
        self._coming = dict[Action, tuple[list[Work], Bundle]]()

    def expect(self, action: Action) -> None:
        """The program receives this message next."""
        self._expected.append(action)
        self._ask()

    def open(self, action: Action) -> None:
        """Wait for a message."""
        while action not in self._coming:
            assert self._header is not None, "a message that nobody expects"
            work, header = self._header
            work.wait()
            tensors = tuple(torch.empty(b.shape, dtype=b.dtype, device=self._device) for b in unpack(header))
            works = [self._transfer.receive(t, self._channel) for t in tensors]
            self._coming[self._expected.popleft()] = works, tensors
            self._header = None
            self._ask()
        works, tensors = self._coming[action]
        for work in works:
            work.wait()
        self._coming[action] = [], tensors

    def take(self, action: Action) -> Bundle:
        """The tensors of a message."""
        self.open(action)
        return self._coming.pop(action)[1]

    def _ask(self) -> None:
        if self._expected and self._header is None:
            header = torch.empty(HEADER, dtype=torch.int64, device=self._device)
            self._header = self._transfer.receive(header, self._channel), header
