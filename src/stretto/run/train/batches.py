"""A replica's part of each global batch: microbatches on the device, dropout's keys, tokens that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.models.language import IGNORED
from stretto.engine.parallel.collectives import all_sum
from stretto.run.data.dataset import indices_after
from stretto.run.train.replica import Replica

Pairs = list[tuple[Tensor, Tensor]]  # inputs and targets of microbatches


class SampleSource(Protocol):
    """Samples by index, such as `run.data.dataset.Samples`."""

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets: two int64 tensors [len(indices), sequence] on the CPU."""
        ...


class Batches:
    """Global batches of one job.

    With `dp.mode=server` the first of the ranks that hold the same parameters reads the samples of all of
    them and scatters them; otherwise every rank reads its samples itself.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.mesh = replica.mesh
        self._microbatches = replica.pipeline.program.microbatches
        self._served = replica.job.dp.mode == "server" and self.mesh.group("dp") is not None

    def take(
        self, samples: SampleSource, seen: int, keyed: bool
    ) -> tuple[tuple[list[Tensor], list[Tensor]], list[float]]:
        """This rank's part of its replica's microbatches of the global batch after `seen` samples, on the
        device; and of each microbatch the tokens that count, over all replicas.

        Args:
            keyed: let dropout know the samples.
        """
        mesh, d = self.mesh, self.mesh.index("dp")
        if keyed:
            self.replica.samples[:] = self._indices(seen, d)
        group = mesh.group("dp")
        if self._served and group is not None:
            pairs, counts = self._from_server(samples, seen, group)
        else:
            whole = self._read(samples, seen, d)
            counts = self._count([y for _, y in whole])
            pairs = [self.replica.share(*pair) for pair in whole]
        inputs = [x.to(mesh.device, non_blocking=True) for x, _ in pairs]
        return (inputs, [y.to(mesh.device) for _, y in pairs]), counts

    def _indices(self, seen: int, replica: int) -> list[range]:
        m = self._microbatches
        return [
            indices_after(
                seen=seen,
                microbatch=j,
                dp_rank=replica,
                dp=self.mesh.size("dp"),
                micro_batch=self.replica.job.micro_batch,
                microbatches=m,
            )
            for j in range(m)
        ]

    def _read(self, samples: SampleSource, seen: int, replica: int) -> Pairs:
        return [samples.batch(i) for i in self._indices(seen, replica)]

    def _count(self, targets: list[Tensor]) -> list[float]:
        """Tokens that count of each microbatch, over all replicas; all ranks of one have the targets."""
        count = torch.stack([(t != IGNORED).sum() for t in targets]).double().to(self.mesh.device)
        return all_sum(count, self.mesh.group("dp")).tolist()

    def _from_server(
        self, samples: SampleSource, seen: int, group: ProcessGroup
    ) -> tuple[Pairs, list[float]]:
        m = self._microbatches
        empty = torch.zeros(self.replica.job.micro_batch, self.replica.job.sequence, dtype=torch.int64)
        shape = self.replica.share(empty, empty)[0].shape
        counts = torch.zeros(m, dtype=torch.float64, device=self.mesh.device)
        mine = torch.empty(m, 2, *shape, dtype=torch.int64, device=self.mesh.device)
        parts = list[Tensor]()
        if group.rank() == 0:
            for replica in range(group.size()):
                whole = self._read(samples, seen, replica)
                counts += torch.stack([(y != IGNORED).sum() for _, y in whole]).double().to(counts.device)
                shared = [torch.stack(self.replica.share(*pair)) for pair in whole]
                parts.append(torch.stack(shared).to(mine.device))
        group.scatter([mine], [parts] if parts else []).wait()
        group.broadcast([counts]).wait()
        return [(one[0], one[1]) for one in mine], counts.tolist()
