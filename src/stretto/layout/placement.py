"""Placements: the pipeline rank of each stage, in model order."""

from __future__ import annotations

from collections.abc import Callable

from stretto.errors import StrettoError, nearest


def linear(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Place consecutive stages on the same rank: 0 0 1 1 2 2 for three ranks with two chunks."""
    return tuple(rank for rank in range(ranks) for _ in range(chunks))


def loop(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Place the stages of each chunk on ranks in order: 0 1 2 0 1 2. Narayanan et al. 2021, section 2.2."""
    return tuple(range(ranks)) * chunks


def zigzag(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Place the chunks down the ranks and up again in turn: 0 1 2 2 1 0 0 1 2."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1]))


def vee(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Place two chunks, down the ranks and up: 0 1 2 2 1 0; rank 0 has the first and the last stage. Qi et
    al. 2024 (ZB-V).
    """
    if chunks != 2:
        raise StrettoError(
            f"chunks={chunks} with placement vee", hint="vee has 2 chunks; zigzag takes any number"
        )
    return zigzag(ranks, 2)


def mirror(ranks: int) -> tuple[int, ...]:
    """Place two copies of the model, one down the ranks and one up, with stages numbered copy after copy:
    0 1 2 2 1 0. Li and Hoefler 2021, "Chimera", section 3.1.
    """
    return zigzag(ranks, 2)


# not `mirror`: it places two copies of a model
PLACEMENTS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "linear": linear,
    "loop": loop,
    "vee": vee,
    "zigzag": zigzag,
}


def place(name: str, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Return the rank of each of `ranks * chunks` stages under the named placement."""
    for field, value in (("ranks", ranks), ("chunks", chunks)):
        if value < 1:
            raise StrettoError(f"{field}={value} is not allowed", hint=f"{field} is at least 1")
    if name not in PLACEMENTS:
        suggestion = nearest(name, PLACEMENTS)
        hint = f"did you mean {suggestion!r}? " * bool(suggestion) + f"placements are {', '.join(PLACEMENTS)}"
        raise StrettoError(f"unknown placement {name!r}", hint=hint)
    return PLACEMENTS[name](ranks, chunks)
