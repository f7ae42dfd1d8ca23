"""Speed of a run: tokens per second, and model FLOPs utilisation.

MFU = model FLOPs of a step / (seconds of the step x ranks x peak FLOP/s of one rank). Model FLOPs are those
of the matrix products, forward and twice that backward, attention counted in full (Narayanan et al. 2021,
equation 3; `stretto.job.flops`). The peak is `metrics.peak_tflops`, else the vendor's figure of a known
GPU. That of a CPU is not measured: within an hour on a shared machine it differs tenfold, and MFU with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.engine.device import model_name, on_accelerator
from stretto.job.flops import model_flops_per_token
from stretto.job.user_shape import UserShape
from stretto.planner.machines.catalogue import peak_tflops
from stretto.planner.machines.device import Precision
from stretto.run.train.metrics import StepRecord
from stretto.run.train.rank_model import RankModel


@dataclass(frozen=True)
class ExpertReport:
    """One step of all mixture-of-experts layers.

    Attributes:
        loss: balance and z-loss, mean over the tokens of the global batch.
        dropped: part of all choices beyond an expert's capacity, 0 to 1.
        busiest: load of the busiest expert of any layer, in loads of its layer's average expert.
    """

    loss: float
    dropped: float
    busiest: float


def expert_statistics(model: RankModel, tokens: float) -> Tensor | None:
    """Return the fields of `ExpertReport` of the last step, float64 [3] on the device, the same on every
    rank, or None for a model without experts. Collective.

    Args:
        tokens: number of tokens of the global batch.
    """
    moe = model.shape.moe
    if moe is None:
        return None
    auxiliary = model.auxiliary
    loads = auxiliary.table(model.shape.layers, moe.experts)
    sums = torch.cat([auxiliary.losses.sum()[None], auxiliary.dropped[None], loads.flatten()])
    if model.mesh.layout.world > 1:
        dist.all_reduce(sums)
    return summarise_experts(sums[0], sums[1], sums[2:].view_as(loads), tokens)


def summarise_experts(losses: Tensor, dropped: Tensor, loads: Tensor, tokens: float) -> Tensor:
    """Return the fields of `ExpertReport`, [3].

    Args:
        losses, dropped: sums over all ranks, scalars.
        loads: of all ranks, [layers, experts]; a layer without experts has zeros.
        tokens: number of tokens of the global batch.
    """
    busiest = (loads.amax(1) / loads.mean(1).clamp(min=1e-12)).max()
    return torch.stack([losses / tokens, dropped / loads.sum().clamp(min=1.0), busiest])


_WINDOW = 50  # steps of the median


class Speed:
    """Makes a step's record from its seconds; only rank 0 reports it.

    Args:
        peak: TFLOP/s of one device, or None to look up an accelerator's.
    """

    def __init__(self, model: RankModel, peak: float | None) -> None:
        shape, job = model.shape, model.job
        self._flops: float | None = None  # of a model from a file they are unknown
        if not isinstance(shape, UserShape):
            self._flops = model_flops_per_token(shape, job.sequence, target=job.target_sequence)
        self._ranks = model.mesh.layout.world
        self._device = model.mesh.device
        self._peak = peak
        if peak is None and on_accelerator(self._device):
            precision: Precision = "bf16" if job.precision.dtype == "bfloat16" else "fp32"
            self._peak = peak_tflops(model_name(self._device), precision)
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    @property
    def median(self) -> float | None:
        """Tokens per second, median over the last steps, or None before the first."""
        return median(self._recent) if self._recent else None

    def record(
        self,
        *,
        step: int,
        loss: float,
        norm: float | None,
        rate: float,
        total_tokens: int,
        targets: int,
        tokens: int,
        seconds: float,
        memory_gib: float | None,
    ) -> StepRecord:
        """Return the record of a step of `tokens` tokens in `seconds`; `total_tokens` and `targets` are those
        since the start of the run.
        """
        speed = tokens / seconds
        self._recent.append(speed)
        mfu = None
        if self._flops is not None and self._peak:
            mfu = self._flops * speed / (self._ranks * self._peak * 1e12)
        return StepRecord(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens=total_tokens,
            targets=None if targets == total_tokens else targets,
            tokens_per_s=speed,
            step_time_s=seconds,
            mfu=mfu,
            memory_gib=memory_gib,
        )
