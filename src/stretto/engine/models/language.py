"""The parts that all language models share: a chain of embedding, blocks and head, and a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.moe import MoE
from stretto.spec.shape import ModelShape

IGNORED = -100  # target of a token that the loss ignores


def added(x: Tensor, y: Tensor) -> Tensor:
    """x + y in the dtype of x, the residual stream. y is wider where its layers have float32 weights."""
    return x + (y.to(x.dtype) if y.element_size() > x.element_size() else y)


class PreNormBlock(nn.Module):
    """Attention and MLP, each applied to the normalised residual stream and added to it."""

    def __init__(self, norm1: nn.Module, attn: nn.Module, norm2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm1
        self.attn = attn
        self.norm2 = norm2
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to [b, s, hidden]."""
        x = added(x, self.attn(self.norm1(x)))
        return added(x, self.mlp(self.norm2(x)))


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
    """The last norm and the projection to logits."""

    def __init__(self, shape: ModelShape, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.out = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, hidden] to logits [b, s, vocab]."""
        return self.out(self.norm(x))


class LanguageModel(nn.Module):
    """A decoder as a chain of layers, each from one tensor to one tensor: embed, blocks.0, ..., head."""

    def __init__(self, shape: ModelShape, embed: nn.Module, blocks: list[nn.Module], head: Head) -> None:
        super().__init__()
        self.shape = shape
        self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.head = head
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

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [b, s], int64, to logits [b, s, vocab]."""
        x = ids
        for _, layer in self.layers():
            x = layer(x)
        return x

    def auxiliary(self) -> Tensor:
        """The auxiliary loss of the last forward: that of all routers, summed over tokens, a scalar. 0 in
        evaluation, and for a model without experts.
        """
        parts = [module.auxiliary for module in self.modules() if isinstance(module, MoE)]
        return torch.stack(parts).sum() if parts else self.head.out.weight.new_zeros(())
