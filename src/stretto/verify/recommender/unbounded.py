"""Which ids of a hash table have rows, by dictionaries: the rules of `tables.ids.hash`, written once more."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.layout.tables import TableSpec


class Ids:
    """All ids of one table.

    Attributes:
        counts, last: of each id that is known, its occurrences and the step at which it was seen last.
        held: ids with a row.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.counts, self.last, self.held = dict[int, int](), dict[int, int](), set[int]()

    def see(self, ids: Iterable[int], step: int) -> list[int]:
        """Count a batch; returns the ids that get a row with it."""
        for one in ids:
            self.counts[one] = self.counts.get(one, 0) + 1
            self.last[one] = step
        due = [one for one in self.counts if one not in self.held and self.counts[one] >= self.spec.admit]
        self.held.update(due)
        return sorted(due)

    def evict(self, step: int) -> list[int]:
        """Before a step; returns the ids that lose their row."""
        if not step or step % self.spec.evict_every:
            return []
        had, oldest = set(self.held), self.spec.evict == "age"
        if oldest and self.spec.max_age is not None:
            self._forget([one for one in self.counts if step - self.last[one] > self.spec.max_age])
        by_age = {one: (self.last[one], self.counts[one], one) for one in self.counts}
        by_count = {one: (self.counts[one], self.last[one], one) for one in self.counts}
        for some, order in ((self.held, by_age if oldest else by_count), (set(by_age) - self.held, by_age)):
            lowest = sorted(some, key=order.__getitem__)
            self._forget(lowest[: max(0, len(lowest) - self.spec.rows)])
        return sorted(had - self.held)

    def _forget(self, ids: list[int]) -> None:
        for one in ids:
            del self.counts[one], self.last[one]
            self.held.discard(one)
