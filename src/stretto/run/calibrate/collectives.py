"""Collectives and messages among local ranks, as training calls them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import on_accelerator, synchronize
from stretto.engine.parallel.collectives import all_sum, start_gather, start_scatter_sum
from stretto.engine.parallel.mesh import make_group

Row = list[float]  # ranks, local ranks, bytes, seconds

_HOST_SIZES, _SIZES = (2**12, 2**17, 2**20, 2**23), (2**14, 2**18, 2**22, 2**26, 2**29)  # bytes
_ROUNDS = 5
_ENOUGH = 40


@dataclass(frozen=True)
class _RoundTimes:
    """Seconds of one call: wall time of the slowest rank, mean CPU time of the ranks, idle core time."""

    wall: float
    cpu: float
    idle: float


def idle_seconds() -> float:
    """Idle time of all cores since the machine started, as Linux counts it. Elsewhere, the time of a machine
    that is always idle, so that a collective's time is its wall time.
    """
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return time.perf_counter() * (os.cpu_count() or 1)
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


@dataclass
class CollectiveTimer:
    """Times collectives of one group while the other groups do the same.

    Where ranks share cores, it records the time of a rank with a core to itself, since the planner models the
    sharing. That is at least the CPU time that the rank spends, and otherwise the wall time less the time in
    which it waited for a core.

    Attributes:
        cores: of the machine, where ranks compute on them; None where each rank has a device.
        budget: seconds for one size of one collective, exceeded several times where other processes compute.
    """

    device: torch.device
    cores: int | None
    budget: float

    def row(self, call: Callable[[], object], ranks: int, size: int) -> Row:
        """A measured row. Collective over all ranks of the job."""
        return [ranks, ranks, size, self.seconds(call)]

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call; the same number on all ranks."""
        once = 0.0
        for _ in range(3):  # the first ones warm up
            once = self._round(call, 1).wall
            if once > self.budget:
                break
        count = int(min(_ENOUGH, max(1, self.budget / _ROUNDS / max(once, 1e-6))))
        repeats = max(1, min(_ROUNDS, int(4 * self.budget / once)))  # fewer where the ranks wait for a core
        rounds = [self._round(call, count) for _ in range(repeats)]
        wall = min(round_.wall for round_ in rounds)
        if self.cores is None:
            return wall
        cpu = median(round_.cpu for round_ in rounds)
        ranks = dist.get_world_size()
        # core time taken by other processes does not count as time of the collective
        undisturbed = sum(ranks * round_.cpu + round_.idle for round_ in rounds) / repeats / self.cores
        return max(cpu, min(wall, undisturbed) * min(1.0, self.cores / ranks))

    def _round(self, call: Callable[[], object], count: int) -> _RoundTimes:
        dist.barrier()
        self._wait()
        idle = idle_seconds()
        cpu = time.process_time()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        self._wait()
        spent = [time.perf_counter() - begun, time.process_time() - cpu, idle_seconds() - idle]
        times = torch.tensor(spent, dtype=torch.float64).to(self.device)
        slowest = times[:1].clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(times)
        _, cpu, idle = (times / count / dist.get_world_size()).tolist()
        return _RoundTimes(float(slowest) / count, cpu, idle)

    def _wait(self) -> None:
        synchronize(self.device)


def groups_of(world: int) -> list[int]:
    """Sizes of the groups that are measured: all divisors of `world` above 1, the largest first."""
    return [n for n in range(world, 1, -1) if world % n == 0]


def collective_times(
    timer: CollectiveTimer, quick: bool
) -> Iterator[tuple[str, Callable[[dict[str, list[Row]]], None]]]:
    """Measurements in the same order on all ranks: a name, and the call that adds the rows of all sizes, as
    those of small ones say nothing of large ones.
    """
    world = dist.get_world_size()
    sizes = _SIZES if on_accelerator(timer.device) else _HOST_SIZES
    for ranks in groups_of(world):
        group = _group(world, ranks)
        for kind, make in KINDS.items():

            def measure(
                into: dict[str, list[Row]],
                kind: str = kind,
                group: ProcessGroup = group,
                make: Callable[[ProcessGroup, int, torch.device], Callable[[], object]] = make,
            ) -> None:
                for size in sizes[:3:2] if quick else sizes:
                    row = timer.row(make(group, size, timer.device), group.size(), size)
                    into.setdefault(kind, []).append(row)

            yield f"{kind}, {ranks} ranks", measure


def _group(world: int, ranks: int) -> ProcessGroup:
    """The group of neighbouring ranks that this rank is in."""
    if ranks == world:
        return cast(ProcessGroup, dist.group.WORLD)
    member = None
    for first in range(0, world, ranks):
        group = make_group(list(range(first, first + ranks)), None)
        member = group or member
    assert member is not None
    return member


def _floats(size: int, device: torch.device) -> Tensor:
    return torch.ones(size // 4, device=device)


def _all_reduce(group: ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    x = _floats(size, device)
    return lambda: all_sum(x, group)


def _all_gather(group: ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    part = _floats(size // group.size(), device)
    return lambda: start_gather(part, group)[1].wait()


def _reduce_scatter(group: ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    parts = _floats(size, device).view(group.size(), -1)
    return lambda: start_scatter_sum(parts, group)[1].wait()


def _all_to_all(group: ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    x = _floats(size, device).view(group.size(), -1)
    out = torch.empty_like(x)
    return lambda: dist.all_to_all_single(out, x, group=group)


def _broadcast(group: ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    x = _floats(size, device)
    return lambda: dist.broadcast(x, group=group, group_src=0)


def _send(group: ProcessGroup, size: int, device: torch.device) -> Callable[[], object]:
    """Send a message to the previous rank while receiving one from the next, as in a ring."""
    sent, received = _floats(size, device), _floats(size, device)
    previous, following = (group.rank() - 1) % group.size(), (group.rank() + 1) % group.size()

    def call() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=previous),
            dist.P2POp(dist.irecv, received, group=group, group_peer=following),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


KINDS: dict[str, Callable[[ProcessGroup, int, torch.device], Callable[[], object]]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
