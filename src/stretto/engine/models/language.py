"""Language models in one process, the specification that every layout must equal: a chain of embedding,
blocks and head, and a loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.documents import Packing
from stretto.engine.models.attention import SelfAttention
from stretto.engine.models.causal import dropout
from stretto.engine.models.latent import LatentAttention
from stretto.engine.models.moe import MoE, feed_forward
from stretto.engine.models.norms import norm
from stretto.errors import StrettoError
from stretto.spec.shape import ModelShape

IGNORED = -100  # target of a token that the loss ignores


def added(x: Tensor, y: Tensor) -> Tensor:
    """x + y in the dtype of x, the residual stream. y is wider where its layers have float32 weights."""
    return x + (y.to(x.dtype) if y.element_size() > x.element_size() else y)


class Embedding(nn.Module):
    """Token embedding, which may be scaled, plus a learned embedding of the position where attention encodes
    none.

    Attributes:
        positions: of the tokens in the output of `tok`, int64; None: 0, 1, 2, ...
        packing: where samples hold several documents, positions begin anew in each.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.scale = shape.embedding_scale
        self.tok = nn.Embedding(shape.vocab, shape.hidden)
        self.pos = None if shape.rotary else nn.Embedding(shape.sequence, shape.hidden)
        self.drop = dropout(shape.dropout)
        self.positions: Tensor | None = None
        self.packing = Packing()

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s] to [b, s, hidden]."""
        x = self.tok(ids)
        if self.scale != 1.0:  # rounded to the weights' type, as published models were trained
            x = x * torch.full((), self.scale, dtype=x.dtype, device=x.device)
        return x if self.pos is None else self.drop(x + self._position(self.pos, ids))

    def _position(self, pos: nn.Embedding, ids: Tensor) -> Tensor:
        """The embedding of positions, [s, hidden], or [b, s, hidden]."""
        positions, last = self.positions, pos.num_embeddings - 1
        if (documents := self.packing.documents) is not None:
            return pos(documents.positions(positions, ids.device))
        if positions is not None:  # positions after the last are padding
            return pos(positions.clamp(max=last))
        length = ids.shape[1]
        if length > last + 1:
            raise StrettoError(
                f"{length} tokens in a row, but the model has {last + 1} positions",
                hint="cut the input, or build the model with a larger sequence",
            )
        return pos(torch.arange(length, device=ids.device))


class Block(nn.Module):
    """Attention, then an MLP or experts, each applied to the normalised residual stream and added to it; with
    "sandwich" norms each is normalised once more before it is added.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        after = shape.block_norms == "sandwich"
        self.norm1 = norm(shape, shape.hidden)
        self.attn = SelfAttention(shape) if shape.latent is None else LatentAttention(shape)
        self.norm1_post = norm(shape, shape.hidden) if after else None
        self.norm2 = norm(shape, shape.hidden)
        self.mlp = feed_forward(shape)
        self.norm2_post = norm(shape, shape.hidden) if after else None

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        y = self.attn(self.norm1(x))
        x = added(x, y if self.norm1_post is None else self.norm1_post(y))
        y = self.mlp(self.norm2(x))
        return added(x, y if self.norm2_post is None else self.norm2_post(y))


class CrossEntropy(nn.Module):
    """Cross-entropy summed over tokens, so that microbatches add up; the caller divides by their number."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of `logits` [b, s, vocab] against `targets` [b, s], int64, -100 where ignored: a scalar,
        summed in float32, or in float64 for float64 logits.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )


class Head(nn.Module):
    """The last norm and the projection to logits, which may be bounded."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.softcap = shape.logit_softcap
        self.norm = norm(shape, shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to logits [b, s, vocab]."""
        logits = self.out(self.norm(x))
        return logits if not self.softcap else torch.tanh(logits / self.softcap) * self.softcap


class LanguageModel(nn.Module):
    """A decoder as a chain of layers, each from one tensor to one tensor: embed, blocks.0, ..., head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape.block(i)) for i in range(shape.layers))
        self.head = Head(shape)
        self.loss = CrossEntropy()
        self.tie()

    def tie(self) -> None:
        """Let head and embedding share one parameter if the shape is tied. Call it again after `to_empty`,
        which separates them.
        """
        if self.shape.tied:
            self.head.out.weight = self.get_parameter("embed.tok.weight")

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Name and module of every layer, in the order of the forward."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        return [("embed", self.embed), *blocks, ("head", self.head)]

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        """Token ids [b, s], int64, to logits [b, s, vocab]; with `last` those of the last token alone,
        [b, 1, vocab].
        """
        x = ids
        for _, layer in self.layers()[:-1]:
            x = layer(x)
        return self.head(x[:, -1:] if last else x)

    def auxiliary(self) -> Tensor:
        """The auxiliary loss of the last forward: that of all routers, summed over tokens, a scalar. 0 in
        evaluation, and for a model without experts.
        """
        parts = [module.auxiliary for module in self.modules() if isinstance(module, MoE)]
        return torch.stack(parts).sum() if parts else self.head.out.weight.new_zeros(())
