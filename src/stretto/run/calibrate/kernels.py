"""Time kernels on this device: attention, matrix products, and memory-bound passes.

The bytes in a memory-bound row are those that `planner.time.kernels` counts for the same operation, whatever
the kernel really moves, because the planner needs seconds per counted byte. A row is the mean of forward and
backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.device import on_accelerator
from stretto.engine.models.rotary import Rotary
from stretto.engine.parallel.tensor import matmul
from stretto.engine.parallel.tensor.norm import MemoryEfficientLayerNorm
from stretto.planner.machines.device import Precision
from stretto.run.calibrate.stopwatch import Stopwatch

Row = list[float]  # batch, queries, keys, heads, head_dim, causal, backward, seconds

# batch, positions, heads, head_dim
_HOST_CASES = (
    (1, 128, 4, 64),
    (4, 128, 4, 64),
    (4, 128, 1, 64),
    (8, 32, 4, 64),
    (2, 512, 4, 64),
    (1, 1024, 2, 64),
)
_CASES = (
    (1, 1024, 16, 128),
    (4, 2048, 16, 128),
    (1, 4096, 8, 128),
    (4, 1024, 16, 64),
    (1, 16384, 4, 128),
)


def attention(
    watch: Stopwatch, device: torch.device, quick: bool
) -> Iterator[tuple[str, Callable[[list[Row]], None]]]:
    """Measurements: a name, and a call that adds the rows of forward and backward."""
    shapes = _CASES if on_accelerator(device) else _HOST_CASES
    for batch, rows, heads, width in shapes[1:3] if quick else shapes:

        def measure(into: list[Row], b: int = batch, s: int = rows, h: int = heads, d: int = width) -> None:
            into.extend(_attend(watch=watch, device=device, b=b, s=s, h=h, d=d))

        yield f"{batch} x {rows} positions, {heads} heads of {width}", measure


def _attend(watch: Stopwatch, device: torch.device, b: int, s: int, h: int, d: int) -> Iterator[Row]:
    dtype = torch.bfloat16 if on_accelerator(device) else torch.float32
    # laid out by position, as a block's projections leave them
    q, k, v = (
        torch.randn(b, s, h, d, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with torch.no_grad():
        once = watch.seconds(forward)
    out = forward()
    upstream = torch.ones_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)

    yield [b, s, s, h, d, 1, 0, once]
    yield [b, s, s, h, d, 1, 1, watch.seconds(backward)]


_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# rows of a microbatch, and (output, input) features, as in small models on CPUs split over a few ranks
_HOST_SHAPES = (
    (128, 512, 2048),
    ((64, 64), (128, 256), (256, 256), (768, 256), (1024, 256), (256, 1024), (4096, 256)),
)
_SHAPES = (
    (512, 2048, 8192),
    ((1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (12288, 4096), (4096, 12288), (32768, 4096)),
)


def shapes(device: torch.device, quick: bool) -> list[tuple[int, int, int]]:
    """(rows, output, input) features of the linears that are measured."""
    rows, features = _SHAPES if on_accelerator(device) else _HOST_SHAPES
    if quick:
        rows, features = rows[1:2], features[1:6:2]
    return [(m, n, k) for n, k in features for m in rows]


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """Measured precisions; the second by few shapes only, since it is rarely used on such a device."""
    return ("bf16", "fp32") if on_accelerator(device) else ("fp32", "bf16")


def products(
    watch: Stopwatch, device: torch.device, quick: bool
) -> Iterator[tuple[str, Callable[[dict[Precision, list[Row]]], None]]]:
    """Measurements, one per shape: a name, and a call that adds its rows."""
    first = precisions(device)[0]
    for precision in precisions(device):
        for m, n, k in shapes(device, quick or precision != first):

            def measure(
                into: dict[Precision, list[Row]], m: int = m, n: int = n, k: int = k, p: Precision = precision
            ) -> None:
                into.setdefault(p, []).extend(_linear(watch=watch, device=device, m=m, n=n, k=k, precision=p))

            yield f"{precision} {m} x {n} x {k}", measure


def _linear(
    watch: Stopwatch, device: torch.device, m: int, n: int, k: int, precision: Precision
) -> Iterator[Row]:
    """The three products of one linear: [m, k] to [m, n]."""
    dtype = _DTYPES[precision]
    x, weight, dy = (torch.ones(*size, device=device, dtype=dtype) for size in ((m, k), (n, k), (m, n)))
    gradient = torch.zeros(n, k, device=device)
    yield [m, n, k, 1, watch.seconds(lambda: matmul.linear(x, weight, None))]
    yield [m, k, n, 1, watch.seconds(lambda: matmul.input_gradient(dy, weight))]
    add = matmul.add_weight_gradient
    yield [n, k, m, 1, watch.seconds(lambda: add(gradient, dy, x, torch.float32))]


def merged(rows: list[Row]) -> list[Row]:
    """One row for equal sizes, which different layers may have, with the mean of their seconds."""
    samples = defaultdict[tuple[float, ...], list[float]](list)
    for *sizes, seconds in rows:
        samples[tuple(sizes)].append(seconds)
    return [[*sizes, sum(all_) / len(all_)] for sizes, all_ in sorted(samples.items())]


Passes = tuple[Callable[[], object], float, int]  # a call, the bytes counted for it, its number of passes

_WIDTH = 256
_HOST_ROWS, _ROWS = (8, 512, 4096), (512, 8192, 65536)
_SHORTEST = 1.5e-6  # seconds of the shortest kernel
_FASTEST = 2e11  # bytes/s, out of the cache of a CPU's core


def passes(
    watch: Stopwatch, device: torch.device, quick: bool
) -> Iterator[tuple[str, Callable[[dict[str, list[Row]]], None]]]:
    """Measurements: the kind of pass, and a call that adds its rows."""
    rows = _ROWS if on_accelerator(device) else _HOST_ROWS
    for kind, make in KINDS.items():

        def measure(
            into: dict[str, list[Row]],
            kind: str = kind,
            make: Callable[[torch.device, int], Passes] = make,
        ) -> None:
            into[kind] = rows_of(watch, device, make, rows[:2] if quick else rows)

        yield kind, measure


def rows_of(
    watch: Stopwatch,
    device: torch.device,
    make: Callable[[torch.device, int], Passes],
    counts: tuple[int, ...],
) -> list[Row]:
    """Rows of kernel time alone: the time for the fewest rows is launch and autograd overhead, which `host`
    counts per layer, so it is subtracted down to the time of the shortest kernel.
    """
    rows, fixed = list[Row](), 0.0
    for count in counts:
        call, size, parts = make(device, count)
        seconds = watch.seconds(call) / parts
        if not rows:
            fixed = max(0.0, seconds - _SHORTEST) if device.type == "cpu" else 0.0
        # a time below the fixed part is noise; no pass is much faster than the caches
        floor = max(_SHORTEST, size / parts / _FASTEST) if device.type == "cpu" else 0.0
        rows.append([size / parts, max(seconds - fixed, floor)])
    return rows


def _tensor(device: torch.device, *size: int) -> Tensor:
    return torch.randn(*size, device=device)


def _both(x: Tensor, forward: Callable[[Tensor], Tensor], bytes_: float) -> Passes:
    """A forward and its backward."""
    x.requires_grad_()
    upstream = torch.ones_like(forward(x))

    def call() -> None:
        x.grad = None
        forward(x).backward(upstream)

    return call, bytes_ * 4 * x.numel(), 2


def _norm(device: torch.device, rows: int) -> Passes:
    norm = MemoryEfficientLayerNorm(_WIDTH, device=device)
    return _both(_tensor(device, rows, _WIDTH), norm, 2 + 3)


def _gelu(device: torch.device, rows: int) -> Passes:
    return _both(_tensor(device, rows, _WIDTH), partial(F.gelu, approximate="tanh"), 2 + 3)


def _gated(device: torch.device, rows: int) -> Passes:
    def forward(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    return _both(_tensor(device, rows, 2 * _WIDTH), forward, (3 + 5) / 2)


def _softmax(device: torch.device, rows: int) -> Passes:
    # passes over a matrix of scores, as `attention_seconds` counts them
    return _both(_tensor(device, rows, _WIDTH), partial(F.softmax, dim=-1), 2 + 3)


def _rope(device: torch.device, rows: int) -> Passes:
    heads = _WIDTH // 64
    turn = Rotary(64, 1e4).to(device)
    return _both(_tensor(device, 1, heads, rows, 64), turn, 2 + 2)


def _loss(device: torch.device, rows: int) -> Passes:
    vocab = 4096 if on_accelerator(device) else 2048
    rows = max(8, rows * _WIDTH // vocab)
    target = torch.zeros(rows, dtype=torch.int64, device=device)
    scores = _tensor(device, rows, vocab).requires_grad_()

    def call() -> None:
        scores.grad = None
        F.cross_entropy(scores, target, reduction="sum").backward()

    # 8 and twice 4 bytes of a logit forward, 12 back
    return call, 28.0 * scores.numel(), 4


def _dropout(device: torch.device, rows: int) -> Passes:
    return _both(_tensor(device, rows, _WIDTH), partial(F.dropout, p=0.1), 2 + 2)


def _add(device: torch.device, rows: int) -> Passes:
    x, y = _tensor(device, rows, _WIDTH), _tensor(device, rows, _WIDTH)
    return lambda: x + y, 12.0 * x.numel(), 1


def _copy(device: torch.device, rows: int) -> Passes:
    x = _tensor(device, rows, _WIDTH)
    return lambda: x.clone(), 8.0 * x.numel(), 1


def _reduce(device: torch.device, rows: int) -> Passes:
    x, y = _tensor(device, rows, _WIDTH), _tensor(device, rows, _WIDTH)
    return lambda: x.add_(y), 12.0 * x.numel(), 1


def _embedding(device: torch.device, rows: int) -> Passes:
    table = nn.Embedding(2048, _WIDTH, device=device)
    ids = torch.randint(2048, (rows,), device=device)
    upstream = torch.ones(rows, _WIDTH, device=device)

    def call() -> None:
        table(ids).backward(upstream)

    # a forward of two passes and a backward of four, over the looked-up rows
    return call, 3 * 2 * 4.0 * upstream.numel(), 3


def _adam(device: torch.device, rows: int) -> Passes:
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


KINDS: dict[str, Callable[[torch.device, int], Passes]] = {
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
