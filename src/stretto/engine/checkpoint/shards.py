"""Adapters with which torch.distributed.checkpoint saves and loads local tensors by their placements.

They implement torch's `_Checkpointable` protocol: the boxes to write, the boxes to read, and the local values
of a box. The library then divides the writing among replicas, and determines for any two layouts the parts of
saved boxes that each rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from stretto.engine.checkpoint.index import Box, untiled
from stretto.engine.offload.tensor_files import at_hand, is_away
from stretto.engine.parallel.fragment import ShardPlacement, TensorBox
from stretto.errors import StrettoError

Tensors = Mapping[str, tuple[Tensor, ShardPlacement]]


@dataclass(frozen=True)
class Streamed:
    """A tensor to save whose boxes are fetched one by one while they are written, so that it is never
    completely in memory. A box that several ranks have is written by one of them.

    boxes: this rank's boxes by offsets: the sizes, and a function that returns the values, or yields
        consecutive rows of them.
    away: True if the values are in files.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Mapping[tuple[int, ...], tuple[tuple[int, ...], Callable[[], Tensor | Iterable[Tensor]]]]
    away: bool = False

    @property
    def sizes(self) -> tuple[object, ...]:
        """Dtype, shapes and offsets of all boxes; if they are equal, two saves are divided into equal
        files.
        """
        boxes = [(at, sizes) for at, (sizes, _) in self.boxes.items()]
        return self.shape, self.dtype, boxes, self.away

    def size(self) -> torch.Size:
        """Shape of the full tensor."""
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        items = list[WriteItem]()
        for offsets, (sizes, _) in self.boxes.items():
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size())
            items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor | Iterable[Tensor]:
        return self.boxes[tuple(index.offset or ())][1]()


Saved = Mapping[str, tuple[Tensor, ShardPlacement] | Streamed]


class Shards:
    """This rank's pieces of one tensor; `local` is read and written in place.

    Empty pieces are left out, since they could have the offsets of another piece; possibly none remain.
    """

    def __init__(self, local: Tensor, placed: ShardPlacement) -> None:
        self.local = local.detach()
        self.shape = placed.shape
        self.away = is_away(local)
        self.pieces = [p for p in placed.pieces if prod(p.sizes)] if prod(placed.shape) else placed.pieces[:1]

    def size(self) -> torch.Size:
        """Shape of the full tensor, which the library compares with the saved one."""
        return torch.Size(self.shape)

    @property
    def sizes(self) -> tuple[object, ...]:
        """Like `Streamed.sizes`."""
        return self.shape, self.local.dtype, self.pieces, self.away

    @property
    def padded(self) -> bool:
        """True if the local tensor has elements that belong to no piece."""
        return sum(prod(p.sizes) for p in self.pieces) < self.local.numel()

    def zero(self) -> None:
        """Write zeros to the local tensor."""
        at_hand(self.local, change=True).zero_()

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return an item for each box that this rank may write."""
        items: dict[tuple[int, ...], WriteItem] = {}
        for piece in self.pieces:
            if piece.owned:
                data = TensorWriteData(_chunk(piece), TensorProperties(dtype=self.local.dtype), self.size())
                index = MetadataIndex(fqn, piece.offsets)
                items[piece.offsets] = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
        return list(items.values())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return all boxes of this rank, including replicas that other ranks write."""
        return [_chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex, change: bool = False) -> Tensor:
        """Return the box with the index's offsets as a view of the local tensor, which is modified if
        `change`.

        For a tensor in a file the view is valid until the next call.
        """
        local = at_hand(self.local, change)
        at = tuple(index.offset or ())
        hint = index.index
        if hint is not None and hint < len(self.pieces) and self.pieces[hint].offsets == at:
            return self.pieces[hint].of_local(local)
        return next(p for p in self.pieces if p.offsets == at).of_local(local)


State = Mapping[str, Shards | Streamed]


def _chunk(piece: TensorBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))


def shards(tensors: Tensors) -> dict[str, Shards]:
    """Wrap tensors for the library.

    Raises:
        StrettoError: a piece exceeds its full or its local tensor.
    """
    return {name: _checked(name, local, placed) for name, (local, placed) in tensors.items()}


def _checked(name: str, local: Tensor, placed: ShardPlacement) -> Shards:
    shape = tuple(local.shape)
    for piece in placed.pieces:
        if not _inside(piece.offsets, piece.sizes, placed.shape):
            raise _outside(name, piece, "full", piece.offsets, placed.shape)
        if not (_inside(piece.local, piece.sizes, shape) if piece.strides is None else _fits(piece, local)):
            raise _outside(name, piece, "local", piece.local, shape)
    return Shards(local, placed)


def _inside(start: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return len(start) == len(sizes) == len(shape) and all(
        o >= 0 and o + n <= s for o, n, s in zip(start, sizes, shape, strict=True)
    )


def _fits(piece: TensorBox, local: Tensor) -> bool:
    """True if a box lies inside a contiguous flat tensor: its first and last element do, and its strides are
    those of consecutive rows.
    """
    strides = piece.strides
    if strides is None or len(strides) != len(piece.sizes) or len(piece.local) != 1 or local.dim() != 1:
        return False
    if not prod(piece.sizes):
        return True
    reach = 1  # elements from the first to the last of an inner box, inclusive
    for n, step in zip(reversed(piece.sizes), reversed(strides), strict=True):
        if n > 1 and step < reach:
            return False
        reach += (n - 1) * step
    first = piece.local[0]
    return first >= 0 and first + reach <= local.numel() and (is_away(local) or local.is_contiguous())


def _outside(
    name: str, piece: TensorBox, which: str, start: Sequence[int], shape: tuple[int, ...]
) -> StrettoError:
    strides = "" if piece.strides is None else f" with strides {list(piece.strides)}"
    return StrettoError(
        f"tensor {name}: piece at {list(start)} of size {list(piece.sizes)}{strides} lies outside the "
        f"{which} tensor of shape {list(shape)}",
        hint="its placement does not belong to this tensor",
    )


class ShardsSavePlanner(DefaultSavePlanner):
    """Plans the writing of `Shards`, and checks that the boxes of all ranks tile every tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the library's plan, after a check whose errors name the tensor.

        The library's own check names none, and is skipped for a single process.
        """
        boxes: dict[str, dict[tuple[int, ...], Box]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        types: dict[str, torch.dtype] = {}
        for item in (item for plan in all_plans for item in plan.items):
            name, data = item.index.fqn, item.tensor_data
            assert data is not None, "only tensors are ever planned"
            dtype = types.setdefault(name, data.properties.dtype)
            if dtype != data.properties.dtype:
                raise StrettoError(
                    f"tensor {name} is {dtype} on one rank, {data.properties.dtype} on another",
                    hint="a tensor must have the same dtype on all ranks",
                )
            shape = shapes.setdefault(name, tuple(data.size))
            if shape != tuple(data.size):
                raise StrettoError(
                    f"tensor {name} has shape {list(shape)} on one rank, {list(data.size)} on another",
                    hint="all ranks must save the same plain model",
                )
            boxes.setdefault(name, {})[tuple(data.chunk.offsets)] = (data.chunk.offsets, data.chunk.sizes)
        for name, of_tensor in boxes.items():
            if problem := untiled(shapes[name], list(of_tensor.values())):
                raise StrettoError(
                    f"tensor {name} of shape {list(shapes[name])}: {problem}",
                    hint="the owned pieces of all ranks must cover a tensor exactly once",
                )
        return super().create_global_plan(all_plans)


class ShardsLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of `Shards`; only tensors are read."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index, change=True)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn} is not a tensor")
