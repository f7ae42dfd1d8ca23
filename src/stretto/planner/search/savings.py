"""Ladders of savings: which candidates may fit, and for those that do not, what to save."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from stretto.layout.layout import Layout
from stretto.planner.memory.fits import Fit
from stretto.planner.search.memory_bounds import MemoryBound, MemoryBounds, memory_budget
from stretto.planner.search.space import Space, depth_of
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, Task
from stretto.spec.chain import blocks_among
from stretto.spec.data_parallel import MODES, DataParallel


class SavingLadder:
    """The savings of a task, with the bounds on memory that choose among them."""

    def __init__(self, task: Task, space: Space) -> None:
        self.task = task
        self.space = space
        self.bounds = MemoryBounds(task)
        self.budget = memory_budget(task.cluster.device, task.assumptions.reserve)
        self._least = dict[object, tuple[DataParallel, Saving]]()

    def exceeds_budget(self, candidate: Candidate, excess: float = 0.0) -> bool:
        """Whether a candidate surely does not fit.

        Args:
            excess: bytes by which memory is above the bound.
        """
        return self.bounds.of(candidate).total + excess > self.budget

    def fit(self, candidate: Candidate) -> Fit:
        """How the candidate's bound fits the device."""
        return self.bounds.of(candidate).fit(self.task.cluster.device, self.task.assumptions.reserve)

    def least_memory(self, layout: Layout, expert_tp: int | None) -> tuple[DataParallel, Saving]:
        """The sharing of states with the least memory on a rank, with every saving applied."""
        key = layout, expert_tp
        if key not in self._least:
            sharings = self.space.sharings(layout)
            # sharded over all copies there is least, and with the highest mode
            whole = [dp for dp in sharings if not any(dp.shards.values())] or sharings
            highest = [dp for dp in whole if dp.mode == max((one.mode for one in whole), key=MODES.index)]
            if self.task.refusals is not None:  # which may keep off the device what is sharded less
                highest = whole
            choices = list[tuple[int, int, DataParallel, Saving]]()
            for at, dp in enumerate(highest):
                saving = self.space.ladder(self.space.first_saving(), 1, dp)[-1][-1]
                choices.append((self.bounds.states(layout, expert_tp, dp, saving), at, dp, saving))
            self._least[key] = min(choices, key=lambda one: one[:2])[2:]
        return self._least[key]

    def states_cannot_fit(self, layout: Layout, expert_tp: int | None) -> Fit | None:
        """The bound on memory where the states of a layout alone do not fit; else None."""
        return self._exceeding(self.bounds.states(layout, expert_tp, *self.least_memory(layout, expert_tp)))

    def cannot_fit(self, parallelism: Parallelism) -> Fit | None:
        """The bound on memory where no schedule, sharing or saving makes this parallelism fit; else None."""
        least = self.least_memory(parallelism.layout, parallelism.expert_tp)
        return self._exceeding(self.bounds.parallelism(parallelism, *least))

    def _exceeding(self, least: int) -> Fit | None:
        if least <= self.budget:
            return None
        return MemoryBound(least, 0).fit(self.task.cluster.device, self.task.assumptions.reserve)

    def required_saving(self, parallelism: Parallelism, choice: ScheduleChoice) -> tuple[Saving, bool]:
        """The least saving that a schedule needs, and whether it may fit then."""
        dp, _ = self.least_memory(parallelism.layout, parallelism.expert_tp)
        row = self.rows(parallelism, choice, dp, self.space.first_saving())[-1]
        at = self.first_that_may_fit(Candidate(parallelism, choice, dp, row[0]), row)
        return row[min(at, len(row) - 1)], at < len(row)

    def climb(self, candidate: Candidate, ladder: Sequence[Sequence[Saving]]) -> list[Candidate]:
        """For each row of savings, the candidate with the first saving that may fit. Once the first saving of
        a row may fit, later rows are skipped.
        """
        feasible = list[Candidate]()
        for row in ladder:
            at = self.first_that_may_fit(candidate, row)
            if at < len(row):
                feasible.append(replace(candidate, saving=row[at]))
            if at == 0:
                break
        return feasible

    def rows(
        self, parallelism: Parallelism, choice: ScheduleChoice, dp: DataParallel, saving: Saving
    ) -> list[list[Saving]]:
        """Savings from this one on, as rows of a ladder."""
        return self.space.ladder(saving, self._most_blocks(parallelism, choice), dp)

    def first_that_may_fit(self, candidate: Candidate, row: Sequence[Saving], excess: float = 0.0) -> int:
        """Index of the first saving in a row that may fit, by its bound; less and less is held along a
        row.

        Args:
            excess: as in `exceeds_budget`.
        """

        def fits(at: int) -> bool:
            return not self.exceeds_budget(replace(candidate, saving=row[at]), excess)

        if fits(0):
            return 0
        if len(row) == 1 or not fits(len(row) - 1):
            return len(row)
        return 1 + bisect_left(range(1, len(row) - 1), True, key=fits)

    def _most_blocks(self, parallelism: Parallelism, choice: ScheduleChoice) -> int:
        stages = self.task.stages(depth_of(choice, parallelism.layout.pp))
        return max(len(blocks_among(self.task.shape, stage)) for stage in stages)
