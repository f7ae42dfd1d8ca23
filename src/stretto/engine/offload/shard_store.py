"""Parameter shards that are on the device only while in use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stretto.engine.device import CopyStreams, current_stream, on_accelerator, on_stream, recorded_event
from stretto.engine.offload.ring import PrefetchRing
from stretto.engine.offload.scratch import Scratch
from stretto.engine.offload.tensor_files import detached


@dataclass(kw_only=True)
class _Shard:
    """A tensor in the store.

    host: current copy in host memory, if any.
    on_device: current copy on the device, if any.
    event: completion of the last copy between host and device.
    """

    shape: torch.Size
    dtype: torch.dtype
    host: Tensor | None = None
    on_device: Tensor | None = None
    event: torch.Event | None = None


class _Part:
    """Elements [start, stop) of a tensor in a store's files."""

    def __init__(self, store: ShardStore, key: int, span: tuple[int, int]) -> None:
        self._store = weakref.ref(store)
        self._key, self._span = key, span

    def access(self, change: bool) -> Tensor | None:
        store = self._store()
        return None if store is None else store.access(self._key, change)[slice(*self._span)]


class ShardStore:
    """Tensors by integer key, copied to the device for use and freed afterwards, like in ZeRO-Infinity
    (Rajbhandari et al. 2021). Not thread-safe.

    Args:
        device: device on which the tensors are used. On the CPU they are used in place, without a copy.
        path: folder for files that store the tensors, with only a few in host memory at a time; by default
            all tensors are in host memory.
        rank: rank in the name of the subfolder.
        slots: with files, maximum number of tensors in host memory: in use, prefetched or being written.
    """

    def __init__(
        self, device: torch.device, path: str | Path | None = None, rank: int = 0, slots: int = 4
    ) -> None:
        self._device, self._copies = device, on_accelerator(device)
        self._shards = dict[int, _Shard]()
        self._streams = CopyStreams()
        self._scratch: Scratch | None = None
        self._parts = list[_Part]()
        self._looked: tuple[int, Tensor] | None = None
        self._changed = False
        self.ring: PrefetchRing | None = None
        if path is not None:
            self._scratch = Scratch(path, rank)
            self.ring = PrefetchRing(self._scratch.folder, "parameters of unit", slots, self._copies)

    def add(self, key: int, tensor: Tensor) -> None:
        """Copy a tensor into the store, off the device.

        Raises:
            StrettoError: not enough disk space.
        """
        shard = self._shards[key] = _Shard(shape=tensor.shape, dtype=tensor.dtype)
        if self.ring is not None and tensor.nbytes:
            memory = self.ring.add(key, tensor.nbytes)
            memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            self.ring.put(key)
        else:
            shard.host = tensor.to("cpu", copy=True)
            if self._copies:
                shard.host = shard.host.pin_memory()

    def start_fetch(self, key: int) -> None:
        """Start copying a tensor from its file to host memory, or from host memory to the device."""
        self._let_look_go()
        shard = self._shards[key]
        if self.ring is not None and shard.host is None:
            self.ring.start_fetch(key)
        elif shard.on_device is None:
            self._start_copy(shard)

    def fetch(self, key: int) -> Tensor:
        """Return a tensor on the device, which the caller uses until `release` or `put`.

        Raises:
            OffloadError: reading the tensor failed, or a preceding write did.
        """
        self._let_look_go()
        shard = self._shards[key]
        if shard.on_device is None:
            if shard.host is None:
                shard.host = self._view(self._files.fetch(key), shard)
            self._start_copy(shard)
        assert shard.on_device is not None
        if shard.event is not None:
            current_stream(self._device).wait_event(shard.event)
            shard.on_device.record_stream(current_stream(self._device))
        return shard.on_device

    def blank(self, key: int) -> Tensor:
        """Like `fetch`, but uninitialised: the caller overwrites the entire tensor."""
        self._let_look_go()
        shard = self._shards[key]
        if shard.on_device is None:
            if shard.host is None:
                shard.host = self._view(self._files.blank(key), shard)
            shard.on_device = (
                torch.empty_like(shard.host, device=self._device) if self._copies else shard.host
            )
            shard.event = None
        return shard.on_device

    def put(self, key: int) -> None:
        """End the use of a modified tensor and write it back."""
        shard = self._shards[key]
        if self._copies:
            assert shard.on_device is not None
            assert shard.host is not None
            side = self._streams.to_host(self._device)
            side.wait_stream(current_stream(self._device))
            with on_stream(side):
                shard.host.copy_(shard.on_device, non_blocking=True)
                shard.on_device.record_stream(side)
            shard.event = recorded_event(side)
        self._free_copies(key, shard, changed=True)

    def release(self, key: int) -> None:
        """End the use of an unmodified tensor."""
        self._free_copies(key, self._shards[key], changed=False)

    def parts(self, key: int, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return elements [start, stop) of a flat tensor for a checkpoint, while the tensor is not in use.

        They are views of host memory, or tensors that are away (`tensor_files.at_hand`).
        """
        shard = self._shards[key]
        if shard.host is not None:
            return [shard.host[start:stop] for start, stop in spans]
        parts = [_Part(self, key, span) for span in spans]
        self._parts += parts  # alive as long as the store
        sizes = [torch.empty(stop - start, dtype=shard.dtype, device="meta") for start, stop in spans]
        return [detached(size, part) for size, part in zip(sizes, parts, strict=True)]

    def access(self, key: int, change: bool) -> Tensor:
        """Return the values of a tensor in a file, valid until the next call for another tensor or any other
        use of the store.

        Args:
            change: the caller modifies them.
        """
        if self._looked is None or self._looked[0] != key:
            self._let_look_go()
            self._looked = key, self._view(self._files.fetch(key), self._shards[key])
        self._changed |= change
        return self._looked[1]

    def _let_look_go(self) -> None:
        """End the access that `access` started, writing the tensor back if it was modified."""
        if self._looked is not None:
            key, self._looked = self._looked[0], None
            (self._files.put if self._changed else self._files.release)(key)
            self._changed = False

    def close(self) -> None:
        """Remove the files and the tensors stored in them."""
        if self.ring is not None and self._scratch is not None:
            self.ring.close()
            self._scratch.close()

    # ------------------------------------------------------------------ copies

    @property
    def _files(self) -> PrefetchRing:
        assert self.ring is not None
        return self.ring

    def _view(self, memory: Tensor, shard: _Shard) -> Tensor:
        size = shard.shape.numel() * shard.dtype.itemsize
        return memory[:size].view(shard.dtype).view(shard.shape)

    def _start_copy(self, shard: _Shard) -> None:
        assert shard.host is not None
        if not self._copies:
            shard.on_device = shard.host
            return
        side = self._streams.to_device(self._device)
        if shard.event is not None:  # an earlier `put` of this tensor
            side.wait_event(shard.event)
        with on_stream(side):
            shard.on_device = shard.host.to(self._device, non_blocking=True)
        shard.event = recorded_event(side)

    def _free_copies(self, key: int, shard: _Shard, changed: bool) -> None:
        """Free the device copy, and the host copy of a tensor that is stored in a file."""
        shard.on_device = None
        if self.ring is None or not shard.shape.numel():
            return
        if shard.event is not None:  # the host memory may be reused for another tensor
            shard.event.synchronize()
            shard.event = None
        shard.host = None
        if changed:
            self.ring.put(key)
        else:
            self.ring.release(key)
