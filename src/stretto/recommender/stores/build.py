"""Builds the store of a pool in the memory that its tables are placed in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from stretto.engine.device import on_accelerator
from stretto.errors import StrettoError
from stretto.recommender.placement import Place
from stretto.recommender.stores.backing import FileRows, HostRows
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
        place: in device memory, in host memory, or in a file.
        device: where the kernels run.
        cache: share of the rows kept on the device, above 0, for `cpu` and `disk`.
        folder: for `disk`, on a local disk.
        rank: of this process, for file names.

    Raises:
        StrettoError: no folder, or not enough space in it.
    """
    if place == "device":
        return DeviceStore(rows, width, dtype, states, device)
    if place == "cpu":
        backing = HostRows(rows, width, dtype, states, pin=on_accelerator(torch.device(device)))
    elif folder is None:
        raise StrettoError(
            "tables in files need a folder", hint="tables.folder: a folder on a fast local disk"
        )
    else:
        backing = FileRows(rows=rows, width=width, dtype=dtype, states=states, folder=folder, rank=rank)
    return CachedStore(backing, device, cache)
