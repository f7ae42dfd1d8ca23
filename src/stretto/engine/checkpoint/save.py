"""Save a checkpoint atomically on all ranks: write to a temporary folder, sync, and commit by rename."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stretto.engine.checkpoint import folder as folders
from stretto.engine.checkpoint.files import FileEntry, remove
from stretto.engine.checkpoint.folder import Retention
from stretto.engine.checkpoint.index import DTYPES, INDEX, Index, write_index
from stretto.engine.checkpoint.manifest import Manifest, tally, write_manifest
from stretto.engine.checkpoint.metadata import PER_RANK, metadata_problem
from stretto.engine.checkpoint.shards import Saved, ShardsSavePlanner, State, Streamed, shards
from stretto.engine.checkpoint.storage import (
    FilePlan,
    Planner,
    TensorSource,
    check_disk,
    check_visible,
    dtype_name,
    run_collective,
    write_shard,
)
from stretto.engine.parallel.control import (
    CollectiveError,
    gather_json,
    has_group,
    run_on_all,
    run_on_first,
    this_rank,
    world_size,
)
from stretto.engine.parallel.fragment import ShardPlacement
from stretto.errors import StrettoError
from stretto.versions import __version__

Written = dict[str, tuple[int, int]]
"""Size and CRC-32 of files, by name."""


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """The division of a checkpoint into files, reused for later checkpoints whose tensors have equal `sizes`.

    Attributes:
        sizes: dtypes, shapes and placements of this rank's tensors.
        files: this rank's files.
        index: the index of all files, on rank 0.
        bytes: size of all tensors, on rank 0.
    """

    sizes: Mapping[str, tuple[object, ...]]
    files: Sequence[FilePlan]
    index: Index
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A checkpoint that all ranks have agreed on; each writes its files, then rank 0 commits it."""

    partial: Path
    step: int
    state: State
    meta: Mapping[str, Any]
    keep: Retention
    before_commit: Callable[[], object] | None
    write_plan: WritePlan

    @property
    def final(self) -> Path:
        """The path of the committed checkpoint."""
        return self.partial.with_suffix("")

    def check_visible(self) -> None:
        """Check that this rank sees the folder that rank 0 has created."""
        if not self.partial.is_dir():
            raise StrettoError(
                f"checkpoint folder {self.partial.parent} is not the same folder on all ranks",
                hint="put the run on a file system that all nodes share",
            )

    def sources(self) -> dict[str, Sequence[TensorSource]]:
        """Return the tensors that this rank writes, by file."""
        return {file.name: file.sources(self.state) for file in self.write_plan.files}

    def write(self, files: Mapping[str, Sequence[TensorSource]]) -> Written:
        """Write files of this rank, durably."""
        written = {name: write_shard(self.partial / name, entries) for name, entries in files.items()}
        return {name: (entry.size, entry.crc32) for name, entry in written.items()}

    def commit(self, written: Sequence[Mapping[str, Sequence[int]]]) -> tuple[str, list[str]]:
        """On rank 0, once all ranks have written: write index and manifest, rename the folder, and remove old
        checkpoints.

        Returns:
            The checkpoint's path, and one line per old checkpoint that cannot be removed.
        """
        files = {name: FileEntry(*entry) for rank in written for name, entry in rank.items()}
        check_visible(self.partial, files)
        files[INDEX] = write_index(self.partial, self.write_plan.index)
        tensors, dtypes = tally(self.write_plan.index)
        manifest = Manifest(
            step=self.step,
            world=world_size(),
            tensors=tensors,
            dtypes=dtypes,
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            stretto=__version__,
            torch=str(torch.__version__),
            files=files,
            meta=dict(self.meta),
        )
        write_manifest(self.partial, manifest)
        if self.before_commit is not None:
            self.before_commit()
        final = folders.commit(self.partial)
        return str(final), folders.tidy(final, self.keep)

    @contextlib.contextmanager
    def discarded_on_error(self) -> Generator[None]:
        """Remove the unfinished checkpoint if the block raises.

        If all ranks raise the error, they wait for the removal, since the first rank that exits ends the job.
        """
        try:
            yield
        except BaseException as error:
            self.discard()
            if isinstance(error, StrettoError | CollectiveError):
                with contextlib.suppress(RuntimeError):  # the first error is more informative
                    gather_json(None)
            raise

    def discard(self) -> None:
        """On rank 0, remove an unfinished checkpoint; if that fails, the next save removes it."""
        if this_rank() == 0:
            with contextlib.suppress(OSError):
                remove(self.partial)


def save(
    folder: str | Path,
    step: int,
    tensors: Saved,
    meta: Mapping[str, Any],
    per_rank: Mapping[str, Tensor] | None = None,
    keep: Retention | None = None,
    before_commit: Callable[[], object] | None = None,
) -> Path:
    """Write `folder`/step-00000100 from all ranks of the default process group, or from this process alone.

    Args:
        folder: the run's `checkpoints`; must be the same place on all ranks.
        step: non-negative, the same on all ranks. An existing checkpoint of this step is replaced.
        tensors: by full name: (local tensor, placement), of which owned pieces are written, data-parallel
            replicas once; or a tensor whose boxes are fetched while they are written.
        meta: JSON values, the same on all ranks; rank 0's are written.
        per_rank: small tensors of this rank (states of random generators), by name.
        keep: older checkpoints to retain, by default all.
        before_commit: called on rank 0 just before the commit; raises if the commit must not happen.

    Returns:
        The checkpoint's path.

    Raises:
        StrettoError: bad arguments, on any rank.
        CollectiveError: writing failed, on any rank. Either error is raised on all ranks; earlier checkpoints
            are unchanged, and the unfinished one is removed.
    """
    planned = plan(
        folder=folder,
        step=step,
        tensors=tensors,
        meta=meta,
        per_rank=per_rank,
        keep=keep,
        before_commit=before_commit,
    )

    def write() -> Written:
        planned.check_visible()
        return planned.write(planned.sources())

    with planned.discarded_on_error():
        written = gather_json(run_on_all(write))
        final, troubles = run_on_first(lambda: planned.commit(written))
    if this_rank() == 0:
        for trouble in troubles:
            warnings.warn(trouble, stacklevel=2)
    return Path(final)


def plan(
    folder: str | Path,
    step: int,
    tensors: Saved,
    meta: Mapping[str, Any],
    per_rank: Mapping[str, Tensor] | None = None,
    keep: Retention | None = None,
    before_commit: Callable[[], object] | None = None,
    before: WritePlan | None = None,
) -> Planned:
    """Prepare a checkpoint: check the arguments, divide it among the ranks, create the folder. Collective.

    Args:
        before: write plan of an earlier checkpoint, reused if tensors have not changed on any rank.

    Raises:
        StrettoError, CollectiveError: as for `save`.
    """
    folder = Path(folder)
    state = run_on_all(lambda: _state(step, tensors, meta, per_rank))
    sizes = {name: each.sizes for name, each in state.items()}
    unchanged = before is not None and before.sizes == sizes
    steps, unchanged_ranks = zip(*gather_json([step, unchanged]), strict=True)
    if len(set(steps)) > 1:
        raise StrettoError(f"ranks save different steps: {sorted(set(steps))}", hint="save at the same step")
    if before is not None and all(unchanged_ranks):
        write_plan = before
    else:
        planner = Planner(state)
        run_collective(
            lambda: dcp_save(
                cast(dict[str, Any], state),
                storage_writer=planner,
                planner=ShardsSavePlanner(),
                no_dist=not has_group(),
            )
        )
        write_plan = WritePlan(sizes=sizes, files=planner.files, index=planner.index, bytes=planner.bytes)

    def begin() -> str:
        """On rank 0: create the temporary folder, if the disk has enough free space."""
        partial = folders.begin(folder, step)
        try:
            check_disk(partial, write_plan.bytes)
        except CollectiveError:
            remove(partial)
            raise
        return str(partial)

    return Planned(
        partial=Path(run_on_first(begin)),
        step=step,
        state=state,
        meta=meta,
        keep=keep or Retention(),
        before_commit=before_commit,
        write_plan=write_plan,
    )


def _state(
    step: int,
    tensors: Saved,
    meta: Mapping[str, Any],
    per_rank: Mapping[str, Tensor] | None,
) -> State:
    if type(step) is not int or not 0 <= step < 10**18:
        raise StrettoError(f"step is {step!r}", hint="an integer of at least 0")
    check_meta(meta)
    if problem := metadata_problem(meta, step, world_size()):  # no reader would accept it
        raise StrettoError(f"metadata of the checkpoint: {problem}")
    per_rank_tensors = {rank_name(this_rank(), name): value for name, value in (per_rank or {}).items()}
    state = {
        name: (value, ShardPlacement.unsharded(name, tuple(value.shape)))
        for name, value in per_rank_tensors.items()
    }
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
    """Return the name under which a per-rank tensor is stored."""
    return f"{PER_RANK}.{rank:05d}.{name}"


def check_meta(value: Any, at: str = "meta") -> None:
    """Raise StrettoError, naming the entry, unless JSON preserves the value (tuples become lists)."""
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
                f"{at} is a {type(value).__name__}", hint="checkpoint metadata must be JSON values"
            )
        if value != value or value in (float("inf"), float("-inf")):
            raise StrettoError(f"{at} is {value}", hint="JSON has no such number; use None")
