"""Table shards as `engine.checkpoint.save` takes them: in boxes of a few MiB, read only when they are
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
from stretto.recommender.tables.pools import LocalShard

BOX = 1 << 26  # bytes in memory at a time

_Boxes = dict[tuple[int, ...], tuple[tuple[int, ...], Callable[[], Tensor]]]


def tensors_to_save(
    held: Sequence[LocalShard], tables: Sequence[TableSpec], box: int = BOX
) -> dict[str, Streamed]:
    """What `engine.checkpoint.save` takes of this rank's shards: weights and all states.

    Every rank calls it with all shards that it holds. What several ranks have, as they do of data-parallel
    tables and of per-row states under column splits, is written once, its boxes spread over them.

    Args:
        tables: as they are stored (`physical_tables`), in any order.
    """
    streamed = dict[str, tuple[torch.dtype, tuple[int, ...], _Boxes]]()
    for one in held:
        shard, hashed = one.shard, one.ids is not None
        rows = one.ids.extent if one.ids is not None else shard.rows
        if one.ids is not None:
            for kind, tensor in one.ids.state().items():
                name = part_name(shard.name, shard.residue, shard.modulus, MAP + kind, True)
                streamed[name] = tensor.dtype, tuple(tensor.shape), _whole(tensor)
        if not rows and not hashed:
            continue
        kinds, dim = {WEIGHT: one.store.weight} | one.store.states, spec_of(shard.name, tables).dim
        # states are cut as weights are: where they lie together, reading one goes over both; and by the whole
        # table's width, so that all shards of its columns cut alike
        many = box // sum((1 if t.dim() == 1 else dim) * t.element_size() for t in kinds.values())
        for kind, tensor in kinds.items():
            name = part_name(shard.name, shard.residue, shard.modulus, kind, hashed)
            wide = () if tensor.dim() == 1 else (dim,)
            boxes = streamed.setdefault(name, (tensor.dtype, (rows, *wide), {}))[2]
            boxes.update(_boxes(one, rows, kind, tensor, max(1, many)))
    return {name: Streamed(shape, dtype, boxes) for name, (dtype, shape, boxes) in streamed.items()}


def _whole(tensor: Tensor) -> _Boxes:
    return {(0,) * tensor.dim(): (tuple(tensor.shape), lambda: tensor)}


def _boxes(one: LocalShard, rows: int, kind: str, tensor: Tensor, many: int) -> _Boxes:
    columns = () if tensor.dim() == 1 else (one.shard.start,)
    wide = tuple(tensor.shape[1:])
    boxes: _Boxes = {}
    for start in range(0, max(rows, 1), many):  # no rows at all: still a tensor, by its name
        stop = min(start + many, rows)
        boxes[start, *columns] = (stop - start, *wide), partial(_read, one, kind, start, stop)
    return boxes


def _read(one: LocalShard, kind: str, start: int, stop: int) -> Tensor:
    return one.store.read(one.base + start, one.base + stop, (kind,))[kind]
