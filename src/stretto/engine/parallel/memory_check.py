"""Checks that weights and optimiser states do not change by a bit from the end of one update to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.engine.parallel.replica_check import checksum, in_memory


class MemoryCheck:
    """Checksums of this rank's tensors, taken at the end of an update and again before the next. The program
    writes to no such tensor in between, so a different checksum shows faulty memory.
    """

    def __init__(self) -> None:
        self._before = dict[str, tuple[Tensor, Tensor]]()  # each tensor with its checksum

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Checksum the tensors that are in memory; from now on only an update may change them."""
        self._before = {name: (t, checksum(t)) for name, t in tensors.items() if in_memory(t)}

    def changed(self, device: torch.device) -> Tensor | float:
        """Return the number of tensors that have changed, on the device, or 0.0 if none is watched."""
        flags = [checksum(tensor) != before for tensor, before in self._before.values()]
        return torch.stack([flag.to(device, non_blocking=True) for flag in flags]).sum() if flags else 0.0

    def first(self) -> str | None:
        """Return the name of the first tensor that has changed, or None. Waits for the device."""
        return next((name for name, (t, before) in self._before.items() if checksum(t) != before), None)

    def end(self) -> None:
        """Discard the checksums, before code that may change the tensors."""
        self._before = {}
