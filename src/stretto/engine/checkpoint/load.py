"""Find the newest undamaged checkpoint, verify one, and load one into any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from stretto.engine.checkpoint.folder import checkpoints, step_of
from stretto.engine.checkpoint.index import Index
from stretto.engine.checkpoint.manifest import Manifest, problems, read_manifest, read_tensors
from stretto.engine.checkpoint.metadata import PER_RANK
from stretto.engine.checkpoint.save import rank_name
from stretto.engine.checkpoint.shards import Shards, ShardsLoadPlanner, Tensors, shards
from stretto.engine.checkpoint.storage import CheckpointReader, run_collective
from stretto.engine.parallel.control import (
    gather_json,
    has_group,
    run_on_all,
    run_on_first,
    this_rank,
    world_size,
)
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError, nearest


@dataclass(frozen=True)
class Loaded:
    """Step and metadata of a checkpoint, and this rank's small tensors.

    `per_rank` is empty if another number of ranks wrote the checkpoint.
    """

    step: int
    meta: dict[str, Any]
    per_rank: dict[str, Tensor]


def verify(path: str | Path) -> list[str]:
    """Return the problems of a checkpoint, empty if it is intact; the same on all ranks. Collective.

    Each rank reads a part of the files.
    """
    lines = gather_json(problems(Path(path), this_rank(), world_size()))
    return list(dict.fromkeys(line for rank in lines for line in rank))


def latest(
    folder: str | Path, report: Callable[[str], object] = print, before: int | None = None
) -> Path | None:
    """Return the newest undamaged checkpoint, with every byte verified, or None; the same on all ranks.
    Collective.

    Args:
        folder: folder of checkpoints.
        report: called on rank 0 with one line for each damaged checkpoint, which is skipped.
        before: consider only checkpoints of steps before this one.
    """
    names = [Path(name) for name in run_on_first(lambda: [str(p) for p in checkpoints(Path(folder))])]
    names = [path for path in names if before is None or (step_of(path) or 0) < before]
    for i, path in enumerate(names):
        wrong = verify(path)
        if not wrong:
            return path
        if this_rank() == 0:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            then = f"falling back to {names[i + 1].name}" if i + 1 < len(names) else "no older one exists"
            report(f"checkpoint {path.name} is damaged: {wrong[0]}{more}; {then}")
    return None


def load(path: str | Path, tensors: Tensors, *, ignore: Sequence[str] = (), check: bool = True) -> Loaded:
    """Read a checkpoint, written under any layout, into local tensors in place; set padding to zero.
    Collective.

    Floating dtypes are converted to that of the local tensor; other dtypes, shapes and names must match.

    Args:
        path: path of one checkpoint.
        tensors: as for `save`; all pieces are read, whether owned or not.
        ignore: prefixes of names ("optim.") that the checkpoint may have although no rank requests them.
        check: verify sizes and checksums of all files first; not needed after `latest`.

    Raises:
        StrettoError: the path is no checkpoint, a damaged one, or one of another model; on all ranks, with
            the tensors unchanged.
        CollectiveError: reading failed half-way; the tensors' contents are then undefined.
    """
    folder = Path(path)
    manifest = run_on_all(lambda: read_manifest(folder))
    if check and (wrong := verify(folder)):
        raise StrettoError(
            f"checkpoint {folder} is damaged: {'; '.join(wrong[:3])}",
            hint="use an older one: `stretto checkpoint list`",
        )
    index, state = run_on_all(lambda: _matched(folder, manifest, tensors))
    requested = {name for names in gather_json(sorted(tensors)) for name in names}
    ignored = (f"{PER_RANK}.", *ignore)
    if extra := sorted(name for name in index if name not in requested and not name.startswith(ignored)):
        more = f" and {len(extra) - 1} more tensors" if len(extra) > 1 else ""
        raise StrettoError(
            f"checkpoint of another model: it has {extra[0]}{more}, which the model does not have",
            hint="load it into a model of the same shape",
        )
    begin = rank_name(this_rank(), "")
    per_rank = {
        name: torch.zeros(saved.shape, dtype=getattr(torch, saved.dtype))
        for name, saved in index.items()
        if manifest.world == world_size() and name.startswith(begin)
    }
    with torch.no_grad():
        for part in state.values():
            if part.padded:
                part.zero()
    requested_state = {
        **state,
        **shards({n: (t, ShardPlacement.unsharded(n, tuple(t.shape))) for n, t in per_rank.items()}),
    }
    run_collective(
        lambda: dcp_load(
            cast(dict[str, Any], requested_state),
            storage_reader=CheckpointReader(folder, index),
            planner=ShardsLoadPlanner(),
            no_dist=not has_group(),
        )
    )
    own_names = {name.removeprefix(begin): tensor for name, tensor in per_rank.items()}
    return Loaded(manifest.step, manifest.meta, own_names)


def tensor_index(path: str | Path) -> Index:
    """Return the index of a checkpoint, without per-rank tensors."""
    folder = Path(path)
    index = read_tensors(folder, read_manifest(folder))
    return {name: saved for name, saved in index.items() if not name.startswith(f"{PER_RANK}.")}


def _matched(folder: Path, manifest: Manifest, tensors: Tensors) -> tuple[Index, dict[str, Shards]]:
    index = read_tensors(folder, manifest)
    for name, (local, placed) in tensors.items():
        if name not in index:
            names = [n for n in index if not n.startswith(f"{PER_RANK}.")]
            suggestion = nearest(name, names)
            raise StrettoError(
                f"checkpoint of another model: it has no tensor {name} of shape {list(placed.shape)}",
                hint=f"the nearest name in it is {suggestion}, of shape {list(index[suggestion].shape)}"
                if suggestion
                else f"it has {len(names)} tensors: {', '.join(names[:3])}, ...",
            )
        saved = index[name]
        if saved.shape != tuple(placed.shape):
            raise StrettoError(
                f"checkpoint of another model: {name} has shape {list(saved.shape)}, in the model "
                f"{list(placed.shape)}",
                hint="give the model the sizes of the checkpoint",
            )
        dtype: torch.dtype = getattr(torch, saved.dtype)
        if dtype != local.dtype and not (dtype.is_floating_point and local.dtype.is_floating_point):
            raise StrettoError(
                f"checkpoint of another model: {name} has dtype {saved.dtype}, in the model {local.dtype}",
                hint="only floating dtypes are converted to each other",
            )
    return index, shards(tensors)
