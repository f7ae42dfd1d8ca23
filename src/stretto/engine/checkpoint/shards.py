"""Adapters that let torch.distributed.checkpoint save and load local tensors by their places.

The protocol is torch's `_Checkpointable`: what to write, what to read, and where a box lies locally. With it
the library distributes the writing over replicas and works out, between any two layouts, which part of which
saved box each rank needs.
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
    """A tensor to save whose boxes are fetched one by one as they are written, so that it is never in memory
    as a whole. A box that several ranks have is written by one of them.

    boxes: of this rank, by offsets: the sizes, and a function that returns the values, or consecutive rows of
        them one after the other.
    away: whether the values lie in files.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Mapping[tuple[int, ...], tuple[tuple[int, ...], Callable[[], Tensor | Iterable[Tensor]]]]
    away: bool = False

    @property
    def sizes(self) -> tuple[object, ...]:
        """Type, shapes and places of all boxes, by which two saves are divided alike."""
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
    """The pieces of one tensor that this rank holds; `local` is read and written in place.

    Pieces without elements are left out, since one could have the offsets of another piece. That may leave
    none.
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
        """As of `Streamed`."""
        return self.shape, self.local.dtype, self.pieces, self.away

    @property
    def padded(self) -> bool:
        """Whether the local tensor has elements that belong to no piece."""
        return sum(prod(p.sizes) for p in self.pieces) < self.local.numel()

    def zero(self) -> None:
        """Write zeros to the local tensor."""
        at_hand(self.local, change=True).zero_()

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """An item for each box that this rank writes."""
        items: dict[tuple[int, ...], WriteItem] = {}
        for piece in self.pieces:
            if piece.owned:
                data = TensorWriteData(_chunk(piece), TensorProperties(dtype=self.local.dtype), self.size())
                index = MetadataIndex(fqn, piece.offsets)
                items[piece.offsets] = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
        return list(items.values())

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """All boxes held here, including copies that other ranks write."""
        return [_chunk(piece) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex, change: bool = False) -> Tensor:
        """The box with the index's offsets, as a view of the local tensor; `change`: to be written to. A
        tensor in a file is read, and the view is then valid until the next call.
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
        StrettoError: a piece does not lie inside its full or its local tensor.
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
    """Whether a box of a flat tensor lies inside it: its first and last element do, its strides are those of
    consecutive rows, and the flat tensor is contiguous.
    """
    strides = piece.strides
    if strides is None or len(strides) != len(piece.sizes) or len(piece.local) != 1 or local.dim() != 1:
        return False
    if not prod(piece.sizes):
        return True
    reach = 1  # elements from the first of an inner box to its last
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
    """Plans the writing of Shards, and checks that the boxes of all ranks tile every tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The library's plan, after a check that names the tensor. The library's own check is skipped for one
        process, and names none.
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
                    hint="all ranks must keep a tensor in the same type",
                )
            shape = shapes.setdefault(name, tuple(data.size))
            if shape != tuple(data.size):
                raise StrettoError(
                    f"tensor {name} has shape {list(shape)} on one rank, {list(data.size)} on another",
                    hint="all ranks must place the same plain model",
                )
            boxes.setdefault(name, {})[tuple(data.chunk.offsets)] = (data.chunk.offsets, data.chunk.sizes)
        for name, of_tensor in boxes.items():
            if problem := untiled(shapes[name], list(of_tensor.values())):
                raise StrettoError(
                    f"tensor {name} of shape {list(shapes[name])}: {problem}",
                    hint="over all ranks, the owned pieces of a tensor must cover it exactly once",
                )
        return super().create_global_plan(all_plans)


class ShardsLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of Shards; only tensors are ever read."""

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
