"""Storage for torch.distributed.checkpoint: safetensors files of each rank, and an index in JSON.

The library's own file storage writes pickled Python objects, which run code when read; its safetensors format
stores only one piece of each tensor in a file (torch 2.13, filesystem.py). The library is therefore only used
to divide a checkpoint among the ranks. Files are written tensor by tensor, so that one device tensor at a
time is in host memory, and in a single thread, since the library loses errors of other threads (pytorch issue
191391).

The safetensors format (github.com/huggingface/safetensors): length of the header as 8 bytes, the header as
JSON, the bytes of all tensors. The safetensors library reads the files, and checks the header.
"""

from __future__ import annotations

import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from stretto.engine.checkpoint.files import (
    PRIVATE,
    CheckedWriter,
    DamageError,
    FileEntry,
    dump_json,
    plain_file,
    size_text,
)
from stretto.engine.checkpoint.index import (
    DTYPES,
    Index,
    SavedPiece,
    SavedTensor,
    piece_key,
)
from stretto.engine.checkpoint.shards import State
from stretto.engine.parallel.control import CollectiveError, error_of_rank
from stretto.errors import StrettoError


@dataclass(frozen=True)
class TensorSource:
    """One tensor to write.

    get: called when it is written; returns the tensor, on any device and with any strides, or an iterable of
        consecutive rows.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    get: Callable[[], Tensor | Iterable[Tensor]]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][1]


def write_tensors(
    path: Path, entries: Sequence[TensorSource], notes: Mapping[str, str] | None = None, mode: int = PRIVATE
) -> FileEntry:
    """Write a new durable safetensors file, with `notes` in its header; keys must differ."""
    # widest dtype first, so that every tensor starts at a multiple of its element size
    ordered = sorted(entries, key=lambda e: -DTYPES[e.dtype][1])
    header: dict[str, Mapping[str, object]] = {"__metadata__": notes} if notes else {}
    start = 0
    for entry in ordered:
        assert entry.key not in header, f"{entry.key} is repeated"
        place = {"dtype": DTYPES[entry.dtype][0], "shape": list(entry.shape)}
        header[entry.key] = {**place, "data_offsets": [start, start + entry.bytes]}
        start += entry.bytes
    text = dump_json(header)
    text += b" " * (-len(text) % 8)
    with CheckedWriter(path, mode) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            data = entry.get()
            for part in (data,) if isinstance(data, Tensor) else data:
                file.write(as_bytes(part))
        return file.close()


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's elements in row-major order, as bytes."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


T = TypeVar("T")


def run_collective(work: Callable[[], T]) -> T:
    """Run a collective of torch.distributed.checkpoint.

    Its CheckpointException, which is not an Exception, is replaced by the error of the first failed rank.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            return work()
    except CheckpointException as failure:
        rank = min(failure.failures)
        if isinstance(failure.failures[rank][0], KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise error_of_rank(rank, failure.failures[rank][0]) from None


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


LARGEST_FILE = 5 * 10**9  # bytes of tensors in a file, unless a single one is larger


@dataclass(frozen=True)
class FilePlan:
    """A file that this rank will write.

    Attributes:
        away: True if its tensors are in files; they are written without a complete copy in memory.
    """

    name: str
    items: tuple[WriteItem, ...]
    away: bool

    @property
    def bytes(self) -> int:
        """Size of its tensors in bytes."""
        return sum(_bytes(item) for item in self.items)

    def sources(self, state: State) -> list[TensorSource]:
        """Return the tensors to write, with the values of `state`."""
        results = list[TensorSource]()
        for item in self.items:
            data, index = item.tensor_data, item.index
            assert data is not None
            chunk = data.chunk
            results.append(
                TensorSource(
                    key=piece_key(index.fqn, data.size, chunk.offsets, chunk.sizes),
                    dtype=dtype_name(data.properties.dtype),
                    shape=tuple(chunk.sizes),
                    get=partial(state[index.fqn].__get_tensor_shard__, index),
                )
            )
        return results


class Planner(StorageWriter):
    """Divides a checkpoint into files, which are written afterwards.

    Results are `files` of this rank, and on rank 0 `index` and `bytes` of all files.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.files: list[FilePlan] = []
        self.index: Index = {}
        self.bytes = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Set the file name of every rank."""
        self.bytes = sum(_bytes(item) for plan in plans for item in plan.items)
        return [
            SavePlan(plan.items, storage_data=f"shard-{rank:05d}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Divide a rank's items into files of limited size, which ranks can verify in parallel."""
        if plan.items:
            name = cast(str, plan.storage_data)
            for away in (False, True):
                items = [item for item in plan.items if self.state[item.index.fqn].away == away]
                while items:
                    size = count = 0
                    while count < len(items) and (not count or size + _bytes(items[count]) <= LARGEST_FILE):
                        size, count = size + _bytes(items[count]), count + 1
                    number = f".{len(self.files)}" if self.files else ""
                    file = name.replace(".safetensors", f"{number}.safetensors")
                    self.files.append(FilePlan(file, tuple(items[:count]), away))
                    items = items[count:]
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(item.index, _bytes(item), file.name) for file in self.files for item in file.items]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: build the index."""
        files: dict[MetadataIndex, str] = {r.index: r.storage_data for rank in results for r in rank}
        for name, stored in metadata.state_dict_metadata.items():
            saved = cast(TensorStorageMetadata, stored)
            pieces = tuple(
                SavedPiece(files[MetadataIndex(name, c.offsets)], tuple(c.offsets), tuple(c.sizes))
                for c in saved.chunks
            )
            self.index[name] = SavedTensor(dtype_name(saved.properties.dtype), tuple(saved.size), pieces)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def storage_meta(self) -> None:
        return None


def check_disk(folder: Path, needed: int) -> None:
    """Raise CollectiveError if the disk has too little free space, rather than fail half-way."""
    usage = shutil.disk_usage(folder)
    if usage.total and needed > usage.free:
        raise CollectiveError(
            f"the disk is full: the checkpoint needs {size_text(needed)}, {folder.parent} has "
            f"{size_text(usage.free)} free"
        )


def write_shard(path: Path, entries: Sequence[TensorSource]) -> FileEntry:
    """Write a file of this rank; raise only errors that can be sent between ranks."""
    try:
        return write_tensors(path, entries)
    except (OSError, StrettoError):  # StrettoError: from the source of a streamed tensor
        raise
    except Exception as error:
        raise CollectiveError(f"{path.name}: {type(error).__name__}: {error}") from error


def check_visible(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Check that this rank sees the files of the other ranks."""
    for file, entry in files.items():
        if not (path := folder / file).is_file() or path.stat().st_size != entry.size:
            raise CollectiveError(
                f"{file}, written by another rank, is not visible in {folder} on rank 0; "
                "all ranks must share the folder"
            )


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize


class CheckpointReader(StorageReader):
    """Reads from a checkpoint whose index was already checked."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self._file = {
            MetadataIndex(name, piece.offsets): (piece, saved)
            for name, saved in index.items()
            for piece in saved.pieces
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, saved.dtype)),
                    torch.Size(saved.shape),
                    [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in saved.pieces],
                )
                for name, saved in self.index.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        per_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            per_file[self._file[item.storage_index][0].file].append(item)
        for name, items in per_file.items():
            try:
                with safe_open(plain_file(self.folder, name), framework="pt") as file:
                    for item in items:
                        piece, saved = self._file[item.storage_index]
                        key = piece_key(item.storage_index.fqn, saved.shape, piece.offsets, piece.sizes)
                        view = file.get_slice(key)
                        if (
                            tuple(view.get_shape()) != piece.sizes
                            or view.get_dtype() != DTYPES[saved.dtype][0]
                        ):
                            raise DamageError(
                                f"{key} is not {saved.dtype} of shape {list(piece.sizes)}, as in the index"
                            )
                        box = tuple(
                            slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)
                        )
                        part = view[box] if box else file.get_tensor(key)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(part)
                        planner.commit_tensor(item, target)
            except Exception as error:  # convert it to one that can be sent between ranks
                raise CollectiveError(f"checkpoint {self.folder} is damaged: file {name}: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
