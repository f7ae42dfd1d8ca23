"""Shards of tables as what `checkpoint.save` takes: in boxes of some MiB, read when they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from stretto.checkpoint.shards import Streamed
from stretto.checkpoint.tables.names import WEIGHT, part_name, spec_of
from stretto.layout.tables import TableSpec
from stretto.parallel.tables.held import HeldShard

BOX = 1 << 26  # bytes in memory at a time

_Boxes = dict[tuple[int, ...], tuple[tuple[int, ...], Callable[[], Tensor]]]


def tensors_to_save(
    held: Sequence[HeldShard], tables: Sequence[TableSpec], box: int = BOX
) -> dict[str, Streamed]:
    """What `checkpoint.save` takes of this rank's shards, weights and all states, beside other tensors.

    Every rank calls it with all shards that it holds. What several ranks have, as they do of data-parallel
    tables and of per-row states under column splits, is written once, its boxes spread over them.

    Args:
        tables: as they are stored (`physical_tables`), in any order.
    """
    found = dict[str, tuple[torch.dtype, tuple[int, ...], _Boxes]]()
    for one in held:
        shard = one.shard
        if not shard.rows:
            continue
        for kind, tensor in ({WEIGHT: one.store.weight} | one.store.states).items():
            name = part_name(shard.name, shard.residue, shard.modulus, kind)
            wide = () if tensor.dim() == 1 else (spec_of(shard.name, tables).dim,)
            boxes = found.setdefault(name, (tensor.dtype, (shard.rows, *wide), {}))[2]
            boxes.update(_boxes(one, kind, tensor, box))
    return {name: Streamed(shape, dtype, boxes) for name, (dtype, shape, boxes) in found.items()}


def _boxes(one: HeldShard, kind: str, tensor: Tensor, box: int) -> _Boxes:
    columns = () if tensor.dim() == 1 else (one.shard.start,)
    wide = tuple(tensor.shape[1:])
    rows = max(1, box // (prod(wide) * tensor.element_size()))
    found: _Boxes = {}
    for start in range(0, one.shard.rows, rows):
        stop = min(start + rows, one.shard.rows)
        found[start, *columns] = (stop - start, *wide), partial(_read, one, kind, start, stop)
    return found


def _read(one: HeldShard, kind: str, start: int, stop: int) -> Tensor:
    return one.store.read(one.base + start, one.base + stop, (kind,))[kind]
