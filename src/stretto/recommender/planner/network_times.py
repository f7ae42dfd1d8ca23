"""Time of the dense layers of a recommender on one rank: two MLPs and the interaction between them."""

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
class Network:
    """What of a recommender every rank has whole.

    Attributes:
        bottom: sizes of the bottom MLP's layers, its input first; empty: there is none.
        top: sizes of the top MLP's layers, its input first.
        wide: numbers of a sample that the interaction reads.
        vectors: of rank many vectors these are.
        interaction: `dot`, `dcn`, or `concat`, which is a copy.
        cross_layers, cross_rank: of `dcn`.
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
        """Weights and biases: what ranks reduce."""
        layers = (*pairwise(self.bottom), *pairwise(self.top))
        cross = self.cross_layers * (2 * self.wide * self.cross_rank + self.wide)
        return sum(n * k + k for n, k in layers) + cross


@dataclass(frozen=True)
class NetworkTime:
    """Seconds of a step.

    Attributes:
        bottom: of the bottom MLP's forward, which runs beside the exchange of sums.
        bottom_back: of its backward, beside the exchange of gradients.
        rest: of all that waits for the sums: interaction, top MLP and loss, forward and backward.
        update: of the dense parameters.
    """

    bottom: float
    bottom_back: float
    rest: float
    update: float

    @property
    def seconds(self) -> float:
        return self.bottom + self.bottom_back + self.rest + self.update


def network_of(shape: DlrmShape) -> Network:
    """The dense layers of a DLRM."""
    return Network(
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
    network: Network,
    device: Device,
    precision: Precision,
    samples: int,
    passes: float = 1.0,
    slower: float = 1.0,
) -> NetworkTime:
    """The times for a rank's samples of a step.

    Args:
        passes: bytes of what stands between products, over those counted here.
        slower: seconds of a product, over those of a large one's rate.
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
        """Seconds of passes over so many numbers of every sample, read or written."""
        if not numbers:
            return 0.0
        size = numbers * self.samples * WIDTHS[self.precision] * self.passes
        return pass_seconds(self.device, "add", size)


def _mlp(compute: _RankCompute, sizes: Sequence[int], input_gradient: bool) -> tuple[float, float]:
    """Forward and backward. An activation with its bias is read and written; backward reads it and its
    gradient, writes a gradient, and reads that for the bias.
    """
    forward = back = 0.0
    for i, (n, k) in enumerate(pairwise(sizes)):
        forward += compute.product(compute.samples, k, n) + compute.moved(2 * k)
        back += compute.product(n, k, compute.samples) + compute.moved(4 * k)
        if i or input_gradient:
            back += compute.product(compute.samples, n, k)
    return forward, back


def _interaction(compute: _RankCompute, network: Network) -> tuple[float, float]:
    """Forward and backward, bound by memory but for cross layers.

    `dot`: vectors are put side by side (read, written), multiplied pairwise, the pairs above the diagonal
    taken and put beside the bottom MLP's vector; backward the same way back, with two products.
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
