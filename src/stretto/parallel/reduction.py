"""One flat gradient summed over the copies of its parameters, and what of the sum each rank keeps.

Part by part over the levels of `ShardGroups`: reduce-scatters where ranks keep different parts, then an
all-reduce over those that keep the same. Only the first is under way from the start; the others begin when
somebody waits.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.parallel.collectives import Pending, start_scatter_sum, start_sum
from stretto.parallel.shard_groups import ShardGroups

Steps = Generator[Pending, None, Tensor]


class Reduction:
    """A reduction under way."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._pending: Pending | None = None
        self._result: Tensor | None = None
        self._next()

    def finish(self) -> Tensor:
        """This rank's part of the sum."""
        while self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            del pending  # and the tensors that it holds, before the next begins
            self._next()
        assert self._result is not None
        return self._result

    def _next(self) -> None:
        try:
            self._pending = next(self._steps)
        except StopIteration as end:
            self._pending, self._result = None, end.value


def reduce_to(x: Tensor, groups: ShardGroups, first: int, last: int, out: Tensor | None = None) -> Steps:
    """Sum x, this rank's part at level `first`, down to its part at level `last`; with `last` 4 over all
    copies.

    Args:
        out: where the last part goes; by default the memory of x where nothing is split, else new.
    """
    for level in range(first, min(last, 3)):
        group = groups.levels[level]
        if group is not None:
            pieces = x.view(group.size(), -1)
            target = out if out is not None and _is_last(groups, level, last) else None
            x, work = start_scatter_sum(pieces, group, target)
            yield work
            del pieces, work
    if last == 4 and groups.levels[3] is not None:
        yield start_sum(x, groups.levels[3])
    if out is not None and not same_place(out, x):
        out.copy_(x)
        return out
    return x


def same_place(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors begin at one element of one storage, be there any values or not."""
    one, other = a.untyped_storage(), b.untyped_storage()
    return one._cdata == other._cdata and a.storage_offset() == b.storage_offset()


def _is_last(groups: ShardGroups, level: int, last: int) -> bool:
    return all(groups.levels[other] is None for other in range(level + 1, min(last, 3)))


def reduce_to_first(x: Tensor, group: ProcessGroup) -> Steps:
    """Sum x on the group's first rank, which receives what every other has; the others keep their own."""
    arriving = [torch.empty_like(x) for _ in range(group.size())] if group.rank() == 0 else []
    yield group.gather([arriving] if arriving else [], [x])
    for other in arriving[1:]:
        x.add_(other)
    return x
