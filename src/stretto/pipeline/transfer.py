"""Point-to-point messages between pipeline ranks.

A channel is a pair of ranks and a direction (activations or gradients). Messages of one channel arrive in the
order sent; channels do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from stretto.parallel.mesh import make_group
from stretto.schedule.action import Kind
from stretto.schedule.program import Program

FORWARD, BACKWARD = 0, 1
Channel = tuple[int, int, int]  # source and destination pipeline rank, direction


def channels(program: Program) -> list[Channel]:
    """Every channel that the lowered program sends on, in one order on all ranks."""
    found = set[Channel]()
    for rank, order in enumerate(program.orders):
        for action in order:
            if action.kind is Kind.SEND_F:
                found.add((rank, program.placement[action.stage + 1], FORWARD))
            elif action.kind is Kind.SEND_B:
                found.add((rank, program.placement[action.stage - 1], BACKWARD))
    return sorted(found)


class Transfer:
    """Sends to and receives from the other ranks of one pipeline.

    Every channel has a communicator of its own. NCCL keeps the messages of one communicator in one order, so
    that channels would wait for one another; gloo's sender and receiver threads would contend for one lock
    (shared connections made the step of trivial stages 1.6 times as long).

    Args:
        pipelines: the global ranks of every pipeline of the job, in pipeline order. All ranks of the job make
            all groups, in one order: torch names a group by the number of groups made before it on the rank.
        program: lowered; its channels are set up here.
        timeout: longest wait for a message; None: torch's own.
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

    def send(self, tensor: Tensor, channel: Channel) -> Work:
        """Start sending; `tensor` must stay as it is until the work is done."""
        group, peer = self._ends[channel]
        return group.send([tensor], peer, 0)

    def receive(self, tensor: Tensor, channel: Channel) -> Work:
        """Start receiving into `tensor`."""
        group, peer = self._ends[channel]
        return group.recv([tensor], peer, 0)

    def close(self) -> None:
        """Give the communicators back."""
        for group, _ in self._ends.values():
            dist.destroy_process_group(group)
        self._ends.clear()
