"""A replica's part of each global batch: microbatches on the device, dropout's keys, tokens that count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import (
    current_stream,
    has_streams,
    moved,
    new_stream,
    on_stream,
    recorded_event,
)
from stretto.engine.documents import DocumentStarts
from stretto.engine.models.language import IGNORED
from stretto.engine.parallel.collectives import all_sum
from stretto.run.data.dataset import Batch, indices_after
from stretto.run.data.prefetch import Prefetcher
from stretto.run.train.rank_model import RankModel

Pairs = list[tuple[Tensor, Tensor]]  # inputs and targets of microbatches


class SampleSource(Protocol):
    """Samples by index, such as `run.data.dataset.WindowSamples`."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Samples of one number of tokens."""
        ...


class Closing(SampleSource, Protocol):
    """Samples that a thread reads."""

    def close(self) -> None:
        """Stop the thread."""
        ...


class _Arriving(NamedTuple):
    """A batch on its way to a device, and the mark in the stream of its copies at which it is there."""

    batch: Batch
    there: torch.Event


class _DeviceCopies:
    """Samples that are copied to a device from page-locked memory, on a stream of their own."""

    def __init__(self, samples: SampleSource, device: torch.device) -> None:
        self._samples, self._device = samples, device
        self._stream = new_stream(device)

    def batch(self, indices: Sequence[int]) -> _Arriving:
        """Of several samples; where documents begin stays with the host, which reads it."""
        pinned = self._samples.batch(indices).pinned()
        with on_stream(self._stream):
            copied = pinned.each(lambda values: moved(values, self._device))
        return _Arriving(replace(copied, begins=pinned.begins), recorded_event(self._stream))


class CopiedAhead:
    """Samples in a device's memory, those of the next step read and copied while this one computes.

    Args:
        stride: samples of a step, over all replicas.
    """

    def __init__(self, samples: SampleSource, device: torch.device, stride: int) -> None:
        self._device = device
        self._ahead = Prefetcher(_DeviceCopies(samples, device), stride)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples of a range of indices, for the current stream."""
        batch, there = self._ahead.batch(indices)
        stream: Any = current_stream(self._device)
        stream.wait_event(there)
        for values in (batch.inputs, batch.targets, batch.decoder, batch.lengths):
            if values is not None:
                values.record_stream(stream)
        return batch

    def close(self) -> None:
        """Stop the thread; what it has read is dropped."""
        self._ahead.close()


def read_ahead(samples: SampleSource, model: RankModel) -> Closing:
    """The samples, those of a replica's next step read while it computes this one, and copied to its
    accelerator where that has streams.
    """
    device, stride = model.mesh.device, model.job.global_batch
    return CopiedAhead(samples, device, stride) if has_streams(device) else Prefetcher(samples, stride)


class Batches:
    """Global batches of one job.

    With `dp.mode=server` the first of the ranks that hold the same parameters reads the samples of all of
    them and scatters them; otherwise every rank reads its samples itself.
    """

    def __init__(self, model: RankModel) -> None:
        self.model = model
        self.mesh = model.mesh
        self._microbatches = model.pipeline.program.microbatches
        self._served = model.job.dp.mode == "server" and self.mesh.group("dp") is not None

    def take(
        self, samples: SampleSource, seen: int, keyed: bool, number: int = 0
    ) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
        """This rank's part of its replica's microbatches of the global batch after `seen` samples, on the
        device; and of each microbatch the tokens that count, over all replicas, float64 [microbatches], on
        the device if the samples were there or ranks had to add them up. The replica knows the documents of
        each from then on, or what its decoder reads.

        Args:
            keyed: let dropout know the samples.
            number: of the step in a window of steps without a drain between them.
        """
        mesh, d = self.mesh, self.mesh.index("dp")
        place = self.model.slots(number)

        def to_device(values: Tensor) -> Tensor:
            return moved(values, mesh.device)

        if keyed:
            self.model.samples[place] = self.indices(seen, d)
        group = mesh.group("dp")
        if self._served and group is not None:
            pairs, begins, counts = self._from_server(samples, seen, group)
        else:
            whole = self._read(samples, seen, d)
            counts = self._count([one.targets for one in whole])
            # taken apart on the device: copies from pinned memory do not wait
            pairs = [self.model.share(to_device(one.inputs), to_device(one.targets)) for one in whole]
            begins = [one.begins for one in whole if one.begins is not None]
            self.model.decoders[place] = [
                (to_device(one.decoder), None if one.lengths is None else to_device(one.lengths))
                for one in whole
                if one.decoder is not None
            ]
        self.model.documents[place] = map(DocumentStarts, begins)
        return ([inputs for inputs, _ in pairs], [targets for _, targets in pairs]), counts

    def indices(self, seen: int, replica: int) -> list[range]:
        """The samples of each microbatch of a replica, in the global batch after `seen` samples."""
        m = self._microbatches
        return [
            indices_after(
                seen=seen,
                microbatch=j,
                dp_rank=replica,
                dp=self.mesh.size("dp"),
                micro_batch=self.model.job.micro_batch,
                microbatches=m,
            )
            for j in range(m)
        ]

    def _read(self, samples: SampleSource, seen: int, replica: int) -> list[Batch]:
        return [samples.batch(i) for i in self.indices(seen, replica)]

    def _count(self, targets: list[Tensor]) -> Tensor:
        """Tokens that count of each microbatch, over all replicas; all ranks of one have the targets."""
        count, group = torch.stack([(t != IGNORED).sum() for t in targets]).double(), self.mesh.group("dp")
        return count if group is None else all_sum(moved(count, self.mesh.device), group)

    def _from_server(
        self, samples: SampleSource, seen: int, group: ProcessGroup
    ) -> tuple[Pairs, list[Tensor], Tensor]:
        m = self._microbatches
        empty = torch.zeros(self.model.job.micro_batch, self.model.job.sequence, dtype=torch.int64)
        shape = self.model.share(empty, empty)[0].shape
        counts = torch.zeros(m + 1, dtype=torch.float64, device=self.mesh.device)  # and whether packed
        mine = torch.empty(m, 2, *shape, dtype=torch.int64, device=self.mesh.device)
        begins = torch.empty(m, *empty.shape, dtype=torch.int64, device=self.mesh.device)
        parts, edges = list[Tensor](), list[Tensor]()
        if group.rank() == 0:
            for replica in range(group.size()):
                whole = self._read(samples, seen, replica)
                counted = torch.stack([(one.targets != IGNORED).sum() for one in whole])
                counts[:m] += moved(counted.double(), counts.device)
                shared = [torch.stack(self.model.share(one.inputs, one.targets)) for one in whole]
                parts.append(moved(torch.stack(shared), mine.device))
                if of := [one.begins for one in whole if one.begins is not None]:
                    edges.append(moved(torch.stack(of), begins.device))
            counts[m] = len(edges)
        group.scatter([mine], [parts] if parts else []).wait()
        group.broadcast([counts]).wait()
        packed = bool(counts[m])
        if packed:
            group.scatter([begins], [edges] if edges else []).wait()
        pairs = [(one[0], one[1]) for one in mine]
        return pairs, list(begins.cpu()) if packed else [], counts[:m]
