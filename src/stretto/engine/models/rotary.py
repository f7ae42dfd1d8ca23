"""Rotary positions (Su et al. 2021, RoFormer, section 3.2), and their scaling to contexts longer than in the
original training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, log, tau

import torch
from torch import Tensor, nn

from stretto.engine.device import is_capturing
from stretto.engine.documents import DocumentStarts, Packing
from stretto.job.attention import RopeScaling
from stretto.job.shape import ModelShape


@dataclass(frozen=True)
class Angles:
    """Parameters of the angles of rotary positions.

    length: tokens of a sample, which determine the frequencies of `dynamic` scaling.
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    length: int = 0

    def frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the radians per position of every pair of features, [dim / 2]; theta^(-2i / dim)
        unscaled.
        """
        dim, theta = self.dim, self.theta
        scaling = self.scaling
        even = torch.arange(0, dim, 2, device=device, dtype=dtype)
        original = 0 if scaling is None else scaling.original_positions or 0
        if scaling is not None and scaling.type == "dynamic":
            stretch = scaling.factor * max(self.length, original) / original - (scaling.factor - 1)
            return 1.0 / (theta * stretch ** (dim / (dim - 2))) ** (even / dim)
        plain = 1.0 / theta ** (even / dim)
        if scaling is None:
            return plain
        if scaling.type == "linear":
            return plain / scaling.factor
        if scaling.type == "llama3":
            turns = original * plain / tau  # within the original positions
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            unscaled = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        else:
            unscaled = 1.0 - _yarn_ramp(dim, theta, scaling, even)
        return plain * unscaled + plain / scaling.factor * (1.0 - unscaled)


class Rotary(nn.Module):
    """Rotates pairs of features by angles that grow with the position: (i, i + d/2), the half-split order of
    published weights, or neighbours (2i, 2i + 1) if `interleaved`.

    It has no buffers: tables are computed at first use, so a model needs no initialisation of them when it
    leaves the meta device.

    Attributes:
        positions: positions of the s rows, int64; None for 0 to s - 1.
        length: tokens of the complete samples that `positions` are part of; for `dynamic` scaling.
        packing: documents of the samples; positions restart at 0 in each document.
    """

    def __init__(
        self, dim: int, theta: float, scaling: RopeScaling | None = None, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.dim = dim
        self.theta = theta
        self.scaling = scaling
        self.interleaved = interleaved
        self.positions: Tensor | None = None
        self.length: int | None = None
        self.packing = Packing()
        self._rows: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # of the tables, at `positions`
        self._captured: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, shape: ModelShape) -> Rotary:
        """Return the rotary positions of a block."""
        return cls(shape.rope_dim, shape.rope_theta, shape.rope, shape.attention.interleaved)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate x [b, heads, s, dim] by its positions."""
        return rotate(x, *self.tables(x), self.interleaved)

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for the positions of x [..., s, n], each [s, dim / 2], or [b, 1, s, dim / 2] if
        samples hold several documents.
        """
        at, documents = self.positions, self.packing.documents
        if documents is not None:
            return self._tables_of(x, documents)
        return self._tables(x) if at is None else self._tables_at(x, at)

    def _tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables for x; cached between calls unless x is a traced or fake tensor."""
        length = x.shape[-2]
        full_length = self._frequency_length(length)
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            return rotary_tables(length, self._angles(full_length), x.device, x.dtype)
        rows = 1 << (length - 1).bit_length()  # so that generation needs no new table each token
        cos, sin = _cached_tables(rows, self._angles(full_length), x.device, x.dtype)
        if is_capturing():
            self._captured = cos, sin  # the graph reads them even after the cache has dropped them
        return cos[:length], sin[:length]

    def _tables_at(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tables' rows at these positions."""
        cached = self._rows
        if cached is None or cached[0] is not positions or cached[1][0].dtype != x.dtype:
            length = int(positions.max()) + 1
            full_length = self._frequency_length(self.length or length)
            rows = 1 << (length - 1).bit_length()  # so that generation needs no new table each token
            cos, sin = _cached_tables(rows, self._angles(full_length), x.device, x.dtype)
            self._rows = cached = positions, (cos[positions], sin[positions])
        return cached[1]

    def _tables_of(self, x: Tensor, documents: DocumentStarts) -> tuple[Tensor, Tensor]:
        """Return the tables' rows at the positions within documents, [b, 1, s, dim / 2]."""
        at, angles = self.positions, self._angles(self._frequency_length(documents.length))

        def make() -> tuple[Tensor, Tensor]:
            cos, sin = _cached_tables(1 << (documents.length - 1).bit_length(), angles, x.device, x.dtype)
            rows = documents.positions(at, x.device).unsqueeze(1)
            return cos[rows], sin[rows]

        return documents.cached((angles, id(at), x.device, x.dtype), make)

    def _angles(self, length: int) -> Angles:
        return Angles(self.dim, self.theta, self.scaling, length)

    def _frequency_length(self, length: int) -> int:
        """Return the length that the frequencies depend on; 0 if they depend on none."""
        return length if self.scaling is not None and self.scaling.type == "dynamic" else 0

    def extra_repr(self) -> str:
        scaled = "" if self.scaling is None else f", {self.scaling.type} x {self.scaling.factor:g}"
        return f"{self.dim}, theta={self.theta:g}{scaled}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of features of x [..., dim] by angles with cos and sin [..., dim / 2]."""
    if not interleaved:
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)


def rotary_tables(
    rows: int, angles: Angles, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * frequency for positions 0 to rows - 1, each [rows, dim / 2], rounded
    to `dtype` only at the end.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.inference_mode(False), torch.no_grad():
        positions = torch.arange(rows, device=device, dtype=exact)
        turned = torch.outer(positions, angles.frequencies(device, exact))
        magnitude = 1.0 if angles.scaling is None else angles.scaling.magnitude
        return (turned.cos() * magnitude).to(dtype), (turned.sin() * magnitude).to(dtype)


_cached_tables = lru_cache(maxsize=8)(rotary_tables)  # all layers of a model share one entry or two


def _yarn_ramp(dim: int, theta: float, scaling: RopeScaling, even: Tensor) -> Tensor:
    """Return the ramp from 0 for unscaled frequencies to 1 for those divided by the factor, [dim / 2]
    (Peng et al. 2023, YaRN).
    """

    def feature(turns: float) -> float:
        """Return the index of the pair with this number of turns within the original positions."""
        return dim * log((scaling.original_positions or 1) / (turns * tau)) / (2 * log(theta))

    low, high = feature(scaling.beta_fast), feature(scaling.beta_slow)
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return ((even / 2 - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
