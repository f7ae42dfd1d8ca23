"""Llama (Touvron et al. 2023) in one process: the specification that every layout must equal."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.attention import Rotary, SelfAttention
from stretto.engine.models.language import Head, LanguageModel, PreNormBlock
from stretto.engine.models.moe import feed_forward
from stretto.spec.shape import ModelShape


class Embedding(nn.Module):
    """Token embedding; the attention encodes positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tok = nn.Embedding(shape.vocab, shape.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s] to [b, s, hidden]."""
        return self.tok(ids)


class Attention(SelfAttention):
    """Self-attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.rotary = Rotary(shape.head_dim, shape.rope_theta)

    def with_positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [b, heads, s, d] and keys [b, kv_heads, s, d], rotated by their positions."""
        return self.rotary(q), self.rotary(k)


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


class Block(PreNormBlock):
    """Llama's block; experts may take the place of the MLP."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(_norm(shape), Attention(shape), _norm(shape), feed_forward(shape, MLP))


class Llama(LanguageModel):
    """The whole model: token ids [b, s] to logits [b, s, vocab]."""

    def __init__(self, shape: ModelShape) -> None:
        blocks: list[nn.Module] = [Block(shape) for _ in range(shape.layers)]
        super().__init__(shape, Embedding(shape), blocks, Head(shape, _norm(shape)))


def _norm(shape: ModelShape) -> nn.RMSNorm:
    return nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
