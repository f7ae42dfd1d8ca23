"""Matrix products as linear layers make them: forward, gradient of the input, gradient of the weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from stretto.calibrate.stopwatch import Stopwatch
from stretto.cost.machine.device import Precision
from stretto.parallel import matmul

Row = list[float]  # m, n, k, batch, seconds

_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# rows of a microbatch, and (output, input) features: what small models on CPUs have, split over a few ranks
_CPU = (
    (128, 512, 2048),
    ((64, 64), (128, 256), (256, 256), (768, 256), (1024, 256), (256, 1024), (4096, 256)),
)
_CUDA = (
    (512, 2048, 8192),
    ((1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (12288, 4096), (4096, 12288), (32768, 4096)),
)


def shapes(device: torch.device, quick: bool) -> list[tuple[int, int, int]]:
    """(rows, output, input) features of the linears that are measured."""
    rows, features = _CUDA if device.type == "cuda" else _CPU
    if quick:
        rows, features = rows[1:2], features[1:6:2]
    return [(m, n, k) for n, k in features for m in rows]


def precisions(device: torch.device) -> tuple[Precision, ...]:
    """Those that are measured; 16 bits on a CPU only by few shapes, for they are rarely trained in there."""
    return ("bf16", "fp32") if device.type == "cuda" else ("fp32", "bf16")


def products(
    watch: Stopwatch, device: torch.device, quick: bool
) -> Iterator[tuple[str, Callable[[dict[Precision, list[Row]]], None]]]:
    """What there is to measure, one shape after another: its name, and the call that adds its rows."""
    first = precisions(device)[0]
    for precision in precisions(device):
        for m, n, k in shapes(device, quick or precision != first):

            def measure(
                into: dict[Precision, list[Row]], m: int = m, n: int = n, k: int = k, p: Precision = precision
            ) -> None:
                into.setdefault(p, []).extend(_linear(watch, device, m, n, k, p))

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
    """Rows of equal sizes, which products of different layers may be, as one: their mean."""
    found = defaultdict[tuple[float, ...], list[float]](list)
    for *sizes, seconds in rows:
        found[tuple(sizes)].append(seconds)
    return [[*sizes, sum(all_) / len(all_)] for sizes, all_ in sorted(found.items())]
