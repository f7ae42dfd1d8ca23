"""The search problem: one placement of stages with its costs and limits, as flat arrays; and a lower bound.

An operation is one kind of action of one stage, for all microbatches: `3 * stage + kind`, kind 0 for F, 1 for
I, 2 for W. Microbatches are alike, so each operation may take them in ascending order: renumbering the k-th
start of every operation as microbatch k preserves all times, all dependencies and the number of activations
held. A rank's order is therefore a sequence of operations, and the search space has no microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from stretto.program.action import Action, ActionKind
from stretto.program.program import Program
from stretto.program.replay.costs import Costs, Prices

F = 0
I = 1
W = 2
Orders = list[list[int]]  # per rank, its operations in order

_KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)


@dataclass(frozen=True, kw_only=True)
class SchedulingProblem:
    """One placement; times in the unit of the costs.

    Without `split` the operation I is the full backward, and there is no W.
    """

    placement: tuple[int, ...]
    microbatches: int
    times: tuple[tuple[float, float, float], ...]  # F, I, W of each stage
    delays: tuple[tuple[float, float], ...]  # by stage, of the messages that its F and its I wait for
    limits: tuple[int, ...]  # per rank, the largest number of (stage, microbatch) activations
    split: bool = True

    @cached_property
    def ranks(self) -> int:
        return len(self.limits)

    @cached_property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def tight(self) -> bool:
        """True if the limits exclude any order."""
        return min(self.limits) < self.microbatches * self.stages // self.ranks

    @cached_property
    def operations(self) -> tuple[tuple[int, ...], ...]:
        """The operations of each rank, stage after stage."""
        kinds = (F, I, W) if self.split else (F, I)
        return tuple(
            tuple(3 * s + k for s in range(self.stages) if self.placement[s] == rank for k in kinds)
            for rank in range(self.ranks)
        )

    @cached_property
    def actions(self) -> int:
        """Compute actions of a program."""
        return self.microbatches * sum(map(len, self.operations))

    @cached_property
    def rank_of(self) -> list[int]:
        """The rank of each operation."""
        return [rank for rank in self.placement for _ in range(3)]

    @cached_property
    def cost(self) -> list[float]:
        """The duration of each operation."""
        split = self.split
        return [t for f, i, w in self.times for t in (f, i if split else i + w, w if split else 0.0)]

    @cached_property
    def source(self) -> list[int]:
        """For each operation, the one that it depends on, or -1 for the first F."""
        last = self.stages - 1
        return [
            (of_f, of_i, 3 * s + I)[k]
            for s in range(self.stages)
            for of_f, of_i in [(3 * (s - 1) if s else -1, 3 * s if s == last else 3 * (s + 1) + I)]
            for k in (F, I, W)
        ]

    @cached_property
    def delay(self) -> list[float]:
        """For each operation, the transfer time of its input."""
        return [delay for forward, backward in self.delays for delay in (forward, backward, 0.0)]

    @cached_property
    def follower(self) -> list[int]:
        """For each operation, the one on the next stage that depends on it, or -1 for the last."""
        followers = [-1] * (3 * self.stages)
        for op, source in enumerate(self.source):
            if source >= 0 and op % 3 != W:
                followers[source] = op
        return followers

    @cached_property
    def release(self) -> int:
        """The kind of operation that frees an activation."""
        return W if self.split else I

    def fits(self, orders: Orders) -> bool:
        """True if no rank holds more than its limit."""
        return all(self.rank_fits(rank, order) for rank, order in enumerate(orders))

    def rank_fits(self, rank: int, order: Sequence[int]) -> bool:
        live = 0
        limit = self.limits[rank]
        release = self.release
        for op in order:
            kind = op % 3
            if kind == F:
                live += 1
                if live > limit:
                    return False
            elif kind == release:
                live -= 1
        return True

    def program(self, orders: Orders) -> Program:
        """Return the orders as a program named `auto`."""
        rows: list[tuple[Action, ...]] = []
        for order in orders:
            counts = [0] * (3 * self.stages)
            row: list[Action] = []
            for op in order:
                kind = ActionKind.B if op % 3 == I and not self.split else _KINDS[op % 3]
                row.append(Action(op // 3, kind, counts[op]))
                counts[op] += 1
            rows.append(tuple(row))
        chunks = self.stages // self.ranks
        return Program(
            name="auto",
            placement=self.placement,
            microbatches=self.microbatches,
            orders=tuple(rows),
            parameters={"chunks": chunks},
        )

    def orders_of(self, program: Program) -> Orders:
        """Return a program of one copy on this placement as orders; if backwards are split, B becomes I and
        W.
        """
        orders: Orders = []
        for order in program.orders:
            row: list[int] = []
            for stage, kind, _ in order:
                if kind is ActionKind.F:
                    row.append(3 * stage)
                elif kind is ActionKind.I or kind is ActionKind.B:
                    row.append(3 * stage + I)
                    if kind is ActionKind.B and self.split:
                        row.append(3 * stage + W)
                elif kind is ActionKind.W:
                    row.append(3 * stage + W)
            orders.append(row)
        return orders


def problem_of(
    placement: tuple[int, ...],
    microbatches: int,
    costs: Costs,
    memory: Sequence[float | None],
    split: bool,
) -> SchedulingProblem:
    """Return the problem of one placement; `memory` is in rank units, one per rank, None for no limit."""
    ranks = len(memory)
    prices = Prices(
        Program(name="auto", placement=placement, microbatches=microbatches, orders=((),) * ranks), costs
    )
    times = tuple((t[ActionKind.F], t[ActionKind.I], t[ActionKind.W]) for t in prices.compute)
    routes = zip(prices.forward, prices.backward, strict=True)
    delays = tuple((f.delay if f else 0.0, b.delay if b else 0.0) for f, b in routes)
    chunks = len(placement) // ranks
    total = microbatches * chunks
    limits = tuple(total if limit is None else min(total, activations_in(limit, chunks)) for limit in memory)
    return SchedulingProblem(
        placement=placement, microbatches=microbatches, times=times, delays=delays, limits=limits, split=split
    )


def activations_in(limit: float, chunks: int) -> int:
    """Return a limit in rank units as a number of (stage, microbatch) activations."""
    return int(limit * chunks + 1e-9)


def lower_bound(problem: SchedulingProblem) -> float:
    """Return a lower bound on the makespan: the maximum over ranks of three times, each counted from the
    first possible input of the rank.

    - its work;
    - its forwards and input gradients, then the chain of the last gradient to the model's first stage and of
      the weight gradients that depend on it;
    - its limit of activations: each is held at least while its microbatch goes to the loss and back, so all
      of them together take at least that time divided by the limit.
    """
    cost = problem.cost
    m = problem.microbatches
    bound = 0.0
    # by stage, the earliest arrival of the first input
    heads = [0.0]
    for stage in range(1, problem.stages):
        heads.append(heads[-1] + cost[3 * (stage - 1)] + problem.delay[3 * stage])
    # by stage, the minimum time from the start of F to the release of its activation
    lifetimes: list[float] = []
    way = 0.0
    for stage in range(problem.stages - 1, -1, -1):
        way += cost[3 * stage] + cost[3 * stage + I]
        lifetimes.append(way + cost[3 * stage + 2])
        way += problem.delay[3 * stage]
        if stage:
            way += problem.delay[3 * (stage - 1) + I]
    lifetimes.reverse()
    tails = tails_of(problem)
    for rank, ops in enumerate(problem.operations):
        stages = sorted({op // 3 for op in ops})
        head = heads[stages[0]]
        work = m * fsum(cost[op] for op in ops)
        ahead = m * fsum(cost[op] for op in ops if op % 3 in (F, I)) + tails[stages[0]]
        area = m * fsum(lifetimes[stage] for stage in stages) / problem.limits[rank]
        bound = max(bound, head + work, head + ahead, head + area)
    return bound


def tails_of(problem: SchedulingProblem) -> list[float]:
    """Return for each stage the minimum time from the end of its last I to the end of all that depends
    on it.
    """
    tails: list[float] = []
    for stage in range(problem.stages):
        longest = problem.cost[3 * stage + 2]
        if stage:
            onward = problem.delay[3 * (stage - 1) + I] + problem.cost[3 * (stage - 1) + I]
            longest = max(longest, onward + tails[-1])
        tails.append(longest)
    return tails
