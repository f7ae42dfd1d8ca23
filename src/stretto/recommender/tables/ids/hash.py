"""Rows for an unbounded set of ids: admission, eviction and reuse of rows.

All rules depend on an id's history and on the table as a whole, so that they decide alike under every
placement:

* every occurrence of an id in a batch is counted; an id that reaches `admit` occurrences, this batch
  included, gets a row, which is used for the whole batch;
* eviction runs before every `evict_every`-th step. First by age (with `age`): ids not seen in the last
  `max_age` steps are evicted. Then by capacity: of the ids with rows, of all shards together, the lowest are
  evicted until `rows` remain: by (occurrences, last step seen, id) with `least-frequent`, by (last step seen,
  occurrences, id) with `age`;
* ids that wait for a row are forgotten at the same time until `rows` of them remain, least recently seen
  first, by (last step seen, occurrences, id). So a map never has more than 2 `rows` ids plus those of
  `evict_every` steps;
* an evicted id is as good as new: no count, no states, and initial values when it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import all_max, all_sum
from stretto.errors import StrettoError
from stretto.recommender.placement import TableSpec
from stretto.recommender.tables.ids.id_map import NONE, Entries, IdMap, SortedMap
from stretto.recommender.tables.splitmix import owner

_BITS = 12  # resolved in each round, which sums 4096 counts


@dataclass(frozen=True)
class Kth:
    """The k-th smallest value, and how many values of all ranks are below it and equal to it."""

    value: int
    below: int
    equal: int


def kth_smallest(values: Tensor, k: int, group: ProcessGroup | None) -> Kth:
    """The k-th smallest, counted from 1, of all values of a group's ranks.

    A radix select from the upper bits down: each round counts values by their next 12 bits and sums the
    counts over the ranks, at most six rounds. All ranks get the same result.

    Args:
        values: [n] int64, non-negative; n may differ between ranks, and be 0.
        k: from 1 to the number of values.
    """
    largest = torch.zeros(1, dtype=torch.int64, device=values.device)
    if len(values):
        largest[0] = values.max()
    bits = int(all_max(largest, group)).bit_length()
    value = 0
    below = 0
    equal = 0
    for shift in _shifts(bits):
        digit = values >> shift
        counts = all_sum(torch.bincount(digit, minlength=1 << _BITS), group)
        until = torch.cumsum(counts, 0)
        here = int(torch.searchsorted(until, k - below))
        equal = int(counts[here])
        below += int(until[here]) - equal
        values = values[digit == here] - (here << shift)
        value += here << shift
    return Kth(value, below, equal)


def lowest(keys: Sequence[Tensor], k: int, group: ProcessGroup | None) -> Tensor:
    """The k lowest of all ranks' entries, compared by their first key, where these are equal by the second,
    and so on; by the last no two are equal.

    Args:
        keys: [n] int64 each, non-negative.
        k: from 0 to the number of entries.

    Returns:
        [n] bool: which of this rank's entries.
    """
    gone = torch.zeros(len(keys[0]), dtype=torch.bool, device=keys[0].device)
    open_ones = torch.arange(len(gone), device=gone.device)
    for key in keys:
        if not k:
            break
        local_keys = key[open_ones]
        threshold = kth_smallest(local_keys, k, group)
        if threshold.below + threshold.equal == k:
            gone[open_ones[local_keys <= threshold.value]] = True
            break
        gone[open_ones[local_keys < threshold.value]] = True
        open_ones = open_ones[local_keys == threshold.value]
        k -= threshold.below
    return gone


def _shifts(bits: int) -> list[int]:
    """The shift of each round; that of the last is 0."""
    shifts = [max(0, bits - _BITS)]
    while shifts[-1]:
        shifts.append(max(0, shifts[-1] - _BITS))
    return shifts


STATE = ("ids", "counts", "last_seen", "rows")  # of `HashIds.state`


@dataclass(frozen=True)
class BatchRows:
    """The rows of a batch's ids.

    Attributes:
        rows: [n] int64 local rows; -1: not admitted, the vector is zeros and has no gradient.
        fresh_ids, fresh_rows: [k] int64, the ids that got a row with this batch, ascending. The row may be
            reused, so it needs initial values and states.
    """

    rows: Tensor
    fresh_ids: Tensor
    fresh_rows: Tensor


@dataclass(frozen=True)
class Taken:
    """Rows of a saved shard, [k] int64 each: row `old` of it becomes local row `new`."""

    old: Tensor
    new: Tensor


class HashIds:
    """Maps the ids of one shard of a hash table to local rows; a new id gets the smallest free row.

    Deterministic, so that the column shards of a table can each keep a copy. It changes with each batch: call
    `evict` and `rows` at the beginning of their step, so that a checkpoint between two steps does not contain
    ids of the next one.

    Attributes:
        used: ids with a row.
        waiting: ids that are counted and have no row.
        extent: rows that the store needs: one more than the highest row ever used.
    """

    def __init__(
        self, spec: TableSpec, device: torch.device | str = "cpu", compiled: bool | None = None
    ) -> None:
        """Args:
        spec: of the whole table.
        device: where ids come from and rows go to.
        compiled: as for `open_map`.
        """
        if spec.ids != "hash":
            raise StrettoError(f"table {spec.name} has ids {spec.ids}, no map of them", hint="ids: hash")
        self._spec = spec
        self._device = torch.device(device)
        self._map = open_map(device, compiled)
        self._free = self._numbers(0)
        self.used = 0
        self.extent = 0

    @property
    def waiting(self) -> int:
        return len(self._map) - self.used

    def rows(self, ids: Tensor, step: int) -> BatchRows:
        """Counts a batch and assigns rows to ids that reach the admission threshold.

        Args:
            ids: [n] int64, non-negative: of all ranks' samples, in any order.
            step: number of the batch, from 0, never decreasing.
        """
        self._check(ids)
        rows, due = self._map.see(ids.contiguous(), step, self._spec.admit)
        granted = self._take_free(len(due))
        if len(due):
            self._map.give(due, granted)
            missing = torch.nonzero(rows < 0).flatten()
            rows[missing] = self._map.find(ids[missing])
        return BatchRows(rows, due, granted)

    def peek(self, ids: Tensor) -> Tensor:
        """Rows [n] of ids [n], -1 where they have none. Counts and admits nothing: for evaluation."""
        self._check(ids)
        return self._map.find(ids.contiguous())

    def evict(self, step: int, group: ProcessGroup | None = None) -> int:
        """Evicts ids before those of `step` are counted.

        Args:
            group: of a row-split table, a group that contains the ranks of all shards; ranks without a shard
                call it on an empty map. None: this map holds the whole table.

        Returns:
            The number of rows freed in this map.
        """
        if not due(self._spec, step):
            return 0
        by_age = self._spec.evict == "age" and self._spec.max_age is not None
        if not by_age and not any(self._too_many([self.used, self.waiting], group)):
            return 0
        known, was = self._map.entries(), self.used
        gone = torch.zeros(len(known.ids), dtype=torch.bool, device=self._device)
        if by_age and self._spec.max_age is not None:
            gone = step - known.last > self._spec.max_age
        held = known.rows != NONE
        kinds = [torch.nonzero(kind & ~gone).flatten() for kind in (held, ~held)]
        by_count = (self._spec.evict == "least-frequent", False)
        excess = self._too_many([len(keys) for keys in kinds], group)
        for keys, counted, k in zip(kinds, by_count, excess, strict=True):
            if k:
                counts = known.counts[keys]
                last = known.last[keys]
                ids = known.ids[keys]
                gone[keys] = lowest((counts, last, ids) if counted else (last, counts, ids), k, group)
        if bool(gone.any()):
            self._keep(known.where(~gone))
        return was - self.used

    def state(self) -> dict[str, Tensor]:
        """All entries, on the CPU, by id: `ids`, `counts`, `last_seen`, `rows` (-1: waiting), [m] int64."""
        known = self._map.entries().sorted()
        values = (known.ids, known.counts, known.last, known.rows)
        return {name: value.cpu() for name, value in zip(STATE, values, strict=True)}

    def load_state(self, state: Mapping[str, Tensor], part: int = 0, parts: int = 1) -> Taken:
        """Adds the entries of one saved shard that belong to shard `part` of `parts`.

        Call it for each saved shard (for one of several column shards). An empty map that takes all of a
        state keeps its row numbers.

        Raises:
            StrettoError: an invalid state, or an id that was loaded before.
        """
        saved = self._checked(state)
        entries = saved.where(owner(saved.ids, parts) == part).sorted()
        same = not len(self._map) and len(entries.ids) == len(saved.ids)
        known = self._map.entries()
        if bool(torch.isin(entries.ids, known.ids).any()):
            raise StrettoError(
                f"table {self._spec.name}: ids that were loaded already", hint="each saved shard once"
            )
        held = entries.rows != NONE
        old = entries.rows[held]
        new = entries.rows.clone()
        new[held] = old if same else self._take_free(len(old))
        entries.rows = new
        self._keep(known.with_(entries))
        return Taken(old, new[held])

    def _too_many(self, there: Sequence[int], group: ProcessGroup | None) -> list[int]:
        """By how many the ids of each kind, of all ranks, exceed the table's rows."""
        every = all_sum(torch.tensor(there, device=self._device), group)
        return (every - self._spec.rows).clamp(min=0).tolist()

    def _keep(self, entries: Entries) -> None:
        self._map.replace(entries)
        held = entries.rows[entries.rows != NONE]
        self.used = len(held)
        self.extent = max(self.extent, int(held.max()) + 1 if len(held) else 0)
        free = torch.ones(self.extent, dtype=torch.bool, device=self._device)
        free[held] = False
        self._free = torch.nonzero(free).flatten()

    def _take_free(self, count: int) -> Tensor:
        """Takes the smallest free row numbers."""
        again = self._free[:count]
        self._free = self._free[count:]
        new = self.extent + self._numbers(count - len(again))
        self.extent += len(new)
        self.used += count
        return torch.cat((again, new))

    def _numbers(self, count: int) -> Tensor:
        return torch.arange(count, device=self._device)

    def _check(self, ids: Tensor) -> None:
        if len(ids) and int(ids.min()) < 0:
            raise StrettoError(f"table {self._spec.name}: id {int(ids.min())}", hint="ids are 0 or more")

    def _checked(self, state: Mapping[str, Tensor]) -> Entries:
        def wrong(what: str) -> StrettoError:
            return StrettoError(f"table {self._spec.name}: saved ids {what}", hint="load another checkpoint")

        for name in STATE:
            if name not in state:
                raise wrong(f"without {name}")
            if state[name].dtype != torch.int64 or state[name].shape != state["ids"].shape:
                raise wrong(f"with {name} of another type or number")
        saved = Entries(*(state[name].to(self._device) for name in STATE))
        held = saved.rows[saved.rows != NONE]
        if len(torch.unique(saved.ids)) < len(saved.ids) or len(torch.unique(held)) < len(held):
            raise wrong("that are not each once")
        if any(
            len(values) and int(values.min()) < 0 for values in (saved.ids, saved.counts, saved.last, held)
        ):
            raise wrong("with negative numbers")
        return saved


def due(spec: TableSpec, step: int) -> bool:
    """Whether ids are evicted before this step."""
    return step > 0 and step % spec.evict_every == 0


def open_map(device: torch.device | str = "cpu", compiled: bool | None = None) -> IdMap:
    """An id map for `device`: compiled open addressing on a CPU where numba is installed, otherwise sorted
    tensors.

    Args:
        compiled: which of the two; None: the faster one that works.
    """
    if compiled or (compiled is None and torch.device(device).type == "cpu"):
        try:
            from stretto.recommender.tables.ids.compiled import CompiledMap

            return CompiledMap()
        except ImportError:
            if compiled:
                raise
    return SortedMap(device)
