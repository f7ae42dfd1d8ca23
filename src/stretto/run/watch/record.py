"""The record that a rank writes when ranks wait in vain: its last calls and its stacks."""

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
from stretto.run.watch.hang import RECORD, STACK, remove_records

NCCL = "nccl"  # subfolder of the records for NCCL's own dumps: a rank has one file in each
_pipeline: Sequence[int] = ()  # ranks of this rank's pipeline, while it trains


@contextlib.contextmanager
def hang_record(folder: Path, pipeline: Sequence[int]) -> Generator[None]:
    """Write this rank's flight record into `folder` if the block fails because other ranks do not answer.

    Args:
        folder: destination of the records; those of an earlier hang are removed.
        pipeline: ranks of this rank's pipeline, in order.
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
                cause: BaseException | None = error
                while cause is not None and not (
                    isinstance(cause, PipelineError) and cause.awaited is not None
                ):
                    cause = cause.__cause__ or cause.__context__
                _write(folder, None if cause is None else cause.awaited)
        raise
    finally:
        _pipeline = ()


def write_now(folder: Path, rank: int) -> None:
    """Write this rank's record and the Python stacks of its threads, whatever the main thread is doing; parts
    that cannot be written are left out. Called on another thread.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)  # not its parents: the run's folder is not created anew
        with (folder / STACK.format(rank=rank)).open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    with contextlib.suppress(Exception):  # torch's recorder may be in any state
        row = read_row(PROGRESS.snapshot())
        awaited = PROGRESS.messages.get(label(row.text)) if row.waits else None
        _write(folder, None if awaited is None else Awaited(*awaited))


def _write(folder: Path, awaited: Awaited | None) -> None:
    """Write torch's record as JSON, with what gloo omits: the ranks of groups and the awaited message."""
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
        index, peer = _pipeline.index(rank), awaited.peer
        name = f"send {index}->{peer}" if awaited.sends else f"recv {index}<-{peer}"
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
    folder.mkdir(exist_ok=True)  # not its parents: the run's folder is not created anew
    path = folder / RECORD.format(rank=rank)
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)


def record_environment(folder: Path, environment: dict[str, str] | None = None) -> None:
    """Enable NCCL's flight recorder and let its watchdog write into the run's folder when a call times out,
    unless the environment says otherwise. Call it before process groups are created.
    """
    variables = os.environ if environment is None else environment
    variables.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in variables:  # the older name
        variables.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in variables:
        variables.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / NCCL / "rank_"))
