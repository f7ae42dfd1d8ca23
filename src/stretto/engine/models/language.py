"""Language models in one process, the reference for every layout: a chain of embedding, blocks and head, with
or without an encoder before the decoder, and a loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.documents import Packing, share_packing
from stretto.engine.models.attention import CrossAttention, SelfAttention
from stretto.engine.models.causal import dropout
from stretto.engine.models.latent import LatentAttention
from stretto.engine.models.moe import MoE, feed_forward
from stretto.engine.models.norms import norm
from stretto.errors import StrettoError
from stretto.job.shape import ModelShape

IGNORED = -100  # target of a token that the loss ignores


def added(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in the dtype of x, the residual stream; y is wider if its layer has float32 weights."""
    return x + (y.to(x.dtype) if y.element_size() > x.element_size() else y)


class Embedding(nn.Module):
    """Token embedding, optionally scaled, plus a learned position embedding if attention encodes no
    positions; the sum is optionally normalised.

    Attributes:
        positions: positions of the tokens in the output of `tok`, int64; None for 0, 1, 2, ...
        packing: documents of the samples; positions restart at 0 in each document.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.scale = shape.embedding_scale
        self.tok = nn.Embedding(shape.vocab, shape.hidden)
        self.pos = nn.Embedding(shape.sequence, shape.hidden) if shape.learned else None
        self.norm = norm(shape, shape.hidden) if shape.embedding_norm else None
        self.drop = dropout(shape.dropout)
        self.positions: Tensor | None = None
        self.packing = Packing()

    def forward(self, ids: Tensor) -> Tensor:
        """Embed token ids [b, s], int64; return [b, s, hidden]."""
        x = self.tok(ids)
        if self.scale != 1.0:  # rounded to the weights' dtype, like in the training of published models
            x = x * torch.full((), self.scale, dtype=x.dtype, device=x.device)
        x = x if self.pos is None else x + self._position(self.pos, ids)
        return self.drop(x if self.norm is None else self.norm(x))

    def _position(self, pos: nn.Embedding, ids: Tensor) -> Tensor:
        """Return the embedding of the positions, [s, hidden] or [b, s, hidden]."""
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


class DecoderEmbedding(Embedding):
    """The layer between encoder and decoder: the encoder's last norm, and the decoder's token embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.memory_norm = norm(shape, shape.hidden) if shape.last_norm else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the decoder's embedded tokens [b, s, hidden], and the memory [b, m, hidden] that it attends
        to, from the output of the encoder's last block [b, m, hidden].
        """
        ids = self.packing.decoder
        if ids is None:
            raise StrettoError(
                "the decoder has no tokens",
                hint="call model(ids, decoder=...) with the tokens of both stacks",
            )
        return super().forward(ids), x if self.memory_norm is None else self.memory_norm(x)


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention in the decoder of an encoder-decoder, then an MLP or experts.

    Each is applied to the normalised residual stream and added to it. With "sandwich" norms its output is
    also normalised before it is added; with "post" norms only the sum is normalised.

    Args:
        last: the last block of its stack, after which no layer needs the memory.
    """

    def __init__(self, shape: ModelShape, last: bool = False) -> None:
        super().__init__()
        self.post = shape.block_norms == "post"
        self.last = last
        after = shape.block_norms == "sandwich"
        self.norm1 = norm(shape, shape.hidden)
        self.attn = SelfAttention(shape) if shape.latent is None else LatentAttention(shape)
        self.norm1_post = norm(shape, shape.hidden) if after else None
        self.norm_cross = norm(shape, shape.hidden) if shape.encoder_layers else None
        self.cross = CrossAttention(shape) if shape.encoder_layers else None
        self.norm2 = norm(shape, shape.hidden)
        self.mlp = feed_forward(shape)
        self.norm2_post = norm(shape, shape.hidden) if after else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Map [b, s, hidden] to [b, s, hidden]; a memory [b, m, hidden] is also returned unless `last`."""
        if memory is None:
            if self.post:
                x = self.add_and_norm(x, self.attn(x), None, self.norm1)[1]
                return self.add_and_norm(x, self.mlp(x), None, self.norm2)[1]
            x, y = self.add_and_norm(x, self.attn(self.normed(x)), self.norm1_post, self.norm2)
            return self.add(x, self.mlp(y), self.norm2_post)
        assert self.cross is not None, "an encoder's block got a memory"
        assert self.norm_cross is not None
        if self.post:
            x = self.add_and_norm(x, self.attn(x), None, self.norm1)[1]
            x = self.add_and_norm(x, self.cross(x, memory), None, self.norm_cross)[1]
            x = self.add_and_norm(x, self.mlp(x), None, self.norm2)[1]
        else:
            x, y = self.add_and_norm(x, self.attn(self.normed(x)), self.norm1_post, self.norm_cross)
            x, y = self.add_and_norm(x, self.cross(y, memory), None, self.norm2)
            x = self.add(x, self.mlp(y), self.norm2_post)
        return x if self.last else (x, memory)

    def normed(self, x: Tensor) -> Tensor:
        """Normalise the residual stream for attention; not used with "post" norms."""
        return self.norm1(x)

    def add_and_norm(
        self, x: Tensor, y: Tensor, after: nn.Module | None, norm: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Add y, normalised by `after` if given, to the residual stream x; return the sum, and the sum
        normalised by `norm`.
        """
        x = added(x, y if after is None else after(y))
        return x, norm(x)

    def add(self, x: Tensor, y: Tensor, after: nn.Module | None) -> Tensor:
        """Add y, normalised by `after` if given, to the residual stream x."""
        return added(x, y if after is None else after(y))


class CrossEntropy(nn.Module):
    """Cross-entropy summed over tokens, so that microbatches add up; the caller divides by the token
    count.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the scalar loss of `logits` [b, s, vocab] for `targets` [b, s], int64, -100 if ignored.

        It is summed in float32, or in float64 for float64 logits.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(
            scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )


class Head(nn.Module):
    """The last norm, unless each block ends with one, and the projection to logits, optionally soft-capped.

    Attributes:
        loss: computes the loss from the projection's input; the head then returns it instead of logits.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.softcap = shape.logit_softcap
        self.scale = shape.logit_scale
        self.norm = norm(shape, shape.hidden) if shape.last_norm else nn.Identity()
        self.out = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.loss: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, hidden] to logits [b, s, vocab], or to a scalar if `loss` is set."""
        x = self.norm(x)
        x = x if self.scale == 1.0 else x * self.scale
        if self.loss is not None:
            return self.loss(x)
        logits = self.out(x)
        return logits if not self.softcap else torch.tanh(logits / self.softcap) * self.softcap


class LanguageModel(nn.Module):
    """A chain of layers.

    A decoder-only model is embed, blocks.0, ..., head, each from one tensor to one tensor. With an encoder
    the chain is embed, encoder.0, ..., decoder_embed, blocks.0, ..., head; the decoder's blocks also take the
    memory, and all but the last return it.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embedding(shape)
        self.encoder = nn.ModuleList()
        self.packing = Packing()
        if shape.encoder_layers:
            stack = shape.encoder_stack
            self.encoder.extend(TransformerBlock(stack.block(i)) for i in range(stack.layers))
            self.decoder_embed = DecoderEmbedding(shape)
        self.blocks = nn.ModuleList(
            TransformerBlock(shape.block(i), last=i + 1 == shape.layers) for i in range(shape.layers)
        )
        self.head = Head(shape)
        self.loss: nn.Module = CrossEntropy()
        self.tie()
        share_packing(self, self.packing)

    def tie(self) -> None:
        """Share tied parameters: head and embedding if the shape is tied, the token embeddings of both
        stacks, and the relative position biases of a stack. Call it again after `to_empty`, which separates
        them.
        """
        tokens = self.get_parameter("embed.tok.weight")
        if self.shape.tied:
            self.head.out.weight = tokens
        if self.shape.encoder_layers:
            self.decoder_embed.tok.weight = tokens
        if self.shape.relative:
            for stack in (self.encoder, self.blocks):
                for block in stack:
                    block.get_submodule("attn").relative = stack[0].get_parameter("attn.relative")

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Return name and module of every layer, in forward order."""
        blocks = [(f"blocks.{i}", block) for i, block in enumerate(self.blocks)]
        if self.shape.encoder_layers:
            encoder = [(f"encoder.{i}", block) for i, block in enumerate(self.encoder)]
            blocks = [*encoder, ("decoder_embed", self.decoder_embed), *blocks]
        return [("embed", self.embed), *blocks, ("head", self.head)]

    def forward(
        self, ids: Tensor, last: bool = False, *, decoder: Tensor | None = None, lengths: Tensor | None = None
    ) -> Tensor:
        """Return the logits [b, s, vocab] of token ids [b, s], int64; with `last` of the last token only,
        [b, 1, vocab].

        Args:
            decoder: for a model with an encoder, whose input is `ids`: the decoder's tokens, int64 [b, n], to
                which the logits belong; by default those of `packing`.
            lengths: number of real tokens of each encoder sample, int64 [b]; the rest is padding, which is
                masked.
        """
        if decoder is not None:
            self.packing.decoder, self.packing.lengths = decoder, lengths
        x: tuple[Tensor, ...] = (ids,)
        for _, layer in self.layers()[:-1]:
            y = layer(*x)
            x = y if isinstance(y, tuple) else (y,)
        return self.head(x[0][:, -1:] if last else x[0])

    def auxiliary(self) -> Tensor:
        """Return the auxiliary loss of the last forward: a scalar, summed over routers and tokens. It is 0 in
        evaluation, and for a model without experts.
        """
        parts = [module.auxiliary for module in self.modules() if isinstance(module, MoE)]
        return torch.stack(parts).sum() if parts else self.head.out.weight.new_zeros(())
