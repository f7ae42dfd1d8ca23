"""The output layer and the cross-entropy together, in chunks of tokens, so that the logits of all tokens
never exist at once.

A pass over a chunk multiplies, computes the loss, turns the logits into their gradient in place, and adds to
the gradients of input and weight, like the fused kernels of Liger (Hsu et al. 2024, "Liger Kernel", section
3.2) and those of Wijmans et al. 2025, "Cut your losses in large-vocabulary language models", which do not
store logits either but compute them twice. This module computes them once: in the backward, where the
gradient of the loss, and with it the loss scale, is known and weight gradients may be accumulated; the loss,
which is not read earlier, is filled in then. Without gradients the forward computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.engine.parallel.collectives import Pending, cut, start_gather, start_scatter_sum, start_sum
from stretto.engine.parallel.precision import HALVES
from stretto.engine.parallel.tensor.linear import GatherLinear, ParallelLinear, operands
from stretto.engine.parallel.tensor.vocabulary import IGNORED, VocabParallelCrossEntropy


class ChunkedCrossEntropy(nn.Module):
    """Cross-entropy summed over tokens, from the input of the output layer, including the output layer.

    It is called in the last layer's forward, after the targets are set.

    Args:
        out: the output layer: all of it, or this rank's rows of the vocabulary.
        part: the loss over these rows of the vocabulary.
        tokens: largest number of tokens of a chunk.
        softcap: logits are softcap * tanh(logit / softcap); 0: unchanged.

    Attributes:
        targets: int64 [b, s] of the next forward, -100 for ignored tokens.
    """

    def __init__(
        self, out: ParallelLinear, part: VocabParallelCrossEntropy, tokens: int, softcap: float = 0.0
    ) -> None:
        super().__init__()
        self.out = out
        self.part = part
        self.tokens = tokens
        self.softcap = softcap
        self.targets: Tensor | None = None

    def expect(self, targets: Tensor) -> None:
        """Set the targets [b, s] of the next forward."""
        self.targets = targets

    def of(self, x: Tensor) -> Tensor:
        """Return the loss of all tokens of x [b, s, hidden], or [b, s/t, hidden] with a `GatherLinear`: a
        scalar in float32, or in float64 for float64 weights. If gradients are recorded, it is 0 until its
        backward has run.
        """
        targets, self.targets = self.targets, None
        assert targets is not None, "the targets of the loss are not set"
        later = torch.is_grad_enabled() and (x.requires_grad or self.out.weight.requires_grad)
        return cast(Tensor, _Chunked.apply(x, self.out.weight, targets, self, later))

    def forward(self, y: Tensor, targets: Tensor) -> Tensor:
        """Return the loss that `of` computed, which is the layer's output y."""
        return y

    def rows(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return all tokens' input [n, hidden] and targets [n], as the concatenation of the ranks' pieces."""
        if isinstance(self.out, GatherLinear):
            pieces, work = start_gather(x, self.out.group)
            work.wait()
            x, targets = pieces, cut(targets, len(pieces), 1)
        return x.reshape(-1, x.shape[-1]), targets.flatten()


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """A chunk of tokens.

    Attributes:
        at: their range among all tokens.
        loss: the sum of their losses.
        counted: True for tokens with a target, bool [c].
        chosen: the target's column on this rank, [c, 1], and whether this rank has it, bool [c].
        probabilities: probabilities [c, local].
        capped: tanh of soft-capped logits, [c, local], or None.
    """

    at: slice
    loss: Tensor
    counted: Tensor
    chosen: tuple[Tensor, Tensor]
    probabilities: Tensor
    capped: Tensor | None

    def gradient(self, scale: Tensor) -> Tensor:
        """Return the gradient of the logits [c, local], computed in place of the probabilities."""
        at, on_this_rank = self.chosen
        gradient = self.probabilities
        gradient.scatter_add_(-1, at, -on_this_rank.to(gradient.dtype).unsqueeze(-1))
        gradient.mul_((self.counted * scale).unsqueeze(-1))
        if self.capped is not None:  # the derivative of tanh
            gradient.mul_(self.capped.square_().neg_().add_(1.0))
        return gradient


def _chunks(x: Tensor, weight: Tensor, targets: Tensor, loss: ChunkedCrossEntropy) -> Iterator[_Chunk]:
    """Yield chunks of x [n, hidden] and targets [n], all of one size except the last."""
    for start in range(0, len(x), loss.tokens):
        at = slice(start, start + loss.tokens)
        yield _chunk(at, loss.out.multiply(x[at], weight, None), targets[at], loss)


def _chunk(at: slice, logits: Tensor, targets: Tensor, loss: ChunkedCrossEntropy) -> _Chunk:
    """Compute the loss of a chunk from its logits [c, local], which are overwritten."""
    scores = logits.float() if logits.dtype in HALVES else logits
    del logits
    capped = None
    if loss.softcap:
        capped = scores.div_(loss.softcap).tanh_()
        scores = capped * loss.softcap
    part = loss.part
    scores.sub_(part.largest(scores).unsqueeze(-1))
    losses, column, on_this_rank = part.normalise(scores, targets)
    return _Chunk(
        at=at,
        loss=losses.sum(),
        counted=targets != IGNORED,
        chosen=(column, on_this_rank),
        probabilities=scores,
        capped=capped,
    )


def _start_reduction(dx: Tensor, x: Tensor, layer: ParallelLinear) -> tuple[Tensor, Pending | None]:
    """Start summing dx [n, hidden] over the ranks that hold other rows of the vocabulary."""
    if isinstance(layer, GatherLinear):
        return start_scatter_sum(dx.view(-1, *x.shape), layer.group)
    return dx, None if layer.input_group is None else start_sum(dx, layer.input_group)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, loss: ChunkedCrossEntropy, later: bool
    ) -> Tensor:
        x, weight, _ = operands(x, weight, None)
        total = x.new_zeros((), dtype=torch.promote_types(x.dtype, torch.float32))
        if later:
            ctx.save_for_backward(x, weight)
            # not in save_for_backward, since the backward writes it
            ctx.loss, ctx.targets = loss, targets
            ctx.total = total.detach()
            return total
        rows, flat = loss.rows(x, targets)
        for chunk in _chunks(rows, weight, flat, loss):
            total += chunk.loss
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        loss: ChunkedCrossEntropy = ctx.loss
        total: Tensor = ctx.total
        needs = ctx.needs_input_grad
        layer = loss.out
        rows, targets = loss.rows(x, ctx.targets)
        dx = torch.empty_like(rows) if needs[0] else None
        summed: tuple[Tensor, Pending | None] | None = None
        for chunk in _chunks(rows, weight, targets, loss):
            total += chunk.loss
            dy = chunk.gradient(grads[0]).to(rows.dtype)
            at = chunk.at
            del chunk
            if dx is not None:
                dx[at] = layer.input_gradient(dy, weight)
                if at.stop >= len(rows):  # reduced while the last weight gradient is computed
                    summed = _start_reduction(dx, x, layer)
            if needs[1]:
                layer.accumulate(rows[at], dy)
            del dy
        if needs[1]:
            layer.report()
        if summed is None:
            return None, None, None, None, None
        dx, work = summed
        if work is not None:
            work.wait()
        return dx.view_as(x), None, None, None, None
