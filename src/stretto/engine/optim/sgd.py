"""SGD whose weight decay stays out of the momentum."""

from __future__ import annotations

import torch


class DecoupledSGD(torch.optim.SGD):
    """As in AdamW (Loshchilov and Hutter 2019, algorithm 1)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore
        """One update."""
        kept = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, kept, strict=True):
            moving = [p for p in group["params"] if p.grad is not None]
            if moving and decay:
                torch._foreach_mul_(moving, 1.0 - group["lr"] * decay)
            group["weight_decay"] = 0.0
        super().step()
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay
