"""Cut a list of layers into contiguous stages so that the costliest stage costs least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import fsum, inf, isfinite

from stretto.errors import StrettoError


def cut(costs: Sequence[float], stages: int) -> list[range]:
    """Return the layers of each stage, at least one each, such that the largest stage cost is minimal.

    Among cuts with that largest cost the most even one (least sum of squares) is taken; if still tied,
    later stages get the extra layers, since earlier ones keep more microbatches alive under 1F1B.

    Raises:
        StrettoError: fewer layers than stages, or a cost that is negative or not finite.
    """
    layers = len(costs)
    if stages < 1:
        raise StrettoError(f"stages={stages} is not allowed", hint="stages is at least 1")
    if layers < stages:
        raise StrettoError(f"{layers} layers over {stages} stages", hint=f"use at most {layers} stages")
    for layer, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise StrettoError(f"cost {cost} of layer {layer}", hint="costs are finite and not negative")
    sums = [0, *accumulate(costs)]
    return _most_even(sums, stages, _least_bottleneck(sums, stages))


def _least_bottleneck(sums: Sequence[float], stages: int) -> float:
    """Return the smallest possible cost of the largest stage.

    best[i] is that cost for the first i layers. With a last stage that begins at j it is max(best[j], sums[i]
    - sums[j]). The first term rises with j and the second falls, so their crossing only moves right as i
    grows, and the search takes O(layers x stages).
    """
    layers = len(sums) - 1
    best = list(sums)
    for stage in range(2, stages + 1):
        extended, j = [inf] * (layers + 1), stage - 1
        for i in range(stage, layers + 1):
            while j + 1 < i and best[j] < sums[i] - sums[j]:
                j += 1
            current = max(best[j], sums[i] - sums[j])
            before = max(best[j - 1], sums[i] - sums[j - 1]) if j >= stage else inf
            extended[i] = min(current, before)
        best = extended
    return best[layers]


def _most_even(sums: Sequence[float], stages: int, bottleneck: float) -> list[range]:
    """Return the cut with the least sum of squares among those with stages of at most `bottleneck`.

    starts[s - 1][i] is the first layer of the last of s stages over the first i layers.
    """
    layers = len(sums) - 1
    best: list[float] = [0.0] + [inf] * layers
    starts: list[list[int]] = []
    for stage in range(1, stages + 1):
        extended, start = [inf] * (layers + 1), [0] * (layers + 1)
        for i in range(stage, layers - (stages - stage) + 1):
            for j in range(i - 1, stage - 2, -1):
                cost = sums[i] - sums[j]
                if cost > bottleneck:
                    break
                # ties go to the smaller j: the longer last stage
                if (square := best[j] + cost * cost) <= extended[i]:
                    extended[i], start[i] = square, j
        best = extended
        starts.append(start)
    cut, end = list[range](), layers
    for start in reversed(starts):
        cut.append(range(start[end], end))
        end = start[end]
    return cut[::-1]


def describe_cut(costs: Sequence[float], stages: Sequence[range]) -> str:
    """Return as text the ratio of the largest stage to the mean, and each stage's layers and share of the
    cost.
    """
    totals = [fsum(costs[layer] for layer in stage) for stage in stages]
    total_cost = fsum(totals) or 1.0
    largest = max(totals) * len(stages) / total_cost
    lines = [f"{len(costs)} layers over {len(stages)} stages, largest {largest:.3f} x mean"]
    for number, (stage, total) in enumerate(zip(stages, totals, strict=True)):
        span = f"layers {stage.start}-{stage.stop - 1}" if len(stage) > 1 else f"layer {stage.start}"
        lines.append(f"  stage {number}: {span}, {100 * total / total_cost:.1f}%")
    return "\n".join(lines)
