"""What a rank leaves behind when ranks wait in vain: its last calls and its stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stretto.engine.checkpoint.plain_pickle import read_pickle
from stretto.engine.device import flight_record
from stretto.engine.pipeline.executor import Awaited, PipelineError
from stretto.engine.progress import PROGRESS, label, read_row
from stretto.errors import StrettoError
from stretto.run.launch.failure import peer_failure
from stretto.run.watch.hang import HANG, RECORD, STACK, remove_records

_pipeline: Sequence[int] = ()  # the ranks of this rank's pipeline, while it trains


@contextlib.contextmanager
def hang_record(folder: Path, pipeline: Sequence[int]) -> Generator[None]:
    """Write this rank's flight record into `folder` if the block fails because other ranks do not answer.

    Args:
        folder: of the run's records; those of an earlier hang are removed.
        pipeline: the ranks of this rank's pipeline, in its order.
    """
    global _pipeline
    if dist.get_rank() == 0:
        remove_records(folder)
    _pipeline = pipeline
    try:
        yield
    except Exception as error:
        if peer_failure(error) is not None:
            with contextlib.suppress(OSError, StrettoError):  # the failure itself is what must be reported
                _write(folder, _awaited(error))
        raise
    finally:
        _pipeline = ()


def write_now(folder: Path, rank: int) -> None:
    """Write this rank's record and the Python stacks of its threads, whatever it is doing: for a thread
    beside the main one. What cannot be written is left out.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)  # in the run's, which is not made anew
        with (folder / STACK.format(rank=rank)).open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    with contextlib.suppress(Exception):  # torch's recorder may be in any state
        row = read_row(PROGRESS.snapshot())
        awaited = PROGRESS.messages.get(label(row.text)) if row.waits else None
        _write(folder, None if awaited is None else Awaited(*awaited))


def _write(folder: Path, awaited: Awaited | None) -> None:
    """torch's record as JSON, with what gloo leaves out: the ranks of groups, and the message waited for."""
    gloo, rank = "gloo" in dist.get_backend(), dist.get_rank()
    record = read_pickle(flight_record())
    names: Mapping[Any, str] = dist.distributed_c10d._world.pg_names
    record["pg_config"] = {
        name: {
            "name": name,
            "desc": getattr(group, "group_desc", ""),
            "ranks": json.dumps(dist.get_process_group_ranks(group)),
        }
        for group, name in names.items()
    }
    entries = record.setdefault("entries", [])
    if gloo and awaited is not None and rank in _pipeline:
        me, peer = _pipeline.index(rank), awaited.peer
        name = f"send {me}->{peer}" if awaited.sends else f"recv {me}<-{peer}"
        record["pg_config"]["pipeline"] = {
            "name": "pipeline",
            "desc": "pipeline",
            "ranks": json.dumps(list(_pipeline)),
        }
        entries.append(
            {
                "record_id": 1 + max((entry["record_id"] for entry in entries), default=-1),
                "process_group": ["pipeline", "pipeline"],
                "profiling_name": f"gloo:{name}",
                "p2p_seq_id": 0,
                "is_p2p": True,
                "state": "started",
                "retired": False,
            }
        )
    folder.mkdir(exist_ok=True)  # in the run's, which is not made anew
    path = folder / RECORD.format(rank=rank)
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(record), encoding="utf-8")
    beside.replace(path)


def _awaited(error: BaseException | None) -> Awaited | None:
    """The message that the failed action of the pipeline waited for; None: none, or it failed elsewhere."""
    while error is not None:
        if isinstance(error, PipelineError) and error.awaited is not None:
            return error.awaited
        error = error.__cause__ or error.__context__
    return None


__all__ = ["HANG", "hang_record", "write_now"]


def record_environment(folder: Path, environment: dict[str, str] | None = None) -> None:
    """Switch NCCL's flight recorder on and let its watchdog write into the run's folder when a call times
    out, unless the environment says otherwise. Before the process groups are made.
    """
    here = os.environ if environment is None else environment
    here.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in here:  # the name of before
        here.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in here:
        here.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / NCCL / "rank_"))


NCCL = "nccl"  # a folder of its own inside that of the records: a rank has one file there and one here
