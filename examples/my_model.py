"""A model of your own for `stretto train`: a list of layers, which any schedule cuts into stages.

    stretto train examples/my_model.yaml
    stretto verify examples/my_model.yaml

`my_model.yaml`, beside this file, names `build`; nothing is registered.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self, vocab: int, positions: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.dropout = nn.Dropout(0.1)  # its masks depend on the sample, not on the layout

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids [b, s], int64, to [b, s, hidden]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.tokens(ids) + self.positions(places))


class Mixer(nn.Module):
    """A gated causal convolution in place of attention, as in Hyena's and Mamba's blocks, then an MLP."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate = nn.Linear(hidden, 2 * hidden)
        self.convolution = nn.Conv1d(hidden, hidden, width, groups=hidden)
        self.width = width
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, hidden] to [b, s, hidden]; a token sees itself and the `width` - 1 before it."""
        value, gate = self.gate(self.norm(x)).chunk(2, dim=-1)
        before = F.pad(value.transpose(1, 2), (self.width - 1, 0))
        x = x + self.convolution(before).transpose(1, 2) * F.silu(gate)
        return x + self.mlp(x)


def build(vocab: int, positions: int, layers: int = 6, hidden: int = 64, width: int = 8) -> nn.Sequential:
    """Return the layers, with initial values from torch's generator; the last one returns logits."""
    model = nn.Sequential()
    model.add_module("embed", Embedding(vocab, positions, hidden))
    for i in range(layers):
        model.add_module(f"block{i}", Mixer(hidden, width))
    model.add_module("norm", nn.LayerNorm(hidden))
    model.add_module("head", nn.Linear(hidden, vocab, bias=False))
    return model
