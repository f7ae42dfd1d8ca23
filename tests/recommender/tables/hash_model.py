"""A hash table's rules in a dict: what every shard of every map must do together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stretto.recommender.placement import TableSpec


@dataclass
class Entry:
    count: int = 0
    last: int = 0
    value: float | None = None  # what its row has; None: no row


@dataclass
class PlainTable:
    spec: TableSpec
    by_id: dict[int, Entry] = field(default_factory=dict)

    def see(self, ids: Iterable[int], step: int) -> list[int]:
        """Count a batch; who gets a row."""
        fresh = list[int]()
        for key in ids:
            entry = self.by_id.setdefault(key, Entry())
            entry.count, entry.last = entry.count + 1, step
        for key, entry in self.by_id.items():
            if entry.value is None and entry.count >= self.spec.admit:
                entry.value = 0.0
                fresh.append(key)
        return sorted(fresh)

    def evict(self, step: int) -> None:
        spec = self.spec
        if step == 0 or step % spec.evict_every:
            return
        if spec.evict == "age" and spec.max_age is not None:
            seen = range(step - spec.max_age, step)
            self.by_id = {key: e for key, e in self.by_id.items() if e.last in seen}
        with_row = [key for key, e in self.by_id.items() if e.value is not None]
        waiting = [key for key, e in self.by_id.items() if e.value is None]
        self._cut(with_row, spec.evict == "least-frequent")
        self._cut(waiting, False)

    def _cut(self, ids: Sequence[int], by_count: bool) -> None:
        def rank(key: int) -> tuple[int, int, int]:
            entry = self.by_id[key]
            pair = (entry.count, entry.last) if by_count else (entry.last, entry.count)
            return (*pair, key)

        for key in sorted(ids, key=rank)[: max(0, len(ids) - self.spec.rows)]:
            del self.by_id[key]

    def entries(self) -> dict[int, tuple[int, int, bool]]:
        return {key: (e.count, e.last, e.value is not None) for key, e in self.by_id.items()}
