"""Fused attention, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from stretto.calibrate.stopwatch import Stopwatch

Row = list[float]  # batch, queries, keys, heads, head_dim, causal, backward, seconds

# batch, positions, heads, head_dim
_CPU = ((1, 128, 4, 64), (4, 128, 4, 64), (4, 128, 1, 64), (8, 32, 4, 64), (2, 512, 4, 64), (1, 1024, 2, 64))
_CUDA = ((1, 1024, 16, 128), (4, 2048, 16, 128), (1, 4096, 8, 128), (4, 1024, 16, 64), (1, 16384, 4, 128))


def attention(
    watch: Stopwatch, device: torch.device, quick: bool
) -> Iterator[tuple[str, Callable[[list[Row]], None]]]:
    """What there is to measure: its name, and the call that adds its rows, of forward and backward."""
    shapes = _CUDA if device.type == "cuda" else _CPU
    for batch, rows, heads, width in shapes[1:3] if quick else shapes:

        def measure(into: list[Row], b: int = batch, s: int = rows, h: int = heads, d: int = width) -> None:
            into.extend(_attend(watch, device, b, s, h, d))

        yield f"{batch} x {rows} positions, {heads} heads of {width}", measure


def _attend(watch: Stopwatch, device: torch.device, b: int, s: int, h: int, d: int) -> Iterator[Row]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # in memory by position, as a block's product leaves them
    q, k, v = (
        torch.randn(b, s, h, d, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        once = watch.seconds(forward)
    out = forward()
    given = torch.ones_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), given, retain_graph=True)

    yield [b, s, s, h, d, 1, 0, once]
    yield [b, s, s, h, d, 1, 1, watch.seconds(backward)]
