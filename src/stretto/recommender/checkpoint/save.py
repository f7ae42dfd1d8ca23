"""Streams table shards to `engine.checkpoint.save` in boxes of bounded size, each read only when it is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from stretto.engine.checkpoint.shards import Streamed
from stretto.recommender.checkpoint.names import MAP, WEIGHT, part_name, spec_of
from stretto.recommender.placement import TableSpec
from stretto.recommender.stores.cached import CachedStore
from stretto.recommender.tables.pools import LocalShard

BOX = 1 << 26  # bytes in memory at a time

_Boxes = dict[tuple[int, ...], tuple[tuple[int, ...], Callable[[], Tensor]]]


def tensors_to_save(
    held: Sequence[LocalShard], tables: Sequence[TableSpec], box: int = BOX
) -> dict[str, Streamed]:
    """This rank's shards, weights and all optimiser states, for `engine.checkpoint.save`.

    Every rank passes all shards that it holds. Tensors that several ranks hold, such as data-parallel tables
    and the per-row states of column-wise shards, are written once, with their boxes spread over these ranks.

    Args:
        tables: the stored tables (`physical_tables`), in any order.
        box: bytes in memory at a time.
    """
    streamed = dict[str, tuple[torch.dtype, tuple[int, ...], bool, _Boxes]]()
    for one in held:
        shard, hashed = one.shard, one.ids is not None
        rows = one.ids.extent if one.ids is not None else shard.rows
        if one.ids is not None:
            for kind, tensor in one.ids.state().items():
                name = part_name(shard.name, shard.residue, shard.modulus, MAP + kind, True)
                streamed[name] = tensor.dtype, tuple(tensor.shape), False, _whole(tensor)
        if not rows and not hashed:
            continue
        kinds, dim = {WEIGHT: one.store.weight} | one.store.states, spec_of(shard.name, tables).dim
        # States are cut like weights: where both are stored together, reading one passes over the other. The
        # cut depends on the width of the whole table, so it is the same in all column-wise shards.
        many = box // sum((1 if t.dim() == 1 else dim) * t.element_size() for t in kinds.values())
        for kind, tensor in kinds.items():
            name = part_name(shard.name, shard.residue, shard.modulus, kind, hashed)
            wide = () if tensor.dim() == 1 else (dim,)
            away = isinstance(one.store, CachedStore) and one.store.in_files
            boxes = streamed.setdefault(name, (tensor.dtype, (rows, *wide), away, {}))[3]
            boxes.update(_boxes(one, rows, kind, tensor, max(1, many)))
    return {
        name: Streamed(shape, dtype, boxes, away) for name, (dtype, shape, away, boxes) in streamed.items()
    }


def _whole(tensor: Tensor) -> _Boxes:
    return {(0,) * tensor.dim(): (tuple(tensor.shape), lambda: tensor)}


def _boxes(one: LocalShard, rows: int, kind: str, tensor: Tensor, many: int) -> _Boxes:
    columns = () if tensor.dim() == 1 else (one.shard.start,)
    wide = tuple(tensor.shape[1:])
    boxes: _Boxes = {}
    for start in range(0, max(rows, 1), many):  # without rows, still one empty box
        stop = min(start + many, rows)
        boxes[start, *columns] = (stop - start, *wide), partial(_read, one, kind, start, stop)
    return boxes


def _read(one: LocalShard, kind: str, start: int, stop: int) -> Tensor:
    return one.store.read(one.base + start, one.base + stop, (kind,))[kind]
