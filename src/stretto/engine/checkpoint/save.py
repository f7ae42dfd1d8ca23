"""Save a checkpoint atomically: write to a temporary folder, sync, commit by rename, on all ranks or none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stretto import __version__
from stretto.engine.checkpoint import folder as folders
from stretto.engine.checkpoint.files import remove
from stretto.engine.checkpoint.index import DTYPES
from stretto.engine.checkpoint.manifest import PER_RANK, Manifest, tally, write_manifest
from stretto.engine.checkpoint.shards import Saved, Shards, ShardsSavePlanner, Streamed, shards
from stretto.engine.checkpoint.storage import Writer, dtype_name, run_collective
from stretto.engine.parallel.control import (
    gather_json,
    has_group,
    run_on_all,
    run_on_first,
    this_rank,
    world_size,
)
from stretto.engine.parallel.fragment import Placed
from stretto.errors import StrettoError


def save(
    folder: str | Path,
    step: int,
    tensors: Saved,
    meta: Mapping[str, Any],
    per_rank: Mapping[str, Tensor] | None = None,
    keep: int | None = None,
) -> Path:
    """Write `folder`/step-00000100 from all ranks of the default process group, or from this process alone.

    Args:
        folder: the run's `checkpoints`; must be the same place on all ranks.
        step: non-negative, the same on all ranks. An existing checkpoint of this step is replaced.
        tensors: by full name: (local tensor, its place), of which owned pieces are written, data-parallel
            copies once; or a tensor whose boxes are fetched as they are written.
        meta: JSON values, the same on all ranks; rank 0's are written.
        per_rank: small tensors of this rank (states of random generators), by name.
        keep: how many of the newest whole checkpoints to keep; None keeps all.

    Returns:
        The checkpoint's path.

    Raises:
        StrettoError: bad arguments, on any rank.
        CollectiveError: writing failed, on any rank. Either way the error is raised on all ranks, earlier
            checkpoints are unchanged, and what was written is removed.
    """
    folder = Path(folder)
    state = run_on_all(lambda: _state(step, tensors, meta, per_rank, keep))
    if len(steps := set(gather_json(step))) > 1:
        raise StrettoError(f"ranks save different steps: {sorted(steps)}", hint="save at the same step")
    partial = Path(run_on_first(lambda: str(folders.begin(folder, step))))
    try:
        run_on_all(lambda: _visible(partial))
        writer = Writer(partial)
        run_collective(
            lambda: dcp_save(
                cast(dict[str, Any], state),
                storage_writer=writer,
                planner=ShardsSavePlanner(),
                no_dist=not has_group(),
            )
        )
        final, troubles = run_on_first(lambda: _commit(writer, step, dict(meta), keep))
    except BaseException:
        if this_rank() == 0:
            _discard(partial)
        raise
    if this_rank() == 0:
        for trouble in troubles:
            warnings.warn(trouble, stacklevel=2)
    return Path(final)


def _state(
    step: int,
    tensors: Saved,
    meta: Mapping[str, Any],
    per_rank: Mapping[str, Tensor] | None,
    keep: int | None,
) -> dict[str, Shards | Streamed]:
    if type(step) is not int or not 0 <= step < 10**18:
        raise StrettoError(f"step is {step!r}", hint="a whole number of at least 0")
    if keep is not None and keep < 1:
        raise StrettoError(f"keep is {keep}", hint="keep at least 1 checkpoint, or None for all")
    check_meta(meta)
    mine = {rank_name(this_rank(), name): value for name, value in (per_rank or {}).items()}
    state = {name: (value, Placed.whole(name, tuple(value.shape))) for name, value in mine.items()}
    streamed = {name: each for name, each in tensors.items() if isinstance(each, Streamed)}
    placed = {name: each for name, each in tensors.items() if not isinstance(each, Streamed)}
    types = {name: each.dtype for name, each in streamed.items()}
    for name, dtype in (types | {name: local.dtype for name, (local, _) in placed.items()}).items():
        if name.startswith(f"{PER_RANK}."):
            raise StrettoError(f"tensor name {name!r} begins with {PER_RANK}.", hint="rename it")
        if dtype_name(dtype) not in DTYPES:
            raise StrettoError(f"tensor {name} has dtype {dtype}", hint=f"one of {', '.join(DTYPES)}")
    return {**shards({**placed, **state}), **streamed}


def rank_name(rank: int, name: str) -> str:
    """The name under which a tensor of a single rank is stored."""
    return f"{PER_RANK}.{rank:05d}.{name}"


def check_meta(value: Any, at: str = "meta") -> None:
    """Raise StrettoError, naming the place, unless JSON preserves the value (tuples become lists)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise StrettoError(
                    f"{at} has the key {key!r}", hint="keys of checkpoint metadata must be strings"
                )
            check_meta(inner, f"{at}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            check_meta(inner, f"{at}[{i}]")
    elif not (value is None or type(value) in (str, int, bool)):
        if type(value) is not float:
            raise StrettoError(
                f"{at} is a {type(value).__name__}", hint="checkpoint metadata takes JSON values only"
            )
        if value != value or value in (float("inf"), float("-inf")):
            raise StrettoError(f"{at} is {value}", hint="JSON has no such number; use None")


def _visible(partial: Path) -> None:
    if not partial.is_dir():
        raise StrettoError(
            f"checkpoint folder {partial.parent} is not the same place on all ranks",
            hint="put the run on a file system that all nodes share",
        )


def _commit(writer: Writer, step: int, meta: dict[str, Any], keep: int | None) -> tuple[str, list[str]]:
    """On rank 0: commit; returns the checkpoint's path, and a line for each old one that cannot be
    removed.
    """
    tensors, dtypes = tally(writer.index)
    manifest = Manifest(
        step=step,
        world=world_size(),
        tensors=tensors,
        dtypes=dtypes,
        saved=datetime.now(UTC).isoformat(timespec="seconds"),
        stretto=__version__,
        torch=str(torch.__version__),
        files=writer.files,
        meta=meta,
    )
    write_manifest(writer.folder, manifest)
    final = folders.commit(writer.folder)
    return str(final), folders.tidy(final, keep)


def _discard(partial: Path) -> None:
    """Remove an unfinished checkpoint; if that fails, the next save does it."""
    with contextlib.suppress(OSError):
        remove(partial)
