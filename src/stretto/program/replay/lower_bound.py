"""A lower bound on the time of a step over all orders of its work."""

from __future__ import annotations

from itertools import chain
from math import fsum
from typing import NamedTuple

from stretto.errors import StrettoError
from stretto.program.action import ActionKind
from stretto.program.program import Program
from stretto.program.replay.costs import Costs, Prices


def bound(program: Program, costs: Costs | None = None, memory: float | None = None) -> float:
    """Return a lower bound on the end of any order of the program's work on these ranks, with full or split
    backwards.

    The work is: this placement, these microbatches through these copies, and the program's numbers of
    recomputed forwards and updates. The bound is the largest of the following, which hold for every order:

    - **Work.** No input of rank r can arrive before `head(r)`, the minimum over its stages of the forwards
      and messages before that stage. After that the rank still has all of its work to do.
    - **Chain.** The last F, I or B of rank r is an I or B, since every F is followed by its backward. It
      comes after all F and I of the rank (W may be deferred), and is followed by the input gradients of all
      earlier stages, each after a message, and by the weight gradient of the first stage: head(r) + F and I
      of the rank + the minimum of this chain over its stages.
    - **Round trip.** One microbatch goes forward through all stages and back, and has its last W.
    - **Memory.** A stage holds `activations` of a microbatch at least from its F over the round trip to the
      loss and back until its W, and `kept_for_w` of it during W. Bytes times time, summed over all of a
      rank's microbatches, is at most `memory` times the time from its first F until its last action.
    - A rank's last action is followed by at least its stage's reduction, or by all of its stages' reductions
      if they do not overlap; the end of all ranks is followed by the longest update of a rank.

    If pairs may run as one block of `pair` < 1 times their parts, all times of F, I and W are scaled by
    `pair`, since a block takes at least `pair` times each of its parts and their sum.

    Contention, blocking sends and overlapped work can only delay; they are left out.

    Args:
        memory: bytes of activations that each rank may hold, in the unit of `costs.activations`.

    Raises:
        StrettoError: one microbatch does not fit into `memory`.
    """
    costs = costs or Costs()
    if not any(program.orders):
        return 0.0
    return _Bound(program, costs).best(memory)


class _Times(NamedTuple):
    """Times of one stage."""

    forward: float
    back: float  # I
    weight: float  # W


class _Bound:
    """Sums over stages and chains."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.costs = costs
        self.prices = Prices(program, costs)
        shrink = min(1.0, costs.pair) if program.pairs and costs.pair is not None else 1.0
        # a forward-only program has no backward
        back = shrink if program.trains else 0.0
        self.times = [
            _Times(shrink * t[ActionKind.F], back * t[ActionKind.I], back * t[ActionKind.W])
            for t in self.prices.compute
        ]
        self.passing = [program.copy_of.count(copy) for copy in range(program.copies)]
        self.heads, self.tails, self.rounds = self._chains()
        extra = [0.0] * program.ranks  # repeated forwards, updates
        for rank, (stage, kind, _) in ((r, a) for r, order in enumerate(program.orders) for a in order):
            if kind is ActionKind.RECOMPUTE:
                extra[rank] += shrink * self.prices.compute[stage][kind]
            elif kind is ActionKind.UPDATE:
                extra[rank] += self.prices.update[stage]
        self.extra = extra
        self.inside = any(a.kind is ActionKind.UPDATE for a in chain.from_iterable(program.orders))

    def best(self, memory: float | None) -> float:
        ends = [self._rank(rank, memory) for rank in range(self.program.ranks)]
        end = max([*ends, *(self._round_trip(copy) for copy in range(self.program.copies))])
        if self.program.trains and not self.inside:
            stages = [self.program.stages_of(rank) for rank in range(self.program.ranks)]
            end += max(fsum(self.prices.update[stage] for stage in held_stages) for held_stages in stages)
        return end

    def _chains(self) -> tuple[list[float], list[float], list[float]]:
        """Return for each stage the minimum time before its F, after its I, and between the two (without its
        own F and I).
        """
        program, stages = self.program, range(self.program.stages)
        heads = [0.0] * len(stages)
        tails = [0.0] * len(stages)
        rounds = [0.0] * len(stages)
        for s in stages:
            if not program.is_first(s):
                heads[s] = heads[s - 1] + self.times[s - 1].forward + self._comes(s)
                tails[s] = tails[s - 1] + self.times[s - 1].back + self._goes_back(s)
            else:
                tails[s] = self.times[s].weight
        for s in reversed(stages):
            if not program.is_last(s):
                beyond = self.times[s + 1].forward + rounds[s + 1] + self.times[s + 1].back
                if program.trains:
                    rounds[s] = self._comes(s + 1) + beyond + self._goes_back(s + 1)
                else:
                    rounds[s] = self._comes(s + 1) + beyond
        return heads, tails, rounds

    def _comes(self, stage: int) -> float:
        route = self.prices.forward[stage]
        return 0.0 if route is None else route.delay

    def _goes_back(self, stage: int) -> float:
        """Return the time of the message with the gradient of the stage's input."""
        route = self.prices.backward[stage - 1]
        return 0.0 if route is None else route.delay

    def _round_trip(self, copy: int) -> float:
        if not self.passing[copy]:
            return 0.0
        first = copy * self.program.depth
        forward, back, weight = self.times[first]
        return forward + self.rounds[first] + back + weight

    def _rank(self, rank: int, memory: float | None) -> float:
        passing, depth = self.passing, self.program.depth
        held_stages = [stage for stage in self.program.stages_of(rank) if passing[stage // depth]]
        if not held_stages:
            return 0.0
        head = min(self.heads[stage] for stage in held_stages)
        forward, back, weight = (
            fsum(passing[stage // depth] * self.times[stage][part] for stage in held_stages)
            for part in range(3)
        )
        if not self.program.trains:
            return head + forward + min(self.rounds[stage] for stage in held_stages)
        ends = head + forward + back + weight + self.extra[rank] + self._reductions(held_stages)
        put_off = head + forward + back + min(self.tails[stage] for stage in held_stages)
        return max(ends, put_off, head + self._occupied(rank, held_stages, memory))

    def _reductions(self, held_stages: list[int]) -> float:
        reduce = [self.prices.reduce[stage] for stage in held_stages]
        if self.inside:
            return 0.0
        return min(reduce) if self.costs.reduce_overlaps else fsum(reduce)

    def _occupied(self, rank: int, held_stages: list[int], memory: float | None) -> float:
        """Return the minimum time in which a rank's microbatches can pass through its memory."""
        if memory is None or any(a.kind in _KEPT_ELSEWHERE for a in self.program.orders[rank]):
            return 0.0
        area = 0.0
        for stage in held_stages:
            size, (forward, back, weight) = self.prices.activations[stage], self.times[stage]
            if size > memory:
                raise StrettoError(
                    f"memory is {memory}, but stage {stage} on rank {rank} holds {size} of one microbatch",
                    hint=f"give at least memory={size}",
                )
            full = forward + self.rounds[stage] + back
            area += self.passing[stage // self.program.depth] * size * (full + self.costs.kept_for_w * weight)
        return area / memory if memory else 0.0


_KEPT_ELSEWHERE = frozenset({ActionKind.RECOMPUTE, ActionKind.OFFLOAD})
