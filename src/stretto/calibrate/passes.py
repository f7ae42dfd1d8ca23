"""Operations that are bound by memory, each forward and backward together.

A row's bytes are those that `cost.time.work` counts for the same operation, whatever a kernel really moves:
seconds per counted byte are what it needs. Of forward and backward together the row is the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.calibrate.stopwatch import Stopwatch
from stretto.models.rotary import Rotary
from stretto.parallel.norm import LeanLayerNorm

Row = list[float]  # bytes, seconds
Made = tuple[Callable[[], object], float, int]  # a call, the bytes that it counts as, passes in it

_WIDTH = 256
_ROWS = {"cpu": (8, 512, 4096), "cuda": (512, 8192, 65536)}
_LEAST = 1.5e-6  # seconds of the smallest kernel
_FASTEST = 2e11  # bytes/s, out of the cache of a CPU's core


def passes(
    watch: Stopwatch, device: torch.device, quick: bool
) -> Iterator[tuple[str, Callable[[dict[str, list[Row]]], None]]]:
    """What there is to measure: the kind and the call that adds its rows."""
    rows = _ROWS["cuda" if device.type == "cuda" else "cpu"]
    for kind, make in KINDS.items():

        def measure(
            into: dict[str, list[Row]],
            kind: str = kind,
            make: Callable[[torch.device, int], Made] = make,
        ) -> None:
            into[kind] = rows_of(watch, device, make, rows[:2] if quick else rows)

        yield kind, measure


def rows_of(
    watch: Stopwatch, device: torch.device, make: Callable[[torch.device, int], Made], counts: tuple[int, ...]
) -> list[Row]:
    """Kernels alone: what the fewest rows take is that of starting them and of autograd, which `host` counts
    by the layer, and is taken off all but a kernel's least.
    """
    found, fixed = list[Row](), 0.0
    for count in counts:
        call, size, parts = make(device, count)
        seconds = watch.seconds(call) / parts
        if not found:
            fixed = max(0.0, seconds - _LEAST) if device.type == "cpu" else 0.0
        # what is faster than the fixed part was measured badly; no pass is faster than caches by far
        least = max(_LEAST, size / parts / _FASTEST) if device.type == "cpu" else 0.0
        found.append([size / parts, max(seconds - fixed, least)])
    return found


def _tensor(device: torch.device, *size: int) -> Tensor:
    return torch.randn(*size, device=device)


def _both(x: Tensor, forward: Callable[[Tensor], Tensor], bytes_: float) -> Made:
    """A forward and its backward."""
    x.requires_grad_()
    given = torch.ones_like(forward(x))

    def call() -> None:
        x.grad = None
        forward(x).backward(given)

    return call, bytes_ * 4 * x.numel(), 2


def _norm(device: torch.device, rows: int) -> Made:
    norm = LeanLayerNorm(_WIDTH, device=device)
    return _both(_tensor(device, rows, _WIDTH), norm, 2 + 3)


def _gelu(device: torch.device, rows: int) -> Made:
    return _both(_tensor(device, rows, _WIDTH), partial(F.gelu, approximate="tanh"), 2 + 3)


def _gated(device: torch.device, rows: int) -> Made:
    def forward(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    return _both(_tensor(device, rows, 2 * _WIDTH), forward, (3 + 5) / 2)


def _softmax(device: torch.device, rows: int) -> Made:
    # passes over a matrix of scores, as `attention_seconds` counts them
    return _both(_tensor(device, rows, _WIDTH), partial(F.softmax, dim=-1), 2 + 3)


def _rope(device: torch.device, rows: int) -> Made:
    heads = _WIDTH // 64
    turn = Rotary(64, 1e4).to(device)
    return _both(_tensor(device, 1, heads, rows, 64), turn, 2 + 2)


def _loss(device: torch.device, rows: int) -> Made:
    vocab = 4096 if device.type == "cuda" else 2048
    rows = max(8, rows * _WIDTH // vocab)
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    scores = _tensor(device, rows, vocab).requires_grad_()

    def call() -> None:
        scores.grad = None
        F.cross_entropy(scores, target, reduction="sum").backward()

    # 8 and twice 4 bytes of a logit forward, 12 back
    return call, 28.0 * scores.numel(), 4


def _dropout(device: torch.device, rows: int) -> Made:
    return _both(_tensor(device, rows, _WIDTH), partial(F.dropout, p=0.1), 2 + 2)


def _add(device: torch.device, rows: int) -> Made:
    x, y = _tensor(device, rows, _WIDTH), _tensor(device, rows, _WIDTH)
    return lambda: x + y, 12.0 * x.numel(), 1


def _copy(device: torch.device, rows: int) -> Made:
    x = _tensor(device, rows, _WIDTH)
    return lambda: x.clone(), 8.0 * x.numel(), 1


def _reduce(device: torch.device, rows: int) -> Made:
    x, y = _tensor(device, rows, _WIDTH), _tensor(device, rows, _WIDTH)
    return lambda: x.add_(y), 12.0 * x.numel(), 1


def _embedding(device: torch.device, rows: int) -> Made:
    table = nn.Embedding(2048, _WIDTH, device=device)
    ids = torch.randint(2048, (rows,), device=device)
    given = torch.ones(rows, _WIDTH, device=device)

    def call() -> None:
        table(ids).backward(given)

    # a forward of two passes and a backward of four, over the rows that were looked up
    return call, 3 * 2 * 4.0 * given.numel(), 3


def _adam(device: torch.device, rows: int) -> Made:
    weight = nn.Parameter(_tensor(device, rows * _WIDTH))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, fused=True)

    def call() -> None:
        assert weight.grad is not None
        norm = weight.grad.double().square().sum() if weight.device.type == "cpu" else weight.grad.norm()
        weight.grad.mul_(torch.clamp(1.0 / norm, max=1.0).to(weight.dtype))
        optimizer.step()

    # master and two means read and written, the gradient's norm and scale, the gradient
    return call, (24 + 12 + 4.0) * weight.numel(), 1


KINDS: dict[str, Callable[[torch.device, int], Made]] = {
    "add": _add,
    "norm": _norm,
    "rope": _rope,
    "gated": _gated,
    "gelu": _gelu,
    "softmax": _softmax,
    "dropout": _dropout,
    "copy": _copy,
    "embedding": _embedding,
    "loss": _loss,
    "adam": _adam,
    "reduce": _reduce,
}
