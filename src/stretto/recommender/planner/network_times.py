"""Time of the dense layers of a recommender on one rank: bottom MLP, feature interaction and top MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from stretto.planner.machines.device import Device, Precision
from stretto.planner.time.operators import matmul_seconds, pass_seconds
from stretto.recommender.shape import DlrmShape

WIDTHS: dict[Precision, int] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class DenseNetwork:
    """Dense layers, replicated on every rank.

    Attributes:
        bottom: layer sizes of the bottom MLP, input first; empty if there is none.
        top: layer sizes of the top MLP, input first.
        wide: input width of the interaction: all vectors of a sample, concatenated.
        vectors: number of these vectors.
        interaction: `dot`, `dcn`, or `concat`, which only copies.
        cross_layers, cross_rank: number of cross layers of `dcn`, and the rank of their weights.
    """

    bottom: tuple[int, ...]
    top: tuple[int, ...]
    wide: int
    vectors: int
    interaction: Literal["dot", "dcn", "concat"] = "dot"
    cross_layers: int = 0
    cross_rank: int = 0

    @property
    def parameters(self) -> int:
        """Number of weights and biases, whose gradients are all-reduced."""
        layers = (*pairwise(self.bottom), *pairwise(self.top))
        cross = self.cross_layers * (2 * self.wide * self.cross_rank + self.wide)
        return sum(n * k + k for n, k in layers) + cross


@dataclass(frozen=True)
class NetworkTime:
    """Seconds per step.

    Attributes:
        bottom: bottom MLP forward, which overlaps the all-to-all of pooled embeddings.
        bottom_back: bottom MLP backward, which overlaps the all-to-all of gradients.
        joint: everything that needs pooled embeddings: interaction, top MLP and loss, forward and backward.
        update: optimiser step of the dense parameters.
    """

    bottom: float
    bottom_back: float
    joint: float
    update: float

    @property
    def seconds(self) -> float:
        return self.bottom + self.bottom_back + self.joint + self.update


def network_of(shape: DlrmShape) -> DenseNetwork:
    """The dense layers of a DLRM."""
    return DenseNetwork(
        bottom=(shape.dense, *shape.bottom),
        top=(shape.interacted, *shape.top),
        wide=shape.wide,
        vectors=shape.vectors,
        interaction=shape.interaction,
        cross_layers=shape.cross_layers,
        cross_rank=shape.cross_rank,
    )


@lru_cache(maxsize=1024)
def network_time(
    network: DenseNetwork,
    device: Device,
    precision: Precision,
    samples: int,
    passes: float = 1.0,
    slower: float = 1.0,
) -> NetworkTime:
    """Times for the samples of one rank in a step.

    Args:
        passes: factor on the bytes that operations between matmuls move.
        slower: factor on the time of matmuls.
    """
    if samples < 1:
        return NetworkTime(0.0, 0.0, 0.0, 0.0)
    compute = _RankCompute(device=device, precision=precision, samples=samples, passes=passes, slower=slower)
    bottom, bottom_back = _mlp(compute, network.bottom, input_gradient=False)
    forward, back = _interaction(compute, network)
    top, top_back = _mlp(compute, network.top, input_gradient=True)
    loss = 2 * pass_seconds(device, "loss", 12.0 * samples)
    update = pass_seconds(device, "adam", 12.0 * network.parameters)
    return NetworkTime(bottom, bottom_back, forward + back + top + top_back + loss, update)


@dataclass(frozen=True, kw_only=True)
class _RankCompute:
    device: Device
    precision: Precision
    samples: int
    passes: float
    slower: float

    def product(self, m: int, n: int, k: int) -> float:
        return self.slower * matmul_seconds(self.device, m, n, k, self.precision)

    def moved(self, numbers: float) -> float:
        """Seconds to read or write `numbers` elements per sample."""
        if not numbers:
            return 0.0
        size = numbers * self.samples * WIDTHS[self.precision] * self.passes
        return pass_seconds(self.device, "add", size)


def _mlp(compute: _RankCompute, sizes: Sequence[int], input_gradient: bool) -> tuple[float, float]:
    """Seconds of forward and backward. Bias and activation read and write each layer's output; backward
    reads the activation and its gradient, writes a gradient, and reads it again for the bias.
    """
    forward = back = 0.0
    for i, (n, k) in enumerate(pairwise(sizes)):
        forward += compute.product(compute.samples, k, n) + compute.moved(2 * k)
        back += compute.product(n, k, compute.samples) + compute.moved(4 * k)
        if i or input_gradient:
            back += compute.product(compute.samples, n, k)
    return forward, back


def _interaction(compute: _RankCompute, network: DenseNetwork) -> tuple[float, float]:
    """Seconds of forward and backward, memory-bound except for cross layers.

    `dot`: concatenate the vectors (one read, one write), multiply them pairwise, and concatenate the upper
    triangle with the bottom MLP's output; backward mirrors this with two batched matmuls.
    """
    wide, pairs = network.wide, network.vectors**2
    if network.interaction == "concat":
        return compute.moved(2 * wide), compute.moved(2 * wide)
    if network.interaction == "dot":
        forward = compute.moved(2 * wide) + compute.moved(wide + pairs) + compute.moved(2 * pairs)
        back = compute.moved(2 * pairs) + 2 * compute.moved(wide + pairs) + compute.moved(3 * wide)
        return forward, back
    rank, m = network.cross_rank, compute.samples
    forward = compute.product(m, rank, wide) + compute.product(m, wide, rank) + compute.moved(6 * wide)
    back = 2 * (compute.product(wide, rank, m) + compute.product(m, wide, rank)) + compute.moved(10 * wide)
    side = compute.moved(2 * wide)
    return network.cross_layers * forward + side, network.cross_layers * back + side
