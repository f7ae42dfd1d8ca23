"""Synchronises buffers of a module, such as the running statistics of BatchNorm, on data-parallel ranks.

Follows torch's DistributedDataParallel (`forward_sync_buffers`, torch/nn/parallel/distributed.py): the first
rank's values are broadcast before a forward, in training and evaluation, unless nothing can have changed them
since, and not between the forwards that one step accumulates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.mesh import Mesh
from stretto.errors import StrettoError

_COPIES = "cp-dp"


class SharedBuffers:
    """The buffers of a module on the data-parallel ranks of a mesh."""

    def __init__(self, module: nn.Module, mesh: Mesh) -> None:
        self._module, self._group = module, mesh.group(_COPIES)
        self._first = mesh.index(_COPIES) == 0
        self._stale = True

    def before_forward(self) -> None:
        """Copy the first rank's values if they may differ. Collective."""
        if self._stale:
            self.broadcast()

    def after_forward(self, accumulating: bool) -> None:
        """Record that a forward may have changed the values, unless another one of the same step follows."""
        self._stale = not accumulating and (self._module.training or torch.is_grad_enabled())

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copy the first rank's values, all in one message. Collective."""
        # collected anew each time: modules may replace their buffers. Large elements come first, so that
        # each buffer is aligned within the message
        buffers = sorted(self._module.buffers(), key=lambda buffer: -buffer.element_size())
        if self._group is None or not buffers:
            return
        parts = [buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
        message = torch.cat(parts)
        self._group.broadcast([message]).wait()
        if self._first:
            return
        received = message.split([part.numel() for part in parts])
        values = [part.view(b.dtype).view(b.shape) for part, b in zip(received, buffers, strict=True)]
        self._take(buffers, values, [part.ne(old) for part, old in zip(received, parts, strict=True)])

    def _take(self, buffers: Sequence[Tensor], values: Sequence[Tensor], changed: Sequence[Tensor]) -> None:
        """Copy the values into the buffers that they differ from.

        An earlier forward may have saved a buffer for its backward. That is harmless if the value does not
        change, or if the buffer belongs to a norm, whose backward in training reads none; any other change is
        visible to autograd, which then rejects that backward.
        """
        of_norms = {
            id(buffer)
            for module in self._module.modules()
            if isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False)
        }
        norms = [at for at, buffer in enumerate(buffers) if id(buffer) in of_norms]
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers[at] for at in norms)):
            for at in norms:
                buffers[at].copy_(values[at])
        others = [at for at in range(len(buffers)) if id(buffers[at]) not in of_norms]
        if not others:
            return
        differ = torch.stack([changed[at].any() for at in others]).tolist()  # one wait for the device
        for at, different in zip(others, differ, strict=True):
            if different:
                buffers[at].copy_(values[at])


def check_alike(module: nn.Module, mesh: Mesh) -> None:
    """Check that data-parallel ranks have the same parameters and buffers, by name, shape and type.
    Collective.

    Raises:
        StrettoError: on all ranks; names the first tensor that differs.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    descriptions = {name: f"{tuple(t.shape)} {t.dtype}" for name, t in tensors}
    every = gather_json(descriptions)
    for ranks in mesh.layout.groups(_COPIES):
        for rank in ranks[1:]:
            for name in every[ranks[0]] | every[rank]:
                first, other = (every[r].get(name, "not there") for r in (ranks[0], rank))
                if first != other:
                    raise StrettoError(
                        f"{name} is {first} on rank {ranks[0]} and {other} on rank {rank}",
                        hint="build the same module on all data-parallel ranks",
                    )
