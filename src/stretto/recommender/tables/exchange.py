"""All-to-alls between the ranks of a job, started and completed separately so that work can overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, ProcessGroup, Work


@dataclass
class Arriving:
    """A message on its way.

    Attributes:
        tensor: [sum of `sizes`], whole after `wait`.
        sizes: elements from each rank.
        sent: kept until all is done.
    """

    tensor: Tensor
    sizes: list[int]
    work: Work | None = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """All of it, one rank's part after another's."""
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
        return self.tensor

    def split(self) -> list[Tensor]:
        """The part of each rank."""
        return list(self.wait().split(self.sizes))


def exchange(group: ProcessGroup | None, send: Tensor, to: Sequence[int], sizes: Sequence[int]) -> Arriving:
    """Begin an all-to-all.

    Args:
        group: None where this rank is alone.
        send: flat, the part of each rank after that of the one before.
        to: elements for each rank.
        sizes: elements from each.
    """
    if group is None:
        return Arriving(send, list(sizes))
    receive = torch.empty(sum(sizes), dtype=send.dtype, device=send.device)
    work = group.alltoall_base(receive, send, list(sizes), list(to), AllToAllOptions())
    return Arriving(receive, list(sizes), work, send)


def joined(pieces: Sequence[Tensor], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Flat tensors after one another in one type; of none, an empty one on `device`."""
    if not pieces:
        return torch.empty(0, dtype=dtype, device=device)
    return pieces[0].to(dtype) if len(pieces) == 1 else torch.cat([piece.to(dtype) for piece in pieces])
