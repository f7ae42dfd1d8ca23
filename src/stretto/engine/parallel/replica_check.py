"""Whether ranks that hold the same tensor hold the same bits: checksums, compared by one all-reduce.

Copies are told by what they are of: ranks whose tensors have one name and cover the same boxes of the plain
tensor, whatever axis repeats them: data-parallel replicas, parameters that tensor parallelism does not split,
tied weights on two stages, the copies of a bidirectional pipeline.
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
"""Tensors of this rank by name, with their places; names are the same on all ranks that hold the same."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAST = torch.iinfo(torch.int64).min
MAX_LISTED = 5  # tensors that a message lists


@dataclass(frozen=True, kw_only=True)
class ReplicaMismatch:
    """A tensor whose copies differ.

    Attributes:
        name: of the tensor.
        holders: all ranks that hold it.
        suspects: of these, the ones that differ from the most; all where no majority agrees.
    """

    name: str
    holders: tuple[int, ...]
    suspects: tuple[int, ...]

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.suspects))
        if len(self.suspects) == len(self.holders):
            return f"{self.name} is not the same on ranks {ranks}, and no majority says which is right"
        others = len(self.holders) - len(self.suspects)
        return f"{self.name} on rank {ranks} is not what {others} other ranks have"


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits as whole numbers of its elements' size, modulo 2 to their bits: int64 [], on
    its device. Any change of a single element changes it; zeros and the order of elements do not.
    """
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    kind = _INTEGERS[tensor.element_size()]
    # in the elements' own size, wrapping round: torch adds those as fast as memory gives them
    return tensor.detach().view(-1).view(kind).sum(dtype=kind).to(torch.int64)


class ReplicaConsistencyCheck:
    """What this rank holds that other ranks hold too. The first comparison finds out which; all ranks go on
    holding the same tensors from then on.
    """

    def __init__(self) -> None:
        self._place: dict[str, int] | None = None  # of this rank's tensors that others hold, in all such
        self._number = 0

    @torch.no_grad()
    def differences(self, held: RankTensors) -> list[ReplicaMismatch]:
        """Tensors whose copies differ, the same on every rank; tensors without memory are left out, as
        weights that are gathered when they are used. Collective over all ranks.
        """
        if not has_group():
            return []
        if self._place is None:
            self._place = self._shared(held)
        if not self._number:
            return []
        device = carrier()
        ours = torch.full((self._number,), _LEAST, dtype=torch.int64, device=device)
        here = {name: place for name, place in self._place.items() if in_memory(held[name][0])}
        if here:
            sums = [checksum(held[name][0]).to(device, non_blocking=True) for name in here]
            ours[torch.tensor(list(here.values()), device=device)] = torch.stack(sums)
        absent = ours == _LEAST
        both = torch.cat([ours, torch.where(absent, _LEAST, ~ours)])  # ~x falls as x rises
        dist.all_reduce(both, dist.ReduceOp.MAX)
        most, least = both[: self._number], ~both[self._number :]
        wrong = (most != least) & (most != _LEAST)  # some have no memory anywhere now
        if not bool(wrong.any()):
            return []
        return self._named(ours, wrong.nonzero().view(-1))

    @property
    def compared(self) -> int:
        """Different tensors that several ranks hold, after the first comparison."""
        return self._number

    def _shared(self, held: RankTensors) -> dict[str, int]:
        """The tensors of this rank that others hold too, each with its number among all such. Collective."""
        of_name = {name: _digest(name, tensor, placed) for name, (tensor, placed) in held.items()}
        everywhere: list[list[int]] = gather_json(sorted(set(of_name.values())))
        count = Counter(digest for digests in everywhere for digest in digests)
        shared = {d: i for i, d in enumerate(sorted(d for d, holders in count.items() if holders > 1))}
        self._number = len(shared)
        return {name: shared[digest] for name, digest in of_name.items() if digest in shared}

    def _named(self, ours: Tensor, wrong: Tensor) -> list[ReplicaMismatch]:
        """Which tensors these are, and on which ranks they are off. Collective."""
        assert self._place is not None
        sums = dict(zip(wrong.tolist(), ours[wrong].tolist(), strict=True))
        names = {number: name for name, number in self._place.items() if number in sums}
        facts = {str(n): [names[n], one] for n, one in sums.items() if n in names and one != _LEAST}
        everywhere: list[dict[str, list[str | int]]] = gather_json(facts)
        differences = list[ReplicaMismatch]()
        for number in sums:
            by_rank = {r: of[str(number)] for r, of in enumerate(everywhere) if str(number) in of}
            times = Counter(one for _, one in by_rank.values())
            (usual, most), *_ = times.most_common(1)
            off = tuple(r for r, (_, one) in by_rank.items() if one != usual or 2 * most <= len(by_rank))
            name = str(next(iter(by_rank.values()))[0])
            differences.append(ReplicaMismatch(name=name, holders=tuple(by_rank), suspects=off))
        return sorted(differences, key=lambda one: (one.suspects, one.name))


def report(differences: list[ReplicaMismatch]) -> str:
    """The first of them in words."""
    more = len(differences) - MAX_LISTED
    lines = [str(one) for one in differences[:MAX_LISTED]]
    return "; ".join([*lines, *([f"and {more} tensors more"] if more > 0 else [])])


def in_memory(tensor: Tensor) -> bool:
    """Whether there is memory behind all of a tensor: not of weights that are gathered when they are used,
    nor of states in files.
    """
    last = tensor.storage_offset() + tensor.numel()
    return tensor.numel() > 0 and last * tensor.element_size() <= tensor.untyped_storage().size()


def _digest(name: str, tensor: Tensor, placed: ShardPlacement) -> int:
    """A number of 63 bits for what a tensor is of; of a tensor without a piece, which is padding, this rank's
    own.
    """
    boxes = sorted((piece.offsets, piece.sizes) for piece in placed.pieces)
    what = repr((name, str(tensor.dtype), boxes or (this_rank(), world_size())))
    return int.from_bytes(blake2b(what.encode(), digest_size=8).digest(), "big") >> 1
