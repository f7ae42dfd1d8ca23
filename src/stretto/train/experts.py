"""What a step's mixtures of experts did, over all ranks: their own losses, and who was busy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.train.assemble import Replica


@dataclass(frozen=True)
class ExpertReport:
    """One step of all mixture-of-experts layers.

    loss: balance and z-loss, mean over the tokens of the global batch.
    dropped: part of all choices for which an expert had no room, 0 to 1.
    busiest: load of the busiest expert of any layer, in loads of its layer's average expert.
    """

    loss: float
    dropped: float
    busiest: float


def expert_report(replica: Replica, tokens: float) -> ExpertReport | None:
    """The report of the step that is just done, the same on every rank; None for a model without experts.
    Collective.

    Args:
        tokens: of the global batch, those that count.
    """
    moe = replica.shape.moe
    if moe is None:
        return None
    found = replica.auxiliary
    loads = torch.zeros(replica.shape.layers, moe.experts, dtype=torch.float64, device=replica.mesh.device)
    for name, load in found.loads.items():
        loads[int(name.split(".")[1])] += load  # blocks.3.mlp
    facts = torch.cat([found.losses.sum()[None], found.dropped[None], loads.flatten()])
    if replica.mesh.layout.world > 1:
        dist.all_reduce(facts)
    return _report(facts[0], facts[1], facts[2:].view_as(loads), tokens)


def _report(losses: Tensor, dropped: Tensor, loads: Tensor, tokens: float) -> ExpertReport:
    chosen = loads.sum()
    busiest = (loads.amax(1) / loads.mean(1).clamp(min=1e-12)).max()
    told = torch.stack([losses / tokens, dropped / chosen.clamp(min=1.0), busiest])
    return ExpertReport(*told.tolist())


__all__ = ["ExpertReport", "expert_report"]
