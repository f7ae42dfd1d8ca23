"""What a rank leaves behind when it has waited for others in vain: its last calls, for `stretto diagnose`."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stretto.engine.checkpoint.plain_pickle import read_pickle
from stretto.engine.device import flight_record
from stretto.engine.pipeline.executor import Awaited, PipelineError
from stretto.errors import StrettoError
from stretto.run.launch.failure import peer_failure

HANG = "hang"  # the folder inside that of the run


@contextmanager
def hang_record(folder: Path, pipeline: Sequence[int]) -> Generator[None]:
    """Write this rank's flight record into `folder` if the block fails because other ranks do not answer.

    Args:
        folder: of the run's records; those of an earlier hang are removed.
        pipeline: the ranks of this rank's pipeline, in its order.
    """
    if dist.get_rank() == 0:
        for old in folder.glob("rank_*.json"):
            old.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        if peer_failure(error) is not None:
            with suppress(OSError, StrettoError):  # the failure itself is what must be reported
                _write(folder, pipeline, error)
        raise


def _write(folder: Path, pipeline: Sequence[int], error: BaseException) -> None:
    """torch's record as JSON, with what gloo leaves out: the ranks of groups, and the message waited for."""
    gloo = "gloo" in dist.get_backend()
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
    awaited = _awaited(error)
    if gloo and awaited is not None:
        me, peer = pipeline.index(dist.get_rank()), awaited.peer
        name = f"send {me}->{peer}" if awaited.sends else f"recv {me}<-{peer}"
        record["pg_config"]["pipeline"] = {
            "name": "pipeline",
            "desc": "pipeline",
            "ranks": json.dumps(list(pipeline)),
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{dist.get_rank()}.json").write_text(json.dumps(record), encoding="utf-8")


def _awaited(error: BaseException | None) -> Awaited | None:
    """The message that the failed action of the pipeline waited for; None: none, or it failed elsewhere."""
    while error is not None:
        if isinstance(error, PipelineError) and error.awaited is not None:
            return error.awaited
        error = error.__cause__ or error.__context__
    return None
