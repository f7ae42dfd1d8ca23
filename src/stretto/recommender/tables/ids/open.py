"""The fastest map of ids that a device has."""

from __future__ import annotations

import torch

from stretto.recommender.tables.ids.entries import IdMap
from stretto.recommender.tables.ids.sorted import SortedMap


def open_map(device: torch.device | str = "cpu", compiled: bool | None = None) -> IdMap:
    """A map for ids on `device`: open addressing in compiled code on a CPU where numba is installed, sorted
    tensors elsewhere.

    Args:
        compiled: which of the two; None: the faster one that works.
    """
    if compiled or (compiled is None and torch.device(device).type == "cpu"):
        try:
            from stretto.recommender.tables.ids.compiled import CompiledMap

            return CompiledMap()
        except ImportError:
            if compiled:
                raise
    return SortedMap(device)
