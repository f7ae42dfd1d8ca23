"""Whether weights and optimiser states keep their bits from the end of one update to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stretto.engine.parallel.replica_check import checksum, in_memory


class MemoryCheck:
    """Checksums of tensors of this rank, taken where an update has ended and once more before the next: what
    differs then, nothing of the program has written.
    """

    def __init__(self) -> None:
        self._before = dict[str, tuple[Tensor, Tensor]]()  # each tensor with its checksum

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the checksums of those that have memory; only an update may change them from now on."""
        self._before = {name: (t, checksum(t)) for name, t in tensors.items() if in_memory(t)}

    def changed(self, device: torch.device) -> Tensor | float:
        """How many tensors have changed since then, as a number on the device; 0.0 where there are none."""
        differ = [checksum(tensor) != before for tensor, before in self._before.values()]
        return torch.stack([one.to(device, non_blocking=True) for one in differ]).sum() if differ else 0.0

    def first(self) -> str | None:
        """The name of the first that has changed. Waits for the device."""
        return next((name for name, (t, before) in self._before.items() if checksum(t) != before), None)

    def end(self) -> None:
        """Forget the checksums: what follows may change the tensors."""
        self._before = {}
