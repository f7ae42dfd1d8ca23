"""Ladders of savings: which candidates may fit, and for those that do not, what to save."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from stretto.planner.memory.fits import Fit
from stretto.planner.search.memory_bounds import MemoryBound, MemoryBounds, memory_budget
from stretto.planner.search.space import Space, depth_of
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, Task
from stretto.spec.data_parallel import DataParallel
from stretto.spec.program import stages_of


class SavingLadder:
    """The savings of a task, with the bounds on memory that choose among them."""

    def __init__(self, task: Task, space: Space) -> None:
        self.task = task
        self.space = space
        self.bounds = MemoryBounds(task)
        self.budget = memory_budget(task.cluster.device, task.assumptions.reserve)
        self._least = dict[object, tuple[DataParallel, Saving]]()

    def exceeds_budget(self, candidate: Candidate) -> bool:
        """Whether a candidate surely does not fit."""
        return self.bounds.of(candidate).total > self.budget

    def fit(self, candidate: Candidate) -> Fit:
        """How the candidate's bound fits the device."""
        return self.bounds.of(candidate).fit(self.task.cluster.device, self.task.assumptions.reserve)

    def least_memory(self, parallelism: Parallelism) -> tuple[DataParallel, Saving]:
        """The sharing of states with the least memory on a rank, with every saving applied."""
        key = parallelism.layout, parallelism.expert_tp
        if key not in self._least:
            choices = list[tuple[int, int, DataParallel, Saving]]()
            for at, dp in enumerate(self.space.sharings(parallelism.layout)):
                saving = self.space.ladder(self.space.first_saving(), 1, dp)[-1][-1]
                choices.append(
                    (self.bounds.parallelism(parallelism, dp, saving, states=True), at, dp, saving)
                )
            self._least[key] = min(choices, key=lambda one: one[:2])[2:]
        return self._least[key]

    def cannot_fit(self, parallelism: Parallelism) -> Fit | None:
        """The bound on memory where no schedule, sharing or saving makes this parallelism fit; else None."""
        dp, saving = self.least_memory(parallelism)
        for states in (True, False):
            least = self.bounds.parallelism(parallelism, dp, saving, states)
            if least > self.budget:
                return MemoryBound(least, 0).fit(self.task.cluster.device, self.task.assumptions.reserve)
        return None

    def required_saving(self, parallelism: Parallelism, choice: ScheduleChoice) -> tuple[Saving, bool]:
        """The least saving that a schedule needs, and whether it may fit then."""
        dp, _ = self.least_memory(parallelism)
        row = self.rows(parallelism, choice, dp, self.space.first_saving())[-1]
        at = self._first(Candidate(parallelism, choice, dp, row[0]), row)
        return row[min(at, len(row) - 1)], at < len(row)

    def climb(self, candidate: Candidate, ladder: Sequence[Sequence[Saving]]) -> list[Candidate]:
        """For each row of savings, the candidate with the first saving that may fit. Once the first saving of
        a row may fit, later rows are skipped.
        """
        feasible = list[Candidate]()
        for row in ladder:
            at = self._first(candidate, row)
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

    def _first(self, candidate: Candidate, row: Sequence[Saving]) -> int:
        """Index of the first saving that may fit; less and less is held along a row."""
        if not self.exceeds_budget(replace(candidate, saving=row[0])):
            return 0
        if len(row) == 1 or self.exceeds_budget(replace(candidate, saving=row[-1])):
            return len(row)
        middle = range(1, len(row) - 1)
        return 1 + bisect_left(
            middle, True, key=lambda at: not self.exceeds_budget(replace(candidate, saving=row[at]))
        )

    def _most_blocks(self, parallelism: Parallelism, choice: ScheduleChoice) -> int:
        shape = self.task.shape
        stages = stages_of(shape, self.task.sequence, depth_of(choice, parallelism.layout.pp))
        return max(sum(1 <= layer <= shape.layers for layer in stage) for stage in stages)
