"""A loss of the user's: a function in a file, of logits and targets, tried before ranks start."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.parallel.collectives import gather_copy
from stretto.errors import StrettoError
from stretto.user_file import find_function

_IGNORED = -100  # target of a token that the loss ignores


class UserLoss(nn.Module):
    """The user's function in training, and the cross-entropy in evaluations, which stay comparable with those
    of other losses.

    Tensor-parallel ranks gather the logits, and each computes the loss of all of them.

    Args:
        named: FILE.py:NAME of the function.
        cross_entropy: of this rank's columns of the logits.
        vocab: number of columns of all ranks, without padding.
        group: the ranks that have the other columns.
    """

    def __init__(
        self, named: str, cross_entropy: nn.Module, vocab: int, group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.function = find_function(named, "train.loss=mine.py:loss", ("logits", "targets"))
        self.cross_entropy = cross_entropy
        self.vocab = vocab
        self.group = group

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Map this rank's logits [b, s, local] and targets [b, s] to a scalar: a sum over tokens."""
        if not torch.is_grad_enabled():
            return self.cross_entropy(logits, targets)
        complete = gather_copy(logits, self.group, logits.dim() - 1)[..., : self.vocab]
        complete = complete if complete.dtype == torch.float64 else complete.float()
        return self.function(complete, targets)


@lru_cache(maxsize=16)
def try_loss(named: str) -> None:
    """Call the user's function on a few logits, so that its mistakes are found before ranks start.

    Raises:
        StrettoError: there is no such function, or it fails; it does not return a scalar that depends on the
            logits; it counts ignored tokens; or the loss of two samples is not the sum of theirs.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)
    targets = torch.tensor([[3, 1, _IGNORED, 7], [0, _IGNORED, 5, 2]])
    loss = UserLoss(named, nn.Identity(), vocab=8)
    logits.requires_grad_()
    together = loss(logits, targets)
    if not isinstance(together, Tensor) or together.shape != () or not together.requires_grad:  # pyright: ignore
        raise StrettoError(
            f"{named} must return a tensor without dimensions that depends on the logits",
            hint="such as F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='sum')",
        )
    (gradient,) = torch.autograd.grad(together, logits)
    if bool(gradient[targets == _IGNORED].any()):
        raise StrettoError(
            f"{named} counts tokens whose target is {_IGNORED}, which are padding",
            hint=f"leave them out: counted = targets != {_IGNORED}",
        )
    separate = sum(float(loss(logits[i : i + 1], targets[i : i + 1]).detach()) for i in range(2))
    in_one_call = float(together.detach())
    if abs(in_one_call - separate) > 1e-9 * abs(separate):
        raise StrettoError(
            f"{named} gives {in_one_call:.6g} for two samples, and {separate:.6g} for one and the other: "
            "it must be a sum over tokens, which the trainer divides by their number",
            hint="use reduction='sum'",
        )
