"""Embedding and cross-entropy over a vocabulary split by rows over tensor-parallel ranks.

The loss sends a few numbers for each token between ranks, never the logits (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from stretto.engine.parallel.collectives import all_max, all_sum, cut, gather, reduce_from, scatter_to
from stretto.engine.parallel.precision import gradient_dtype
from stretto.engine.parallel.tensor.linear import ParallelLinear

IGNORED = -100  # target of a token that the loss ignores


class _Rows(torch.autograd.Function):
    """Embedding lookup whose backward adds directly into `weight.grad`, without a dense gradient of the
    table.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, layer: VocabParallelEmbedding) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.layer = layer
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            ctx.layer.add_weight_gradient(ids.flatten(), grads[0].flatten(0, -2))
        return None, None, None


class VocabParallelEmbedding(nn.Module):
    """Rows [start, start + rows) of an embedding table; the group's other ranks hold the other rows.

    With `sequence` each rank gets only its part of the tokens, split along dimension 1.
    """

    def __init__(
        self, weight: nn.Parameter, start: int, group: ProcessGroup | None, sequence: bool = False
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.weight = weight
        self.start = start
        self.group = group
        self.on_gradient: Callable[[Tensor], None] | None = None

    @property
    def fused(self) -> list[nn.Parameter]:
        """Parameters whose gradients this layer accumulates itself, outside autograd."""
        return [self.weight]

    def add_weight_gradient(self, ids: Tensor, dy: Tensor) -> None:
        """Add dy [n, hidden] to the gradient's rows ids [n]."""
        weight = self.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=gradient_dtype(weight))
        dy = dy.to(weight.grad.dtype)
        if dy.device.type == "cpu":
            weight.grad.index_add_(0, ids, dy)
        else:  # it sorts by row: atomic additions would not be bitwise reproducible
            weight.grad.index_put_((ids,), dy, accumulate=True)
        if self.on_gradient is not None:
            self.on_gradient(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [b, s] to [b, s, hidden], the same on every rank of the group, or to [b, s/t, hidden]."""
        if self.group is None:
            return cast(Tensor, _Rows.apply(self.weight, ids, self))
        if self.sequence:
            ids = cut(ids, self.group.size(), 1)  # rows then come as the pieces that ranks scatter
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        # any row, but not one for all: the sums of their zero gradients would be one long row of additions
        rows = cast(Tensor, _Rows.apply(self.weight, local.remainder(self.weight.shape[0]), self))
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return scatter_to(rows, self.group, 0).squeeze(0) if self.sequence else reduce_from(rows, self.group)


class GatheredLogits(ParallelLinear):
    """An output layer split by vocabulary rows that returns the logits of all `vocab` entries on every rank.
    For generation: the gathered logits have no gradient.
    """

    def __init__(self, weight: nn.Parameter, vocab: int, group: ProcessGroup | None) -> None:
        super().__init__(weight, None)
        self.vocab = vocab
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Map x [b, s, hidden] to [b, s, vocab]; padding is at the end of the last ranks' rows."""
        return gather(super().forward(x), self.group, x.dim() - 1)[..., : self.vocab]


class VocabParallelCrossEntropy(nn.Module):
    """Cross-entropy summed over tokens, from this rank's columns of the logits.

    `start` is this rank's first vocabulary id, `real` its number of columns that are not padding.
    """

    def __init__(self, start: int, real: int, group: ProcessGroup | None) -> None:
        super().__init__()
        self.start = start
        self.real = real
        self.group = group

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map logits [b, s, local] and targets [b, s] to a scalar in float32, or float64 for float64
        logits.
        """
        return cast(Tensor, _CrossEntropy.apply(logits, targets, self))

    def largest(self, logits: Tensor) -> Tensor:
        """Return the largest real logit of each token, [n], over this rank's logits [n, local] and the
        others'.
        """
        work = logits.dtype if logits.dtype == torch.float64 else torch.float32
        real = logits[:, : self.real]
        on_this_rank = (
            real.amax(-1).to(work)
            if self.real
            else torch.full(logits.shape[:1], -torch.inf, dtype=work, device=logits.device)
        )
        return all_max(on_this_rank, self.group)

    def probabilities(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the probabilities of logits [n, local], in new memory, and the results of `normalise`."""
        largest = self.largest(logits)
        if self.group is not None or self.real < logits.shape[-1]:
            scores = logits.to(largest.dtype) - largest.unsqueeze(-1)
            return scores, *self.normalise(scores, targets)
        # one pass instead of four; the largest probability is 1 over the sum of exponentials
        result = logits.softmax(-1, dtype=largest.dtype)
        counted = targets != IGNORED
        at = targets.masked_fill(~counted, 0).unsqueeze(-1)
        below = largest - logits.gather(-1, at).squeeze(-1).to(largest.dtype)
        return result, (below - result.amax(-1).log()) * counted, at, counted

    def normalise(self, scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn scores [n, local], logits minus the largest of each token, into probabilities, in place.

        Returns:
            The losses of targets [n], 0 for ignored ones; the target's column on this rank, [n, 1]; and
            whether this rank has it, [n].
        """
        scores[:, self.real :] = -torch.inf
        local = targets - self.start
        on_this_rank = (local >= 0) & (local < self.real)
        at = local.masked_fill(~on_this_rank, 0).unsqueeze(-1)
        chosen = scores.gather(-1, at).squeeze(-1).masked_fill(~on_this_rank, 0.0)
        scores.exp_()
        sums = all_sum(torch.stack([scores.sum(-1), chosen]), self.group)
        scores.div_(sums[0].unsqueeze(-1))
        return (sums[0].log() - sums[1]) * (targets != IGNORED), at, on_this_rank


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: VocabParallelCrossEntropy) -> Tensor:
        targets = targets.flatten()
        probs, losses, at, on_this_rank = part.probabilities(logits.flatten(0, -2), targets)
        ctx.save_for_backward(probs, at, on_this_rank, targets != IGNORED)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        probs, at, on_this_rank, counted = ctx.saved_tensors
        # nothing else refers to the saved probabilities: turn them into the gradient in place
        probs.scatter_add_(-1, at, -on_this_rank.to(probs.dtype).unsqueeze(-1))
        probs.mul_((counted * grads[0]).unsqueeze(-1))
        return probs.to(ctx.dtype).view(ctx.shape), None, None
