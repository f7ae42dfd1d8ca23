"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads are
projections of one narrow vector per token, queries of another.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.engine.models.attention import merge_heads
from stretto.engine.models.causal import CausalAttention, dropout
from stretto.engine.models.rotary import Rotary
from stretto.errors import StrettoError
from stretto.job.attention import LatentShape
from stretto.job.shape import ModelShape

_EPS = 1e-6  # of the norms of narrow vectors, like in DeepSeek's code, whatever the epsilon of other norms


class LatentAttention(nn.Module):
    """Causal self-attention whose queries and keys have two parts: content, and a part that is rotated by the
    position; all heads share its key.

    For each head, the rows of `q` or `q_up` are [content; rotated] and those of `kv_up` [key; value], so that
    tensor parallelism can split them by heads. `heads` counts the local heads.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        latent = latent_of(shape)
        self.heads = self.kv_heads = shape.heads
        self.latent = latent
        self.content_dim = shape.head_dim - latent.rope_dim
        width, rank = shape.attention_width, latent.q_rank
        self.q = nn.Linear(shape.hidden, width, bias=False) if rank is None else None
        self.q_down = None if rank is None else nn.Linear(shape.hidden, rank, bias=shape.qkv_bias)
        self.q_down_norm = None if rank is None else nn.RMSNorm(rank, eps=_EPS)
        self.q_up = None if rank is None else nn.Linear(rank, width, bias=False)
        self.kv_down = nn.Linear(shape.hidden, latent.kv_rank + latent.rope_dim, bias=shape.qkv_bias)
        self.kv_down_norm = nn.RMSNorm(latent.kv_rank, eps=_EPS)
        self.kv_up = nn.Linear(
            latent.kv_rank, shape.heads * (self.content_dim + latent.value_dim), bias=False
        )
        self.shared_key = (
            nn.Identity()
        )  # tensor parallelism attaches its communication of the shared key here
        self.rotary = Rotary.of(shape)
        self.core = CausalAttention(
            shape.dropout,
            window=shape.attention.window,
            softcap=shape.attention.softcap,
            scale=shape.attention_scale,
        )
        self.proj = nn.Linear(shape.heads * latent.value_dim, shape.hidden, bias=shape.proj_bias)
        self.drop = dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, hidden] to [b, s, hidden]."""
        latent = self.latent
        narrow, shared = self.kv_down(x).split([latent.kv_rank, latent.rope_dim], dim=-1)
        keys, values = self._heads(self.kv_up(self.kv_down_norm(narrow))).split(
            [self.content_dim, latent.value_dim], dim=-1
        )
        if self.q is None:
            assert self.q_down is not None
            assert self.q_down_norm is not None
            assert self.q_up is not None
            both = self.q_up(self.q_down_norm(self.q_down(x)))
        else:
            both = self.q(x)
        queries, rotated = self._heads(both).split([self.content_dim, latent.rope_dim], dim=-1)
        shared = self._rotated(self.shared_key(shared).unsqueeze(2)).expand(-1, -1, self.heads, -1)
        q = torch.cat([queries, self._rotated(rotated)], dim=-1)
        k = torch.cat([keys, shared], dim=-1)
        y = self.core(*(part.transpose(1, 2) for part in (q, k, values)))
        return self.drop(self.proj(merge_heads(y)))

    def _heads(self, x: Tensor) -> Tensor:
        """View [b, s, heads d] as [b, s, heads, d]."""
        return x.unflatten(-1, (self.heads, -1))

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotate [b, s, heads, rope_dim] by the positions."""
        return self.rotary(x.transpose(1, 2)).transpose(1, 2)


def latent_of(shape: ModelShape) -> LatentShape:
    """Return the latent attention sizes of a shape.

    Raises:
        StrettoError: the shape has none.
    """
    if shape.latent is None:
        raise StrettoError("the model has no latent attention", hint="set model.attention.latent")
    return shape.latent
