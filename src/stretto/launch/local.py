"""Start ranks on this machine through torch's own launcher, and bring their results and exceptions back."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class RankFailed(RuntimeError):
    """A rank died; `rank` is the first one that did and `traceback` what it raised."""

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(f"rank {rank} failed:\n{traceback}")
        self.rank = rank
        self.traceback = traceback


class RanksStopped(RuntimeError):
    """The job was told to stop by `signal`; its ranks were told too, and have ended."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


def run_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, threads: int = 1, grace_s: int = 30, port: int = 0
) -> list[Any]:
    """Run `function(*arguments)` on `ranks` local processes; return their results in rank order.

    `function` finds RANK, WORLD_SIZE and the rendezvous in its environment, as under torchrun. Ranks are forked from a
    server that has imported torch once, which makes the start of four of them about half a second.

    Args:
        threads: CPU threads of a rank.
        grace_s: on a signal, how long ranks may take to end by themselves.
        port: of the rendezvous, on the loopback interface; 0 takes a free one.

    Raises:
        RankFailed: a rank raised or died; the others have been ended.
        RanksStopped: this process got SIGINT or SIGTERM.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace_s)
    for name in ("torch.distributed.elastic", "torch.multiprocessing", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed", "stretto.parallel.mesh"])
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"stretto-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    try:
        results = elastic_launch(launch, function)(*arguments)
    except SignalException as stopped:
        raise RanksStopped(int(stopped.sigval)) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        detail = failure.message
        if isinstance(failure.error_file_data, dict):
            message = failure.error_file_data.get("message", {})
            if isinstance(message, dict):
                detail = message.get("extraInfo", {}).get("py_callstack", detail)
        raise RankFailed(rank, str(detail).rstrip()) from None
    return [results[rank] for rank in range(ranks)]
