"""Which candidates may fit, and of those that do not, what to save: the ladders of a search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from stretto.planner.memory.fits import Fit
from stretto.planner.search.memory_bounds import MemoryBound, MemoryBounds, memory_budget
from stretto.planner.search.space import Space, depth_of
from stretto.planner.search.task import Candidate, Parallelism, Saving, ScheduleChoice, Task
from stretto.planner.time.step import stages_of
from stretto.program import PLAIN
from stretto.spec.data_parallel import DataParallel

_PLAIN = ScheduleChoice(PLAIN)


class SavingLadder:
    """Bounds on memory put to the ladders of savings of a task."""

    def __init__(self, task: Task, space: Space) -> None:
        self.task = task
        self.space = space
        self.least = MemoryBounds(task)
        self.budget = memory_budget(task.cluster.device, task.assumptions.reserve)
        self._thrifty = dict[object, tuple[DataParallel, Saving]]()

    def too_much(self, candidate: Candidate) -> bool:
        """Whether it surely does not fit."""
        return self.least.of(candidate).total > self.budget

    def fit(self, candidate: Candidate) -> Fit:
        """By the bound."""
        return self.least.of(candidate).fit(self.task.cluster.device, self.task.assumptions.reserve)

    def thriftiest(self, parallelism: Parallelism) -> tuple[DataParallel, Saving]:
        """Of the ways of sharing states that of which a rank keeps least, and all that saves."""
        key = parallelism.layout, parallelism.expert_tp
        if key not in self._thrifty:
            choices = list[tuple[int, int, DataParallel, Saving]]()
            for at, dp in enumerate(self.space.sharings(parallelism.layout)):
                saving = self.space.ladder(self.space.first_saving(), 1, dp)[-1][-1]
                choices.append((self.least.parallelism(parallelism, dp, saving, states=True), at, dp, saving))
            self._thrifty[key] = min(choices, key=lambda one: one[:2])[2:]
        return self._thrifty[key]

    def crowded(self, parallelism: Parallelism) -> Fit | None:
        """The bound on memory where no schedule, no sharing and no saving makes a place fit."""
        dp, saving = self.thriftiest(parallelism)
        for states in (True, False):
            least = self.least.parallelism(parallelism, dp, saving, states)
            if least > self.budget:
                return MemoryBound(least, 0).fit(self.task.cluster.device, self.task.assumptions.reserve)
        return None

    def needed(self, parallelism: Parallelism, choice: ScheduleChoice) -> tuple[Saving, bool]:
        """What at least is saved with a schedule, and whether it may fit then."""
        dp, _ = self.thriftiest(parallelism)
        row = self.rows(parallelism, choice, dp, self.space.first_saving())[-1]
        at = self._first(Candidate(parallelism, choice, dp, row[0]), row)
        return row[min(at, len(row) - 1)], at < len(row)

    def climb(self, candidate: Candidate, ladder: Sequence[Sequence[Saving]]) -> list[Candidate]:
        """Of each row of savings, the candidate with the first that may fit. Of a later row nothing is looked
        at if the first saving of one before may fit.
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
        """What saves more and more, from a saving on."""
        return self.space.ladder(saving, self._most_blocks(parallelism, choice), dp)

    def _first(self, candidate: Candidate, row: Sequence[Saving]) -> int:
        """The place of the first saving that may fit: less and less is held along a row."""
        if not self.too_much(replace(candidate, saving=row[0])):
            return 0
        if len(row) == 1 or self.too_much(replace(candidate, saving=row[-1])):
            return len(row)
        middle = range(1, len(row) - 1)
        return 1 + bisect_left(
            middle, True, key=lambda at: not self.too_much(replace(candidate, saving=row[at]))
        )

    def _most_blocks(self, parallelism: Parallelism, choice: ScheduleChoice) -> int:
        shape = self.task.shape
        stages = stages_of(shape, self.task.sequence, depth_of(choice, parallelism.layout.pp))
        return max(sum(1 <= layer <= shape.layers for layer in stage) for stage in stages)
