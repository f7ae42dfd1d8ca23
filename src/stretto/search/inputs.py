"""What a search is asked for, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isnan

from stretto.errors import StrettoError, nearest
from stretto.layout.placement import PLACEMENTS, place
from stretto.simulate.costs import Costs

MOST_CHUNKS = 4  # looked at where neither the costs nor the caller say how many


def limits(memory: float | str | Sequence[float | None] | None, ranks: int) -> list[float | None]:
    """The limit of activations of every rank, in rank units; None for none.

    Raises:
        StrettoError: no program keeps to it, or it is not a number or one for each rank.
    """
    # text is a sequence too
    if isinstance(memory, str):
        raise StrettoError(
            f"memory is {memory!r}, must be a number of microbatches or one for each rank",
            hint="say memory=1 or more, or leave it out for no limit",
        )
    given = list(memory) if isinstance(memory, Sequence) else [memory] * ranks
    if len(given) != ranks:
        raise StrettoError(
            f"memory has {len(given)} entries, must be one number or one each for {ranks} ranks",
            hint=f"give {ranks} numbers, None where a rank has no limit",
        )
    for rank, limit in enumerate(given):
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int | float) or isnan(limit):
            raise StrettoError(
                f"memory is {limit!r} on rank {rank}, must be a number of microbatches",
                hint="say memory=1 or more, or leave it out for no limit",
            )
        # all forwards of a microbatch come before its first backward, on every placement
        if limit < 1:
            raise StrettoError(
                f"memory is {limit} on rank {rank}, but every program holds a whole microbatch at once",
                hint="the smallest limit that a program can keep to is memory=1",
            )
    return [None if limit == float("inf") else limit for limit in given]


def chunk_counts(ranks: int, costs: Costs, chunks: int | None) -> list[int]:
    """How many stages a rank may hold.

    Raises:
        StrettoError: the costs are of stages that cannot be dealt out evenly, or not of `chunks` a rank.
    """
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise StrettoError(
            f"chunks is {chunks!r}, must be a whole number of at least 1", hint="nearest is chunks=1"
        )
    if costs.per_stage is None:
        return [chunks] if chunks is not None else [c for c in (1, 2, MOST_CHUNKS) if c == 1 or ranks > 1]
    stages = len(costs.per_stage)
    if not stages or stages % ranks:
        near = max(1, round(stages / ranks)) * ranks
        raise StrettoError(
            f"per_stage has {stages} entries, which {ranks} ranks cannot share evenly",
            hint=f"nearest is {near} stages, {near // ranks} a rank",
        )
    if chunks is not None and chunks * ranks != stages:
        raise StrettoError(
            f"chunks is {chunks}, but per_stage has {stages} entries, {stages // ranks} for each rank",
            hint=f"say chunks={stages // ranks} or leave it out",
        )
    return [stages // ranks]


def placements(ranks: int, counts: Iterable[int], wanted: str | None) -> list[tuple[int, ...]]:
    """The placements to look at, each once.

    Raises:
        StrettoError: `wanted` is no placement, or not one of so many chunks.
    """
    if wanted is not None and wanted not in PLACEMENTS:
        near = nearest(wanted, PLACEMENTS)
        hint = f"did you mean {near!r}? " * bool(near) + f"placements are {', '.join(PLACEMENTS)}"
        raise StrettoError(f"placement is {wanted!r}, which is none", hint=hint)
    found: dict[tuple[int, ...], None] = {}
    for count in counts:
        for name in ("zigzag", "loop", "linear") if wanted is None else (wanted,):
            if name == "vee" and count != 2:
                continue
            found.setdefault(place(name, ranks, count))
    if not found:
        raise StrettoError(
            f"placement is 'vee', but ranks hold {' or '.join(map(str, counts))} chunks",
            hint="vee has 2 chunks; zigzag takes any number",
        )
    return list(found)


def choice(name: str, value: object, allowed: Sequence[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in allowed:
        near = nearest(str(value), allowed)
        raise StrettoError(
            f"{name} is {value!r}, must be {' or '.join(map(repr, allowed))}",
            hint=f"did you mean {near!r}?" if near else None,
        )
    return value
