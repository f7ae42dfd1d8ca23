"""The MLP of a block, with or without a gate, and its activation function."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.engine.models.causal import dropout
from stretto.job.shape import Mlp, ModelShape

_BOUND, _SHARPNESS = 7.0, 1.702  # constants of gpt-oss's gate


def activate(y: Tensor, kind: Mlp) -> Tensor:
    """Apply the activation function of an MLP.

    Args:
        y: [..., width], or [..., 2 width] = [gate; up] for kinds with a gate.

    Returns:
        [..., width].
    """
    if kind == "gelu":
        return F.gelu(y, approximate="tanh")
    if kind == "gelu_exact":
        return F.gelu(y)
    if kind == "relu":
        return F.relu(y)
    if kind == "relu2":
        return F.relu(y).square()
    gate, up = y.chunk(2, dim=-1)
    if kind == "swiglu":  # Shazeer 2020
        return F.silu(gate) * up
    if kind == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=_BOUND), up.clamp(-_BOUND, _BOUND)
    return (up + 1.0) * (gate * torch.sigmoid(_SHARPNESS * gate))


class MLP(nn.Module):
    """Two linears with an activation function in between."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.kind: Mlp = shape.mlp
        self.into = "gate_up" if shape.gated else "up"
        width = 2 * shape.ffn if shape.gated else shape.ffn
        self.add_module(self.into, nn.Linear(shape.hidden, width, bias=shape.bias))
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias)
        self.drop = dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, hidden] to [b, s, hidden]."""
        return self.drop(self.down(self.activation(getattr(self, self.into)(x))))

    def activation(self, y: Tensor) -> Tensor:
        """Apply the activation function to y [..., width] or [gate; up]."""
        return activate(y, self.kind)
