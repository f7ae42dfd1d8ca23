"""Tied parameters: one tensor in the plain model, a copy on each rank that holds one of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Tie:
    """One shared parameter: the layers that hold it and its name inside each."""

    uses: tuple[tuple[int, str], ...]  # (layer, name in the layer), in model order

    def stages(self, cut: Sequence[range]) -> tuple[int, ...]:
        """The stages that hold it."""
        return tuple(s for s, layers in enumerate(cut) if any(layer in layers for layer, _ in self.uses))


def find_ties(layers: Sequence[nn.Module]) -> list[Tie]:
    """Every parameter that more than one layer holds; call it while the layers still share the tensors."""
    uses = dict[int, list[tuple[int, str]]]()
    for at, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            uses.setdefault(id(parameter), []).append((at, name))
    return [Tie(tuple(places)) for places in uses.values() if len(places) > 1]
