"""Parts of your own for `stretto train`, which finds them by FILE.py:NAME; nothing is registered.

    stretto train examples/my_parts.yaml
    stretto verify examples/my_parts.yaml

`my_parts.yaml`, beside this file, names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto import FragmentOptimizer, ParameterFragment

TEXTS = Path(__file__).parent  # of the documents: the scripts beside this one

IGNORED = -100  # target of padding
SMOOTHING, Z = 0.1, 1e-4


def documents() -> Iterator[str]:
    """The texts to train on; read once, and then taken from the cache until this file changes."""
    for path in sorted(TEXTS.glob("*.py")):
        yield from path.read_text(encoding="utf-8").split("\n\n")


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels (Szegedy et al. 2016, section 7) and the z-loss of PaLM (Chowdhery
    et al. 2022, section 5), which holds the sum of exponentials near 1.

    Args:
        logits: [b, s, vocab], float32.
        targets: [b, s], int64.

    Returns:
        The sum over tokens, a scalar; the trainer divides it by the tokens of the step.
    """
    counted = targets != IGNORED
    logits, targets = logits[counted], targets[counted]
    entropy = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=SMOOTHING)
    return entropy + Z * logits.logsumexp(-1).square().sum()


class AdaBelief(FragmentOptimizer):
    """AdaBelief (Zhuang et al. 2020, algorithm 2): Adam, with the variance of the gradient about its running
    mean in place of its square.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        fragments: Iterable[ParameterFragment],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(groups, fragments, {"lr": lr, "betas": betas, "eps": eps})

    def new_state(self, fragment: ParameterFragment) -> dict[str, Tensor]:
        """Mean and variance, of the fragment's shape, and the number of updates."""
        parameter = fragment.parameter
        return {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_var": torch.zeros_like(parameter),
        }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        for batch in self.begin():
            group, (beta1, beta2) = batch.group, batch.group["betas"]
            for fragment, gradient, state in batch:
                steps, mean, variance = float(state["step"]), state["exp_avg"], state["exp_avg_var"]
                mean.lerp_(gradient, 1 - beta1)
                deviation = gradient - mean
                variance.mul_(beta2).addcmul_(deviation, deviation, value=1 - beta2).add_(group["eps"])
                size = (variance / (1 - beta2**steps)).sqrt_().add_(group["eps"])
                fragment.parameter.mul_(1 - group["lr"] * group["weight_decay"])
                fragment.parameter.addcdiv_(mean, size, value=-group["lr"] / (1 - beta1**steps))
