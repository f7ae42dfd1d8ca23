"""Jobs that really hang, on gloo: each rank dumps its flight record once it is stuck, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

LONGEST_S = 200


class Stuck:
    """Tells the thread that dumps when this rank's last call is on record."""

    def __init__(self) -> None:
        self._enough: int | None = None

    def in_call(self, call: Callable[[], object]) -> None:
        """Make a call that will not end."""
        self._enough = calls_on_record() + 1
        call()

    def elsewhere(self) -> None:
        """Hang without a call."""
        self._enough = 0
        time.sleep(LONGEST_S)

    @property
    def recorded(self) -> bool:
        return self._enough is not None and calls_on_record() >= self._enough


def calls_on_record() -> int:
    return len(json.loads(_dump_fr_trace_json(True, False)).get("entries", []))


Scenario = Callable[[int, Stuck], None]


def hang_all(folder: Path) -> None:
    """Run every scenario as one rank of each, in a process of its own."""
    rank = int(os.environ["RANK"])
    for name, (scenario, world) in SCENARIOS.items():
        if rank < world and (child := os.fork()) == 0:
            try:
                hang(scenario, rank, world, folder / name)
            finally:
                os._exit(1)
        elif rank < world:
            assert os.waitpid(child, 0)[1] == 0, f"{name} on rank {rank}"


def hang(scenario: Scenario, rank: int, world: int, folder: Path) -> None:
    for kind in ("pickle", "json"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    stuck = Stuck()

    def dump() -> None:
        while not stuck.recorded:
            time.sleep(0.02)
        (folder / "json" / f"dump_{rank}.json").write_bytes(_dump_fr_trace_json(True, False))
        written = folder / "pickle" / f"dump_{rank}"
        written.with_name("unfinished" + str(rank) + ".tmp").write_bytes(_dump_fr_trace(True, True, False))
        written.with_name("unfinished" + str(rank) + ".tmp").rename(written)
        while (
            len(list(written.parent.glob("dump_*"))) < world
        ):  # the others still need this one's connections
            time.sleep(0.02)
        os._exit(0)

    threading.Thread(target=dump).start()
    with contextlib.suppress(RuntimeError):
        scenario(rank, stuck)
    time.sleep(LONGEST_S)


def everyone_but_two(rank: int, stuck: Stuck) -> None:
    """Rank 2 goes away after the first of two sums."""
    x = torch.ones(8)
    dist.barrier()
    dist.all_reduce(x)
    stuck.elsewhere() if rank == 2 else stuck.in_call(lambda: dist.all_reduce(x))


def through_others(rank: int, stuck: Stuck) -> None:
    """Rank 0 waits for 1, which waits for 2, which waits for 3, each in a group of two."""
    pairs = [dist.new_group([low, low + 1], group_desc=f"pair{low}") for low in range(3)]
    x = torch.ones(4, 2)
    for low in (0, 2, 1):
        if rank in (low, low + 1):
            dist.all_reduce(x, group=pairs[low])
    stuck.elsewhere() if rank == 3 else stuck.in_call(lambda: dist.all_reduce(x, group=pairs[rank]))


def other_operation(rank: int, stuck: Stuck) -> None:
    """Rank 1 leaves out the sum before the barrier, so that its barrier meets the others' sum."""
    x = torch.ones(8)
    dist.all_reduce(x)
    if rank == 1:
        stuck.in_call(dist.barrier)
        return
    work = [dist.all_reduce(x, async_op=True)]
    stuck.in_call(lambda: work.append(dist.barrier(async_op=True)))


def other_order(rank: int, stuck: Stuck) -> None:
    """Two groups of the same two ranks, used in different orders."""
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("left", "right")]
    x = torch.ones(3)
    for group in groups:
        dist.all_reduce(x, group=group)
    stuck.in_call(lambda: dist.all_reduce(x, group=groups[rank]))


def healthy(_: int, stuck: Stuck) -> None:
    x = torch.ones(3)
    for _step in range(3):
        dist.all_reduce(x)
    dist.barrier()
    stuck.elsewhere()


SCENARIOS: dict[str, tuple[Scenario, int]] = {
    "missing": (everyone_but_two, 4),
    "chain": (through_others, 4),
    "operation": (other_operation, 3),
    "order": (other_order, 2),
    "healthy": (healthy, 2),
}
