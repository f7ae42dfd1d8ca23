"""Llama (Touvron et al. 2023) in one process: the specification that every layout must equal."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.attention import CausalAttention, merge_heads, split_heads
from stretto.engine.models.language import Head, LanguageModel, added
from stretto.engine.models.moe import feed_forward
from stretto.engine.models.rotary import Rotary
from stretto.spec.shape import ModelShape


class Embedding(nn.Module):
    """Token embedding; positions come in with the attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tok = nn.Embedding(shape.vocab, shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s] to [b, s, hidden]."""
        return self.tok(ids)


class Attention(nn.Module):
    """Grouped-query causal self-attention; `heads` and `kv_heads` are those that the linears here hold."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(shape.hidden, shape.attention_width + 2 * shape.kv_width, bias=shape.bias)
        self.rotary = Rotary(shape.head_dim, shape.rope_theta)
        self.core = CausalAttention(shape.dropout)
        self.proj = nn.Linear(shape.attention_width, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        q, k, v = split_heads(self.qkv(x), self.heads, self.kv_heads, self.head_dim)
        return self.proj(merge_heads(self.core(self.rotary(q), self.rotary(k), v)))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): silu(gate) * up, then down."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention, then the MLP or experts in its place, each normalised before and added to what came in."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1 = _norm(shape)
        self.attn = Attention(shape)
        self.norm2 = _norm(shape)
        self.mlp = feed_forward(shape, MLP)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        x = added(x, self.attn(self.norm1(x)))
        return added(x, self.mlp(self.norm2(x)))


class Llama(LanguageModel):
    """The whole model: token ids [b, s] to logits [b, s, vocab]."""

    def __init__(self, shape: ModelShape) -> None:
        blocks: list[nn.Module] = [Block(shape) for _ in range(shape.layers)]
        super().__init__(shape, Embedding(shape), blocks, Head(shape, _norm(shape)))


def _norm(shape: ModelShape) -> nn.RMSNorm:
    return nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
