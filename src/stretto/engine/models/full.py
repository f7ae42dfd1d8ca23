"""Attention with a bias of its scores, or to keys after the query's position: self-attention of an encoder,
and a decoder's attention to the encoder's output.
"""

from __future__ import annotations

from functools import lru_cache
from math import log

import torch
from torch import Tensor, nn

from stretto.engine.documents import Packing
from stretto.engine.models.causal import dropout, sdpa, weigh


class FullAttention(nn.Module):
    """softmax(scale q k^T + bias) v over all keys, or if `causal` over those up to the query's position.

    Padding of the encoder's tokens is hidden. torch's fused kernels are used unless dropout is active or the
    probabilities must be stored.

    Args:
        probability: probability of dropping an attention probability in training.
        explicit: store the probabilities, as the published memory formulas assume.
        causal: a query sees no key after it.
        scale: factor of the scores; by default 1 / sqrt(d).

    Attributes:
        packing: holds the numbers of real tokens of the encoder.
    """

    def __init__(
        self, probability: float, explicit: bool = False, *, causal: bool = False, scale: float | None = None
    ) -> None:
        super().__init__()
        self.drop = dropout(probability)
        self.explicit = explicit
        self.causal = causal
        self.scale = scale
        self.packing = Packing()

    def extra_repr(self) -> str:
        return f"causal={self.causal}" + ("" if self.scale is None else f", scale={self.scale:g}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        """q [b, heads, n, d], k [b, kv_heads, m, d] and v [b, kv_heads, m, d] to [b, heads, n, d]. If
        `causal`, the queries are those of the last n of the m positions.

        Args:
            bias: bias of the scores, [heads, n, m].
        """
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        dropping = self.training and not isinstance(self.drop, nn.Identity)
        written_out = self.explicit or dropping
        if self.causal and bias is None and q.shape[2] == k.shape[2] and not written_out:
            return sdpa(q, k, v, scale=scale, causal=True)
        hidden = self._hidden(q, k)
        if written_out:
            exact = torch.promote_types(q.dtype, torch.float32)
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            scores = (q @ keys.transpose(-2, -1)).to(exact) * scale
            if bias is not None:
                scores = scores + bias.to(exact)
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            return weigh(self.drop(scores.softmax(-1).to(q.dtype)), v)
        if bias is None:
            mask = None if hidden is None else ~hidden
        else:
            mask = bias.to(q.dtype).unsqueeze(0)
            mask = mask if hidden is None else mask.masked_fill(hidden, float("-inf"))
        return sdpa(q, k, v, scale=scale, mask=mask)

    def _hidden(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Bool, broadcastable to [b, heads, n, m], True for keys hidden from a query; None if none is."""
        n, m = q.shape[2], k.shape[2]
        if self.causal:
            return torch.ones(n, m, dtype=torch.bool, device=q.device).triu_(m - n + 1)
        lengths = self.packing.lengths
        if lengths is None:
            return None
        return torch.arange(m, device=q.device) >= lengths.to(q.device).view(-1, 1, 1, 1)


def distance_buckets(
    n: int, device: torch.device, *, causal: bool, buckets: int, max_distance: int
) -> Tensor:
    """Return the bucket of every pair of n positions, int64 [n, n]: queries by rows, keys by columns.

    Half of the buckets are for one distance each, the others for ranges that grow with the distance; all from
    `max_distance` on share the last (Raffel et al. 2020, section 2.1, and their code). If not `causal`, half
    of all buckets are for keys after the query.
    """
    positions = torch.arange(n, device=device)
    distance = positions - positions.unsqueeze(1)
    if causal:
        first, distance = torch.zeros_like(distance), distance.neg().clamp(min=0)
    else:
        buckets //= 2
        first, distance = (distance > 0).long() * buckets, distance.abs()
    exact = buckets // 2
    # in float32, as in published models: rounding decides to which of two buckets some distances belong
    growth = torch.log(distance.clamp(min=1).float() / exact) / log(max_distance / exact)
    ranges = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, ranges)


@lru_cache(maxsize=4)
def cached_buckets(n: int, device: torch.device, *, causal: bool, buckets: int, max_distance: int) -> Tensor:
    """As `distance_buckets`: all layers of a stack share one tensor, in whatever mode the first one runs."""
    with torch.inference_mode(False), torch.no_grad():
        return distance_buckets(n, device, causal=causal, buckets=buckets, max_distance=max_distance)
