"""Hand-made piece tables of a small model under many layouts, and its true values."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from stretto.engine.parallel.fragment import ShardPlacement, TensorBox

HEADS, WIDTH, VOCABULARY = 4, 6, 13
TYPES = {"model.table.ids": torch.int64, "model.blocks.1.norm": torch.bfloat16}


@dataclass(frozen=True)
class Hand:
    """Sizes of the axes, tp fastest, then dp, then pp; `zero` cuts rows of the optimiser state over dp."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    zero: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp


def shapes() -> dict[str, tuple[int, ...]]:
    model: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH), "table.ids": (5,), "scale": ()}
    for layer in range(2):
        model |= {f"blocks.{layer}.{n}": s for n, s in layer_shapes().items()}
    state = {f"model.{name}": shape for name, shape in model.items()}
    return state | {f"optim.{name}": shape for name, shape in model.items() if name != "table.ids"}


def layer_shapes() -> dict[str, tuple[int, ...]]:
    return {"qkv": (3 * HEADS * 2, WIDTH), "up": (8, WIDTH), "down": (WIDTH, 8), "norm": (WIDTH,)}


def full(name: str) -> Tensor:
    """The tensor's one true value, a function of its name."""
    random = torch.Generator().manual_seed(crc32(name.encode()))
    value = torch.randn(shapes()[name], generator=random)
    return (value * 100).to(TYPES[name]) if name in TYPES else value


def place(hand: Hand, rank: int) -> dict[str, tuple[tuple[int, ...], ShardPlacement]]:
    """Name to (local shape, place) of what `rank` holds."""
    tp, dp, pp = rank % hand.tp, rank // hand.tp % hand.dp, rank // hand.tp // hand.dp
    first, last = pp == 0, pp == hand.pp - 1
    results: dict[str, tuple[tuple[int, ...], ShardPlacement]] = {}
    for name, shape in shapes().items():
        part = name.split(".", 1)[1]
        if part.startswith("blocks.") and int(part.split(".")[1]) * hand.pp // 2 != pp:
            continue
        if part in ("table.ids", "scale") and not last:
            continue
        if part == "embed" and not (first or last):
            continue
        owned = tp == 0 if part.rsplit(".", 1)[-1] in ("norm", "ids", "scale") else part != "embed" or first
        local, pieces = cut(part, shape, hand.tp, tp, owned)
        placed = ShardPlacement(name, shape, pieces)
        if hand.zero and name.startswith("optim.") and shape:
            local, placed = rows_over_dp(local, placed, hand.dp, dp)
        results[name] = (local, placed)
    return results


def cut(
    part: str, shape: tuple[int, ...], tp: int, at: int, owned: bool
) -> tuple[tuple[int, ...], tuple[TensorBox, ...]]:
    """Local shape and pieces of one tensor on tensor rank `at`."""
    last = part.rsplit(".", 1)[-1]
    if last == "embed":  # rows padded so that they divide; the last rank's padding belongs to no piece
        rows = -(-VOCABULARY // tp) + 1
        start, stop = min(at * rows, VOCABULARY), min((at + 1) * rows, VOCABULARY)
        return (rows, WIDTH), (
            TensorBox(offsets=(start, 0), sizes=(stop - start, WIDTH), local=(0, 0), owned=owned),
        )
    if last == "qkv":  # three stacked matrices, each cut by heads
        each, mine = shape[0] // 3, shape[0] // 3 // tp
        spots = [(i * each + at * mine, i * mine) for i in range(3)]
        return (3 * mine, WIDTH), tuple(
            TensorBox(offsets=(f, 0), sizes=(mine, WIDTH), local=(l, 0), owned=owned) for f, l in spots
        )
    if last == "up":
        rows = shape[0] // tp
        return (rows, WIDTH), (
            TensorBox(offsets=(at * rows, 0), sizes=(rows, WIDTH), local=(0, 0), owned=owned),
        )
    if last == "down":
        columns = shape[1] // tp
        return (WIDTH, columns), (
            TensorBox(offsets=(0, at * columns), sizes=(WIDTH, columns), local=(0, 0), owned=owned),
        )
    return shape, ShardPlacement.unsharded(part, shape, owned).pieces


def rows_over_dp(
    local: tuple[int, ...], placed: ShardPlacement, dp: int, at: int
) -> tuple[tuple[int, ...], ShardPlacement]:
    """Keep rows [at * n, (at + 1) * n) of the local tensor: a state sharded over data-parallel ranks too."""
    rows = -(-local[0] // dp)
    low, high = at * rows, (at + 1) * rows
    boxes: list[TensorBox] = []
    for p in placed.pieces:
        start, stop = max(low, p.local[0]), min(high, p.local[0] + p.sizes[0])
        if start < stop:
            moved = (p.offsets[0] + start - p.local[0], *p.offsets[1:])
            boxes.append(
                TensorBox(
                    offsets=moved,
                    sizes=(stop - start, *p.sizes[1:]),
                    local=(start - low, *p.local[1:]),
                    owned=p.owned,
                )
            )
    return (rows, *local[1:]), ShardPlacement(placed.name, placed.shape, tuple(boxes))


def true_state(hand: Hand, rank: int) -> dict[str, tuple[Tensor, ShardPlacement]]:
    """What the rank should hold: its pieces, and zeros as padding."""
    state: dict[str, tuple[Tensor, ShardPlacement]] = {}
    for name, (local, placed) in place(hand, rank).items():
        value = full(name)
        tensor = torch.empty(local, dtype=value.dtype)
        placed.fill(tensor, value)
        state[name] = (tensor, placed)
    return state


def blank_state(hand: Hand, rank: int) -> dict[str, tuple[Tensor, ShardPlacement]]:
    """The same tensors with other content, padding included."""
    return {n: (torch.full_like(t, 77), p) for n, (t, p) in true_state(hand, rank).items()}


def differing(state: dict[str, tuple[Tensor, ShardPlacement]], hand: Hand, rank: int) -> list[str]:
    """Names whose local tensors are not bitwise what they should be."""
    want = true_state(hand, rank)
    assert state.keys() == want.keys()
    return [n for n, (t, _) in state.items() if not torch.equal(bits(t), bits(want[n][0]))]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
