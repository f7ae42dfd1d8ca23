"""Start ranks on this machine through torch's own launcher, and bring their results and exceptions back."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class RankFailed(RuntimeError):
    """A rank died; `rank` is the first one that did and `traceback` what it raised."""

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(f"rank {rank} failed:\n{traceback}")
        self.rank = rank
        self.traceback = traceback


def run_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, threads: int = 1) -> list[Any]:
    """Run `function(*arguments)` on `ranks` local processes; return their results in rank order.

    `function` finds RANK, WORLD_SIZE and the rendezvous in its environment, as under torchrun. Ranks are forked from a
    server that has imported torch once, which makes the start of four of them about half a second.

    Raises:
        RankFailed: a rank raised or died; the others have been ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("torch.distributed.elastic", "torch.multiprocessing", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "stretto.parallel.mesh"])
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"stretto-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    try:
        results = elastic_launch(launch, function)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        detail = failure.message
        if isinstance(failure.error_file_data, dict):
            message = failure.error_file_data.get("message", {})
            if isinstance(message, dict):
                detail = message.get("extraInfo", {}).get("py_callstack", detail)
        raise RankFailed(rank, str(detail).rstrip()) from None
    return [results[rank] for rank in range(ranks)]
