"""How the software executes a job: launch overheads, kernel efficiency, overlap, and memory beside
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files

import yaml

from stretto.planner.machines.device import Device


@dataclass(frozen=True, kw_only=True)
class SoftwareProfile:
    """How a program runs kernels and collectives.

    Attributes:
        host: seconds that the host takes to start one kernel; kernels that are shorter wait for it.
        action: seconds that the host takes for a stage's forward or backward beside its kernels.
        hidden: part of the backward's collectives over tp that its own products hide.
        slowdown: of what runs while something is communicated, 1.0: none. Measured ones of common kernels are
            1.1 to 1.4 (docs/planning.md).
        attention, hopper: speed of fused attention kernels over that of the fastest ones, on devices up to
            A100 and on Hopper and later. FlashAttention 1 reaches a half of 2 on A100 (Dao 2023, section
            4.1), 2 a half of 3 on H100 (Shah et al. 2024, section 4.1).
        passes: bytes that norms, activations, rotations and the loss move over those of fused kernels, where
            the device's own were not measured: one operation of PyTorch after another moves several times as
            many (counted: RMSNorm 34 bytes an element for 4, rotation 20 for 4, SwiGLU 10 for 6).
        sharded: speed of gathers and reductions of sharded parameters (ZeRO-3) over that of plain collectives
            of their size; those of 2021 were far from it.
        alone: time of a kernel within a step over its time alone, again and again: clocks give way to
            power and heat.
        causal: fused attention leaves out what is masked.
    """

    host: float = 0.0
    action: float = 0.0
    hidden: float = 1.0
    slowdown: float = 1.2
    attention: float = 1.0
    hopper: float = 1.0
    passes: float = 1.0
    sharded: float = 1.0
    alone: float = 1.0
    causal: bool = True

    def fused(self, device: Device) -> float:
        """The speed of fused attention on a device."""
        return self.hopper if device.name.startswith(_HOPPER) else self.attention


_HOPPER = ("h100", "h800", "h20", "gh200", "b200", "b300", "gb200", "gb300")  # h20 and h200


@lru_cache(maxsize=1)
def software_profiles() -> dict[str, SoftwareProfile]:
    """Habits by name: "unfused" (before fused attention), "fused" (FlashAttention 1, to the middle of 2023),
    "today" (PyTorch's own kernels one after another, FlashAttention-2), "compiled" (the same, fused by
    torch.compile), "tuned" (the fastest: FlashAttention-3, cuDNN, fused by hand).
    """
    text = files("stretto.planner").joinpath("data/software.yaml").read_text(encoding="utf-8")
    told: dict[str, dict[str, float]] = yaml.safe_load(text)
    return {
        name: replace(SoftwareProfile(), **{key: float(value) for key, value in fields.items()})
        for name, fields in told.items()
    }


def software_profile(name: str) -> SoftwareProfile:
    """The habits of that name."""
    return software_profiles()[name]


def _today() -> SoftwareProfile:
    return software_profile("today")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """How the program runs a job's kernels and messages: what times depend on beside job and cluster.

    Attributes:
        overlap: reductions and gathers of data parallelism run beside the computation.
        blocking: a rank waits until what it sends to the next stage is there.
        scattered: what one tp rank would send to the next stage whole is sent in parts and gathered there
            (Narayanan et al. 2021, section 4.1).
        reserve: bytes that the program keeps beside tensors; None: as the device is usually used.
        habits: how kernels and collectives run.
    """

    overlap: bool = True
    blocking: bool = False
    scattered: bool = False
    reserve: float | None = None
    software: SoftwareProfile = field(default_factory=_today)
