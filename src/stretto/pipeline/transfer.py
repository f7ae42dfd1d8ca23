"""Point-to-point messages between pipeline ranks.

A channel is a pair of ranks and a direction (activations or gradients). Messages of one channel arrive in the order sent;
channels do not wait for one another: gloo keeps them apart by tag, NCCL by a communicator each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

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

    Args:
        pipelines: the global ranks of every pipeline of the job, in pipeline order; collective over all of them.
        program: lowered; its channels are set up here.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], program: Program) -> None:
        me = dist.get_rank()
        world = dist.group.WORLD
        assert world is not None
        self._own: list[ProcessGroup] = []
        self._ends: dict[Channel, tuple[ProcessGroup, int, int]] = {}
        by_tag = dist.get_backend() == "gloo"
        for channel in channels(program):
            source, destination, direction = channel
            for ranks in pipelines:
                ends = [ranks[source], ranks[destination]]
                made = world if by_tag else dist.new_group(ends)
                if me not in ends:
                    continue
                assert isinstance(made, ProcessGroup)
                if not by_tag:
                    self._own.append(made)
                peer = ends[1] if me == ends[0] else ends[0]
                self._ends[channel] = (made, peer if by_tag else dist.get_group_rank(made, peer), direction)

    def send(self, tensor: Tensor, channel: Channel) -> Work:
        """Start sending; `tensor` must stay as it is until the work is done."""
        group, peer, tag = self._ends[channel]
        return cast(Work, group.send([tensor], peer, tag))

    def receive(self, tensor: Tensor, channel: Channel) -> Work:
        """Start receiving into `tensor`."""
        group, peer, tag = self._ends[channel]
        return cast(Work, group.recv([tensor], peer, tag))

    def close(self) -> None:
        """Give back what was made here."""
        for group in self._own:
            dist.destroy_process_group(group)
        self._own.clear()
