"""Builds the store of a shard for the memory that its table is placed in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from stretto.errors import StrettoError
from stretto.recommender.placement import Place
from stretto.recommender.stores.backing import Home, MappedRows
from stretto.recommender.stores.cached import CachedStore
from stretto.recommender.stores.store import DeviceStore, RowStore, StateSpec


def build_store(
    place: Place,
    rows: int,
    width: int,
    dtype: torch.dtype,
    states: Mapping[str, StateSpec],
    device: torch.device | str,
    cache: float = 0.1,
    folder: str | Path | None = None,
    rank: int = 0,
) -> RowStore:
    """A store of rows, all zeros.

    Args:
        place: in the memory of the device, in that of its host, or in files.
        device: where kernels work.
        cache: part of the rows that the device keeps, more than 0, for `cpu` and `disk`.
        folder: for `disk`, on a local disk.
        rank: this process's, for names of files.

    Raises:
        StrettoError: no folder, or no room in it.
    """
    if place == "device":
        return DeviceStore(rows, width, dtype, states, device)
    if place == "cpu":
        home = Home(rows, width, dtype, states, pin=torch.device(device).type == "cuda")
    elif folder is None:
        raise StrettoError(
            "tables in files need a folder", hint="tables.folder: a folder on a fast local disk"
        )
    else:
        home = MappedRows(rows=rows, width=width, dtype=dtype, states=states, folder=folder, rank=rank)
    return CachedStore(home, device, cache)
