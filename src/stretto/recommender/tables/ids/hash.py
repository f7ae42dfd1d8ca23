"""Rows for an unbounded set of ids: admission, eviction and reuse of rows.

All rules depend only on an id's history and on the unsharded table, so that decisions are the same under
every placement:

* every occurrence of an id in a batch is counted; an id that reaches `admit` occurrences, this batch
  included, gets a row, which is used for all of the batch;
* eviction runs before every `evict_every`-th step. First by age (with `age`): ids that did not occur in the
  last `max_age` steps are evicted. Then by capacity: of the ids with rows, of all shards together, the lowest
  are evicted until `rows` remain: by (occurrences, last step, id) with `least-frequent`, by (last step,
  occurrences, id) with `age`;
* ids that wait for a row are dropped at the same time until `rows` of them remain, least recent first, by
  (last step, occurrences, id). A map therefore never has more than 2 `rows` ids plus those of `evict_every`
  steps;
* an evicted id that returns is treated as a new one: no count, no states, and initial values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import all_max, all_sum
from stretto.errors import StrettoError
from stretto.recommender.placement import TableSpec
from stretto.recommender.tables.ids.id_map import ID, LAST, NONE, ROW, IdMap, SortedMap, sorted_entries
from stretto.recommender.tables.splitmix import owner

_BITS = 12  # resolved in each round, which sums 4096 counts


class OrderStatistic(NamedTuple):
    """The k-th smallest value, and the number of values of all ranks below it and equal to it."""

    value: int
    below: int
    equal: int


def kth_smallest(values: Tensor, k: int, group: ProcessGroup | None) -> OrderStatistic:
    """Return the k-th smallest, counted from 1, of all values of a group's ranks.

    A radix select from the upper bits down: each round counts values by their next 12 bits and sums the
    counts over the ranks, at most six rounds. All ranks get the same result.

    Args:
        values: [n] int64, non-negative; n may differ between ranks, and be 0.
        k: from 1 to the number of values.
    """
    largest = torch.zeros(1, dtype=torch.int64, device=values.device)
    if len(values):
        largest[0] = values.max()
    shift = int(all_max(largest, group)).bit_length()
    value = below = equal = 0
    while True:
        shift = max(0, shift - _BITS)
        digits = values >> shift
        counts = all_sum(torch.bincount(digits, minlength=1 << _BITS), group)
        until = torch.cumsum(counts, 0)
        digit = int(torch.searchsorted(until, k - below))
        equal = int(counts[digit])
        below += int(until[digit]) - equal
        values = values[digits == digit] - (digit << shift)
        value += digit << shift
        if not shift:
            return OrderStatistic(value, below, equal)


def lowest(keys: Sequence[Tensor], k: int, group: ProcessGroup | None) -> Tensor:
    """Select the k lowest of all ranks' entries, compared by their first key, ties by the second, and so on.

    Args:
        keys: [n] int64 each, non-negative; the last key of every entry is different.
        k: from 0 to the number of entries.

    Returns:
        [n] bool: True for this rank's selected entries.
    """
    chosen = torch.zeros(len(keys[0]), dtype=torch.bool, device=keys[0].device)
    tied = torch.arange(len(chosen), device=chosen.device)
    for key in keys:
        if not k:
            break
        local_keys = key[tied]
        threshold = kth_smallest(local_keys, k, group)
        if threshold.below + threshold.equal == k:
            chosen[tied[local_keys <= threshold.value]] = True
            break
        chosen[tied[local_keys < threshold.value]] = True
        tied = tied[local_keys == threshold.value]
        k -= threshold.below
    return chosen


STATE = ("ids", "counts", "last_seen", "rows")  # of `HashIds.state`, in the order of an `IdMap`'s entries


class BatchRows(NamedTuple):
    """The rows of a batch's ids.

    Attributes:
        rows: [n] int64, local rows; -1 if the id is not admitted: its vector is zeros and has no gradient.
        fresh_ids, fresh_rows: [k] int64, the ids that got a row with this batch, ascending. The row may be
            reused, so it needs initial values and states.
    """

    rows: Tensor
    fresh_ids: Tensor
    fresh_rows: Tensor


class RowMapping(NamedTuple):
    """Rows of a saved shard, [k] int64 each: row `old` of it becomes local row `new`."""

    old: Tensor
    new: Tensor


class HashIds:
    """Maps the ids of one shard of a hash table to local rows; a new id gets the smallest free row.

    Deterministic, so that each column-wise shard of a table can have a copy. It changes with each batch: call
    `evict` and `rows` at the beginning of their step, so that a checkpoint between two steps does not contain
    ids of the next one.

    Attributes:
        used: number of ids with a row.
        waiting: number of ids that are counted and have no row.
        extent: rows that the store needs: one more than the highest row ever used.
    """

    def __init__(
        self, spec: TableSpec, device: torch.device | str = "cpu", compiled: bool | None = None
    ) -> None:
        """Args:
        spec: the unsharded table.
        device: device of ids and rows.
        compiled: as for `open_map`.
        """
        if spec.ids != "hash":
            raise StrettoError(f"table {spec.name} has ids {spec.ids}, and no id map", hint="ids: hash")
        self._spec = spec
        self._device = torch.device(device)
        self._map = open_map(device, compiled)
        self._free = torch.arange(0, device=self._device)
        self.used = 0
        self.extent = 0

    @property
    def waiting(self) -> int:
        return len(self._map) - self.used

    def rows(self, ids: Tensor, step: int) -> BatchRows:
        """Count a batch and assign rows to ids that reach the admission threshold.

        Args:
            ids: [n] int64, non-negative, ids of all ranks' samples in any order.
            step: index of the batch, from 0, never decreasing.
        """
        self._check(ids)
        rows, due = self._map.count(ids.contiguous(), step, self._spec.admit)
        granted = self._allocate(len(due))
        if len(due):
            self._map.assign(due, granted)
            missing = torch.nonzero(rows < 0).flatten()
            rows[missing] = self._map.find(ids[missing])
        return BatchRows(rows, due, granted)

    def peek(self, ids: Tensor) -> Tensor:
        """Return rows [n] of ids [n], -1 without a row. Counts and admits nothing: for evaluation."""
        self._check(ids)
        return self._map.find(ids.contiguous())

    def evict(self, step: int, group: ProcessGroup | None = None) -> int:
        """Evict ids before those of `step` are counted.

        Args:
            group: a group that contains the ranks of all shards of a row-split table (ranks without a shard
                call this on an empty map), or None if this map holds the whole table.

        Returns:
            The number of rows freed in this map.
        """
        if not due(self._spec, step):
            return 0
        by_age = self._spec.evict == "age" and self._spec.max_age is not None
        if not by_age and not any(self._excess([self.used, self.waiting], group)):
            return 0
        entries, used_before = self._map.entries(), self.used
        admitted = entries[ROW] != NONE
        gone = torch.zeros_like(admitted)
        if by_age and self._spec.max_age is not None:
            gone = step - entries[LAST] > self._spec.max_age
        candidates = [torch.nonzero(mask & ~gone).flatten() for mask in (admitted, ~admitted)]
        by_count = (self._spec.evict == "least-frequent", False)
        excess = self._excess([len(indices) for indices in candidates], group)
        for indices, counted, k in zip(candidates, by_count, excess, strict=True):
            if k:
                ids, counts, last, _ = entries[:, indices]
                gone[indices] = lowest((counts, last, ids) if counted else (last, counts, ids), k, group)
        if bool(gone.any()):
            self._replace(entries[:, ~gone])
        return used_before - self.used

    def state(self) -> dict[str, Tensor]:
        """Return all entries on the CPU by id, [m] int64 each; `rows` of waiting ids are -1."""
        return dict(zip(STATE, sorted_entries(self._map.entries()).cpu(), strict=True))

    def load_state(self, state: Mapping[str, Tensor], part: int = 0, parts: int = 1) -> RowMapping:
        """Add the entries of one saved shard that belong to shard `part` of `parts`.

        Call it for each saved shard (for one of several column-wise shards). An empty map that loads all of a
        state has the same row numbers.

        Raises:
            StrettoError: an invalid state, or an id that was loaded before.
        """
        saved = self._check_state(state)
        entries = sorted_entries(saved[:, owner(saved[ID], parts) == part])
        same_rows = not len(self._map) and entries.shape == saved.shape
        existing = self._map.entries()
        if bool(torch.isin(entries[ID], existing[ID]).any()):
            raise StrettoError(
                f"table {self._spec.name}: ids were loaded already", hint="load each saved shard once"
            )
        admitted = entries[ROW] != NONE
        old = entries[ROW, admitted]
        new = old if same_rows else self._allocate(len(old))
        entries[ROW, admitted] = new
        self._replace(torch.cat((existing, entries), 1))
        return RowMapping(old, new)

    def _excess(self, counts: Sequence[int], group: ProcessGroup | None) -> list[int]:
        """By how much the ids of all ranks exceed the table's rows, for each of this rank's counts."""
        total = all_sum(torch.tensor(counts, device=self._device), group)
        return (total - self._spec.rows).clamp(min=0).tolist()

    def _replace(self, entries: Tensor) -> None:
        self._map.replace(entries)
        rows = entries[ROW, entries[ROW] != NONE]
        self.used = len(rows)
        self.extent = max(self.extent, int(rows.max()) + 1 if len(rows) else 0)
        free = torch.ones(self.extent, dtype=torch.bool, device=self._device)
        free[rows] = False
        self._free = torch.nonzero(free).flatten()

    def _allocate(self, count: int) -> Tensor:
        """Allocate the smallest free row numbers."""
        reused = self._free[:count]
        self._free = self._free[count:]
        new = self.extent + torch.arange(count - len(reused), device=self._device)
        self.extent += len(new)
        self.used += count
        return torch.cat((reused, new))

    def _check(self, ids: Tensor) -> None:
        if len(ids) and int(ids.min()) < 0:
            raise StrettoError(f"table {self._spec.name}: id {int(ids.min())}", hint="ids are 0 or more")

    def _check_state(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the entries of a saved state if they are valid."""

        def error(problem: str) -> StrettoError:
            return StrettoError(
                f"table {self._spec.name}: saved ids {problem}", hint="load another checkpoint"
            )

        for name in STATE:
            if name not in state:
                raise error(f"without {name}")
            if state[name].dtype != torch.int64 or state[name].shape != state["ids"].shape:
                raise error(f"with {name} of a wrong type or length")
        entries = torch.stack([state[name].to(self._device) for name in STATE])
        rows = entries[ROW, entries[ROW] != NONE]
        if any(len(torch.unique(values)) < len(values) for values in (entries[ID], rows)):
            raise error("or rows that occur twice")
        if bool((entries[:ROW] < 0).any()) or bool((rows < 0).any()):
            raise error("with negative numbers")
        return entries


def due(spec: TableSpec, step: int) -> bool:
    """True if ids are evicted before this step."""
    return step > 0 and step % spec.evict_every == 0


def open_map(device: torch.device | str = "cpu", compiled: bool | None = None) -> IdMap:
    """Return an id map for `device`.

    Args:
        compiled: True for open addressing compiled by numba, False for sorted tensors; by default compiled on
            a CPU if numba is installed.
    """
    if compiled or (compiled is None and torch.device(device).type == "cpu"):
        try:
            from stretto.recommender.tables.ids.compiled import CompiledMap

            return CompiledMap()
        except ImportError:
            if compiled:
                raise
    return SortedMap(device)
