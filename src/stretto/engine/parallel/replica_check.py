"""Checks that replicas of a tensor are bitwise equal on all ranks: checksums, compared by one all-reduce.

Two tensors are replicas if they have the same name and cover the same boxes of the full tensor, on any axis:
data-parallel replicas, parameters that tensor parallelism does not split, tied weights on two stages, the
copies of a bidirectional pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.device import carrier
from stretto.engine.parallel.control import gather_json, has_group, this_rank, world_size
from stretto.engine.parallel.fragment import ShardPlacement

RankTensors = Mapping[str, tuple[Tensor, ShardPlacement]]
"""Tensors of this rank by name, with their placements; replicas have the same name on all ranks."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = torch.iinfo(torch.int64).min  # the checksum of a tensor without memory
MAX_LISTED = 5  # tensors that a message lists


@dataclass(frozen=True, kw_only=True)
class ReplicaMismatch:
    """A tensor whose replicas differ.

    Attributes:
        name: name of the tensor.
        holders: all ranks that hold it.
        suspects: the holders that differ from the majority; all of them if no majority agrees.
    """

    name: str
    holders: tuple[int, ...]
    suspects: tuple[int, ...]

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.suspects))
        if len(self.suspects) == len(self.holders):
            return f"{self.name} is not the same on ranks {ranks}, without a majority for one value"
        others = len(self.holders) - len(self.suspects)
        return f"{self.name} on rank {ranks} is not what {others} other ranks have"


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, read as integers of their size, with wrap-around: int64 [], on
    its device. Any change of a single element changes it; additional zeros and the order of elements do not.
    """
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    kind = _INTEGERS[tensor.element_size()]
    # integers of the elements' size, with wrap-around: torch sums these at the speed of memory
    return tensor.detach().view(-1).view(kind).sum(dtype=kind).to(torch.int64)


class ReplicaConsistencyCheck:
    """Compares the tensors that this rank shares with other ranks. The first comparison determines these
    tensors; from then on every rank must hold the same ones.
    """

    def __init__(self) -> None:
        self._index_of: dict[str, int] | None = (
            None  # this rank's replicated tensors, among those of all ranks
        )
        self._count = 0

    @torch.no_grad()
    def differences(self, tensors: RankTensors) -> list[ReplicaMismatch]:
        """Return the tensors whose replicas differ, the same list on every rank. Tensors without memory, such
        as released sharded weights, are left out. Collective over all ranks.
        """
        if not has_group():
            return []
        if self._index_of is None:
            digests = {name: _digest(name, tensor, placed) for name, (tensor, placed) in tensors.items()}
            everywhere: list[list[int]] = gather_json(sorted(set(digests.values())))
            holders = Counter(digest for of_rank in everywhere for digest in of_rank)
            shared = {d: i for i, d in enumerate(sorted(d for d, n in holders.items() if n > 1))}
            self._count = len(shared)
            self._index_of = {name: shared[digest] for name, digest in digests.items() if digest in shared}
        if not self._count:
            return []
        device = carrier()
        sums = torch.full((self._count,), _ABSENT, dtype=torch.int64, device=device)
        present = {name: index for name, index in self._index_of.items() if in_memory(tensors[name][0])}
        if present:
            checksums = [checksum(tensors[name][0]).to(device, non_blocking=True) for name in present]
            sums[torch.tensor(list(present.values()), device=device)] = torch.stack(checksums)
        both = torch.cat([sums, torch.where(sums == _ABSENT, _ABSENT, ~sums)])  # ~x decreases as x increases
        dist.all_reduce(both, dist.ReduceOp.MAX)
        highest, lowest = both[: self._count], ~both[self._count :]
        wrong = (highest != lowest) & (highest != _ABSENT)  # some have no memory on any rank
        return self._mismatches(sums, wrong.nonzero().view(-1)) if bool(wrong.any()) else []

    @property
    def compared(self) -> int:
        """Number of tensors that several ranks hold, after the first comparison."""
        return self._count

    def _mismatches(self, sums: Tensor, wrong: Tensor) -> list[ReplicaMismatch]:
        """Return names and ranks of the tensors at the indices `wrong`. Collective."""
        assert self._index_of is not None
        wrong_sums = dict(zip(wrong.tolist(), sums[wrong].tolist(), strict=True))
        names = {index: name for name, index in self._index_of.items() if index in wrong_sums}
        entries = {str(i): [names[i], s] for i, s in wrong_sums.items() if i in names and s != _ABSENT}
        everywhere: list[dict[str, list[str | int]]] = gather_json(entries)
        mismatches = list[ReplicaMismatch]()
        for index in wrong_sums:
            by_rank = {rank: of[str(index)] for rank, of in enumerate(everywhere) if str(index) in of}
            (majority, votes), *_ = Counter(s for _, s in by_rank.values()).most_common(1)
            off = tuple(r for r, (_, s) in by_rank.items() if s != majority or 2 * votes <= len(by_rank))
            name = str(next(iter(by_rank.values()))[0])
            mismatches.append(ReplicaMismatch(name=name, holders=tuple(by_rank), suspects=off))
        return sorted(mismatches, key=lambda mismatch: (mismatch.suspects, mismatch.name))


def report(differences: list[ReplicaMismatch]) -> str:
    """Describe the first `MAX_LISTED` differences in one line."""
    more = len(differences) - MAX_LISTED
    lines = [str(mismatch) for mismatch in differences[:MAX_LISTED]]
    return "; ".join([*lines, *([f"and {more} tensors more"] if more > 0 else [])])


def in_memory(tensor: Tensor) -> bool:
    """True if all of a tensor is in memory, unlike released sharded weights and states in files."""
    last = tensor.storage_offset() + tensor.numel()
    return tensor.numel() > 0 and last * tensor.element_size() <= tensor.untyped_storage().size()


def _digest(name: str, tensor: Tensor, placed: ShardPlacement) -> int:
    """Return 63 bits that identify the name, dtype and boxes of a tensor; a tensor without boxes (padding
    only) gets an identity that is unique to this rank.
    """
    boxes = sorted((piece.offsets, piece.sizes) for piece in placed.pieces)
    identity = repr((name, str(tensor.dtype), boxes or (this_rank(), world_size())))
    return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest(), "big") >> 1
