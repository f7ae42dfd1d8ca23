"""The schedules by name that fit: what the search must not lose against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from stretto.errors import StrettoError
from stretto.schedule.action import Kind
from stretto.schedule.memory import peak_activations
from stretto.schedule.program import Program
from stretto.schedule.registry import names, options, schedule


def fixed_programs(
    ranks: int, microbatches: int, chunks: Sequence[int], memory: Sequence[float | None], split: bool
) -> Iterator[tuple[str, Program]]:
    """Every synchronous training schedule with one copy of the weights that fits, with what to call it.

    Args:
        chunks: the stages a rank may hold.
        memory: per rank, the limit of activations in rank units, None for none.
        split: whether backwards may be split into I and W.
    """
    seen: set[tuple[object, ...]] = set()
    for name in names():
        if name == "auto":
            continue
        for given in _options(name, ranks, microbatches, chunks):
            try:
                program = schedule(name, ranks, microbatches, **given)
            except StrettoError:
                continue
            key = (program.placement, program.orders)
            if key not in seen and _fits(program, chunks, memory, split):
                seen.add(key)
                yield " ".join([name, *(f"{option}={value}" for option, value in given.items())]), program


def _options(name: str, ranks: int, microbatches: int, chunks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Values worth trying of the options that a schedule takes; what it refuses is passed over."""
    known = options(name)
    values: dict[str, list[int]] = {}
    if "chunks" in known:
        values["chunks"] = [c for c in chunks if c > 1] or [1]
    if "waves" in known:
        values["waves"] = [c // 2 for c in chunks if c % 2 == 0] or [1]
    if "group" in known:
        groups = {ranks, ranks + 1, ranks + 2, 2 * ranks, microbatches}
        values["group"] = sorted({min(group, microbatches) for group in groups})
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def _fits(program: Program, chunks: Sequence[int], memory: Sequence[float | None], split: bool) -> bool:
    """Whether the program trains synchronously within the limits."""
    if not program.trains or program.versions or program.copies > 1:
        return False
    if any(program.placement.count(rank) not in chunks for rank in range(program.ranks)):
        return False
    kinds = {action.kind for order in program.orders for action in order}
    if not kinds <= {Kind.F, Kind.B, Kind.I, Kind.W} or (not split and Kind.I in kinds):
        return False
    peaks = peak_activations(program)
    return all(limit is None or peak <= limit + 1e-9 for peak, limit in zip(peaks, memory, strict=True))
