"""Causal attention from queries, keys and values; what comes before and after belongs to the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dropout(probability: float) -> nn.Module:
    """Dropout where there is any, else nothing."""
    return nn.Dropout(probability) if probability > 0.0 else nn.Identity()


def split_heads(qkv: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut features [b, s, (heads + 2 kv_heads) head_dim], ordered [q; k; v], into heads.

    Returns q [b, heads, s, head_dim], and k and v [b, kv_heads, s, head_dim].
    """
    widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in qkv.split(widths, dim=-1))
    return q, k, v


def merge_heads(x: Tensor) -> Tensor:
    """[b, heads, s, head_dim] to [b, s, heads head_dim]."""
    return x.transpose(1, 2).flatten(2)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, where a position sees itself and what came before it."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.drop = dropout(probability)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, heads, s, d], k and v [b, kv_heads, s, d] to [b, heads, s, d].

        Query head i uses key head i // (heads / kv_heads) (Ainslie et al. 2023, section 2.2).
        """
        grouped = k.shape[1] < q.shape[1]
        if isinstance(self.drop, nn.Identity) or not self.training:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if grouped:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        return self.drop(causal_probabilities(q, k)) @ v


def causal_probabilities(q: Tensor, k: Tensor) -> Tensor:
    """Attention probabilities [b, heads, s, s] of q and k [b, heads, s, d], written out.

    The fused kernels draw their dropout inside, where no other layout could repeat it; so with dropout the
    probabilities are formed and handed to a module.
    """
    length = q.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return scores.masked_fill(later, float("-inf")).softmax(-1, dtype=exact).to(q.dtype)
