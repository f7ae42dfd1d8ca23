"""GPT-2 (Radford et al. 2019) in one process: the specification that every layout must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.attention import SelfAttention
from stretto.engine.models.causal import dropout
from stretto.engine.models.language import Head, LanguageModel, PreNormBlock
from stretto.engine.models.moe import feed_forward
from stretto.errors import StrettoError
from stretto.spec.shape import ModelShape


class Embedding(nn.Module):
    """Token embedding plus a learned embedding of the position."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tok = nn.Embedding(shape.vocab, shape.hidden)
        self.pos = nn.Embedding(shape.sequence, shape.hidden)
        self.drop = dropout(shape.dropout)
        self.positions: Tensor | None = None  # of the tokens in the output of `tok`; None: 0, 1, 2, ...

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s] to [b, s, hidden]."""
        positions, last = self.positions, self.pos.num_embeddings - 1
        if positions is not None:  # positions after the last are padding
            return self.drop(self.tok(ids) + self.pos(positions.clamp(max=last)))
        length = ids.shape[1]
        if length > last + 1:
            raise StrettoError(
                f"{length} tokens in a row, but the model has {last + 1} positions",
                hint="cut the input, or build the model with a larger sequence",
            )
        return self.drop(self.tok(ids) + self.pos(torch.arange(length, device=ids.device)))


class Attention(SelfAttention):
    """Self-attention with dropout of its output."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.drop = dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        return self.drop(super().forward(x))


class MLP(nn.Module):
    """Two linears with GELU in between, in its tanh form as in GPT-2."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)
        self.drop = dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        return self.drop(self.down(F.gelu(self.up(x), approximate="tanh")))


class Block(PreNormBlock):
    """GPT-2's block; experts may take the place of the MLP."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(_norm(shape), Attention(shape), _norm(shape), feed_forward(shape, MLP))


class GPT(LanguageModel):
    """The whole model: token ids [b, s] to logits [b, s, vocab]."""

    def __init__(self, shape: ModelShape) -> None:
        blocks: list[nn.Module] = [Block(shape) for _ in range(shape.layers)]
        super().__init__(shape, Embedding(shape), blocks, Head(shape, _norm(shape)))


def _norm(shape: ModelShape) -> nn.LayerNorm:
    return nn.LayerNorm(shape.hidden, eps=shape.norm_eps, bias=shape.bias)
