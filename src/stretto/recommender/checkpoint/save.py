"""Streams table shards to `engine.checkpoint.save` in boxes of bounded size, each read only when it is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from stretto.engine.checkpoint.shards import Streamed
from stretto.recommender.checkpoint.names import MAP, WEIGHT, find_table, part_name
from stretto.recommender.placement import TableSpec
from stretto.recommender.stores.cached import CachedStore
from stretto.recommender.tables.pools import LocalShard

BOX = 1 << 26  # bytes in memory at a time

_Boxes = dict[tuple[int, ...], tuple[tuple[int, ...], Callable[[], Tensor]]]


def tensors_to_save(
    shards: Sequence[LocalShard], tables: Sequence[TableSpec], box: int = BOX
) -> dict[str, Streamed]:
    """Return this rank's shards, weights and all optimiser states, for `engine.checkpoint.save`.

    Every rank passes all of its shards. Tensors that several ranks have, such as data-parallel tables and the
    per-row states of column-wise shards, are written once, with their boxes spread over these ranks.

    Args:
        tables: the stored tables (`physical_tables`), in any order.
        box: bytes in memory at a time.
    """
    streamed = dict[str, tuple[torch.dtype, tuple[int, ...], bool, _Boxes]]()
    for local in shards:
        shard, store = local.shard, local.store
        rows = shard.rows if local.ids is None else local.ids.extent
        if local.ids is not None:
            for kind, tensor in local.ids.state().items():
                name = part_name(shard.name, shard.residue, shard.modulus, MAP + kind, True)
                boxes: _Boxes = {(0,) * tensor.dim(): (tuple(tensor.shape), lambda tensor=tensor: tensor)}
                streamed[name] = tensor.dtype, tuple(tensor.shape), False, boxes
        elif not rows:
            continue
        kinds, dim = {WEIGHT: store.weight} | store.states, find_table(shard.name, tables).dim
        # States are cut like weights: if both are stored together, reading one passes over the other. The
        # cut depends on the width of the unsharded table, so it is the same in all column-wise shards.
        box_rows = box // sum((1 if t.dim() == 1 else dim) * t.element_size() for t in kinds.values())
        on_disk = isinstance(store, CachedStore) and store.in_files
        for kind, tensor in kinds.items():
            name = part_name(shard.name, shard.residue, shard.modulus, kind, local.ids is not None)
            columns = () if tensor.dim() == 1 else (dim,)
            boxes = streamed.setdefault(name, (tensor.dtype, (rows, *columns), on_disk, {}))[3]
            origin = () if tensor.dim() == 1 else (shard.start,)
            for start in range(0, max(rows, 1), max(1, box_rows)):  # without rows, still one empty box
                stop = min(start + max(1, box_rows), rows)
                size = (stop - start, *tensor.shape[1:])
                boxes[start, *origin] = size, partial(_read_box, local, kind, start, stop)
    return {
        name: Streamed(shape, dtype, boxes, on_disk)
        for name, (dtype, shape, on_disk, boxes) in streamed.items()
    }


def _read_box(local: LocalShard, kind: str, start: int, stop: int) -> Tensor:
    return local.store.read(local.base + start, local.base + stop, (kind,))[kind]
