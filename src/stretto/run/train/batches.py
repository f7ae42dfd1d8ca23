"""This rank's part of each global batch: microbatches on the device, keys of dropout, tokens that count."""

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
    """A batch on its way to a device, and the event in the stream of its copies at which it has arrived."""

    batch: Batch
    arrival: torch.Event


class _DeviceCopies:
    """Samples that are copied to a device from page-locked memory, on a stream of their own."""

    def __init__(self, samples: SampleSource, device: torch.device) -> None:
        self._samples, self._device = samples, device
        self._stream = new_stream(device)

    def batch(self, indices: Sequence[int]) -> _Arriving:
        """Start to copy some samples; where documents begin stays on the host, which reads it."""
        pinned = self._samples.batch(indices).pinned()
        with on_stream(self._stream):
            copied = pinned.each(lambda values: moved(values, self._device))
        return _Arriving(replace(copied, begins=pinned.begins), recorded_event(self._stream))


class DevicePrefetcher:
    """Samples in a device's memory; those of the next step are read and copied while this one computes.

    Args:
        stride: samples of a step, over all replicas.
    """

    def __init__(self, samples: SampleSource, device: torch.device, stride: int) -> None:
        self._device = device
        self._ahead = Prefetcher(_DeviceCopies(samples, device), stride)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples of a range of indices, for the current stream."""
        batch, arrival = self._ahead.batch(indices)
        stream: Any = current_stream(self._device)
        stream.wait_event(arrival)
        for values in (batch.inputs, batch.targets, batch.decoder, batch.lengths):
            if values is not None:
                values.record_stream(stream)
        return batch

    def close(self) -> None:
        """Stop the thread; what it has read is dropped."""
        self._ahead.close()


def read_ahead(samples: SampleSource, model: RankModel) -> Closing:
    """Samples of which the next step's are read while this one computes, and copied to the accelerator if it
    has streams.
    """
    device, stride = model.mesh.device, model.job.global_batch
    return DevicePrefetcher(samples, device, stride) if has_streams(device) else Prefetcher(samples, stride)


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
        self, samples: SampleSource, first: int, keyed: bool, number: int = 0
    ) -> tuple[tuple[list[Tensor], list[Tensor]], Tensor]:
        """Load this rank's part of the global batch that begins at sample `first`. Sets the documents of each
        microbatch, or what a decoder reads, in the model.

        Args:
            keyed: set the samples too, on which dropout depends.
            number: of the step in a window of steps without a drain between them.

        Returns:
            Inputs and targets of each microbatch, on the device; and the tokens of each that the loss counts,
            over all replicas, float64 [microbatches], on the device if the samples were there or ranks had to
            add them up.
        """
        mesh, d = self.mesh, self.mesh.index("dp")
        place = self.model.slots(number)

        def to_device(values: Tensor) -> Tensor:
            return moved(values, mesh.device)

        if keyed:
            self.model.samples[place] = self.indices(first, d)
        group = mesh.group("dp")
        if self._served and group is not None:
            pairs, begins, counts = self._from_server(samples, first, group)
        else:
            batches = self._read(samples, first, d)
            counts = self._count([batch.targets for batch in batches])
            # taken apart on the device: copies from pinned memory do not wait
            pairs = [self.model.share(to_device(b.inputs), to_device(b.targets)) for b in batches]
            begins = [batch.begins for batch in batches if batch.begins is not None]
            self.model.decoders[place] = [
                (to_device(b.decoder), None if b.lengths is None else to_device(b.lengths))
                for b in batches
                if b.decoder is not None
            ]
        self.model.documents[place] = map(DocumentStarts, begins)
        return ([inputs for inputs, _ in pairs], [targets for _, targets in pairs]), counts

    def indices(self, first: int, replica: int) -> list[range]:
        """The samples of each microbatch of a replica, in the global batch that begins at sample `first`."""
        m = self._microbatches
        return [
            indices_after(
                samples_before=first,
                microbatch=j,
                dp_rank=replica,
                dp=self.mesh.size("dp"),
                micro_batch=self.model.job.micro_batch,
                microbatches=m,
            )
            for j in range(m)
        ]

    def _read(self, samples: SampleSource, first: int, replica: int) -> list[Batch]:
        return [samples.batch(i) for i in self.indices(first, replica)]

    def _count(self, targets: list[Tensor]) -> Tensor:
        """The tokens of each microbatch that the loss counts, over all replicas. Collective over dp."""
        count, group = torch.stack([(t != IGNORED).sum() for t in targets]).double(), self.mesh.group("dp")
        return count if group is None else all_sum(moved(count, self.mesh.device), group)

    def _from_server(
        self, samples: SampleSource, first: int, group: ProcessGroup
    ) -> tuple[Pairs, list[Tensor], Tensor]:
        m = self._microbatches
        empty = torch.zeros(self.model.job.micro_batch, self.model.job.sequence, dtype=torch.int64)
        shape = self.model.share(empty, empty)[0].shape
        counts = torch.zeros(m + 1, dtype=torch.float64, device=self.mesh.device)  # and whether packed
        received = torch.empty(m, 2, *shape, dtype=torch.int64, device=self.mesh.device)
        begins = torch.empty(m, *empty.shape, dtype=torch.int64, device=self.mesh.device)
        parts, edges = list[Tensor](), list[Tensor]()
        if group.rank() == 0:
            for replica in range(group.size()):
                batches = self._read(samples, first, replica)
                counted = torch.stack([(batch.targets != IGNORED).sum() for batch in batches])
                counts[:m] += moved(counted.double(), counts.device)
                shared = [torch.stack(self.model.share(b.inputs, b.targets)) for b in batches]
                parts.append(moved(torch.stack(shared), received.device))
                if packed := [batch.begins for batch in batches if batch.begins is not None]:
                    edges.append(moved(torch.stack(packed), begins.device))
            counts[m] = len(edges)
        group.scatter([received], [parts] if parts else []).wait()
        group.broadcast([counts]).wait()
        is_packed = bool(counts[m])
        if is_packed:
            group.scatter([begins], [edges] if edges else []).wait()
        pairs = [(pair[0], pair[1]) for pair in received]
        return pairs, list(begins.cpu()) if is_packed else [], counts[:m]
