"""How the software executes a job: launch overheads, kernel efficiency, overlap, and memory that tensors
do not take.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from stretto.errors import StrettoError
from stretto.planner.machines.device import Device, Precision
from stretto.planner.machines.reading import shipped


@dataclass(frozen=True, kw_only=True)
class SoftwareAssumptions:
    """Properties of a generation of software for kernels and collectives: the cost of a step that model and
    device do not explain.

    Attributes:
        host: seconds that the host takes to launch one kernel; shorter kernels wait for it.
        action: seconds that the host takes for a stage's forward or backward in addition to its kernels.
        blocking: share of the shorter of kernels and launches that adds to the longer if collectives over tp
            split a layer: ranks wait for one another at each, so that no host runs far ahead.
        ahead: hosts launch kernels ahead of what other tp ranks wait for; otherwise `blocking` is 1. BLOOM's
            runs with DeepSpeed were no slower with `CUDA_LAUNCH_BLOCKING=1`, and kept it (bigscience,
            train/tr11-176B-ml/chronicles-prequel.md).
        serial: collectives over tp, products, and sums of gradients run one after another. Megatron-LM
            overlaps the backward's all-reduce since August 2021 (commit cf7efd4f), and adds gradients within
            products since February 2022 (83b1e42f); before that, autograd adds those of each microbatch in a
            pass of its own. Megatron-DeepSpeed disables both (its issue 447).
        pipelined: share of the gathers and reduce-scatters over tp that run in parts, overlapped with the
            parts of their products (Transformer Engine's user buffers; Wang et al. 2023, "Overlap
            communication with dependent computation via decomposition").
        slowdown: factor on the time of computation during communication, 1.0 for none. Measured factors of
            common kernels are 1.1 to 1.4 (docs/evidence/planning-evidence.md).
        attention, hopper: speed of fused attention kernels over that of the fastest ones, on devices up to
            A100, and on Hopper and later. On A100 FlashAttention 1 reaches half the speed of 2 (Dao 2023,
            section 4.1); on H100 FlashAttention 2 reaches half the speed of 3 (Shah et al. 2024, section
            4.1).
        passes: bytes that norms, activations and rotations move over those of fused kernels, if the device
            was not measured. Unfused operations of PyTorch move several times as many (counted:
            RMSNorm 34 bytes an element for 4, rotation 20 for 4, SwiGLU 10 for 6).
        softmax: one kernel does scale, mask and softmax of stored scores.
        loss: `passes` of the loss, whose fused kernels move 24 bytes a logit. Megatron's vocabulary-parallel
            loss of 2021 (megatron/mpu/cross_entropy.py) moves 52: a cast, a maximum, a difference, an
            exponential, a sum, a quotient, and two passes of the backward.
        casts: share of the casts to 8 bits and fewer that are kernels of their own; Transformer Engine and
            compilers cast within norms and activations, and weights once a step.
        imbalance: tokens of the rank whose experts get the most, over the mean.
        grouped: speed of the products of a rank's experts in one call, over that of one product as large.
        exchanged: share of the exchanges of tokens between experts' ranks that overlaps with the computation
            of other microbatches.
        dispatch_once: a token crosses to a node once, however many of its experts are there (DeepEP).
        sharded: speed of gathers and reductions of sharded parameters (ZeRO-3) over that of plain collectives
            of their size; implementations of 2021 were far below it.
        alone, alone_hopper: time of a kernel within a step over its time alone, on devices up to A100, and on
            Hopper and later; clocks drop under sustained power and heat.
        scattered: instead of the same activation, each tp rank sends a part of it to the next stage, where
            the parts are gathered (Narayanan et al. 2021, section 4.1).
        causal: fused attention skips what is masked.
        spread: relative uncertainty of kernels with this software, beside that of the device: how far runs
            with it are off that no constant was fitted on.
    """

    host: float = 0.0
    action: float = 0.0
    blocking: float = 0.0
    ahead: bool = True
    serial: bool = False
    pipelined: float = 0.0
    slowdown: float = 1.2
    attention: float = 1.0
    hopper: float = 1.0
    passes: float = 1.0
    softmax: bool = True
    loss: float = 1.0
    casts: float = 1.0
    imbalance: float = 1.05
    grouped: float = 0.9
    exchanged: float = 0.0
    dispatch_once: bool = False
    sharded: float = 1.0
    alone: float = 1.0
    alone_hopper: float = 1.0
    scattered: bool = False
    causal: bool = True
    spread: float = 0.05

    def fused(self, device: Device) -> float:
        """Speed of fused attention on a device, over that of the fastest kernels."""
        return self.hopper if device.name.startswith(_HOPPER) else self.attention

    def slower(self, device: Device) -> float:
        """Time of a kernel within a step on a device, over its time alone."""
        return self.alone_hopper if device.name.startswith(_HOPPER) else self.alone


_HOPPER = ("h100", "h800", "h20", "gh200", "b200", "b300", "gb200", "gb300")  # h20 and h200


@lru_cache(maxsize=1)
def software_profiles() -> dict[str, SoftwareAssumptions]:
    """Software profiles by name: "serial" and "unfused" (before fused attention), "fused" (FlashAttention 1,
    to the middle of 2023), "today" (unfused PyTorch kernels, FlashAttention 2), "compiled" (the same, fused
    by torch.compile), "tuned" (the fastest: FlashAttention 3, cuDNN, kernels fused by hand).
    """
    profiles: dict[str, dict[str, Any]] = shipped("stretto.planner", "software")
    return {name: replace(SoftwareAssumptions(), **fields) for name, fields in profiles.items()}


def software_profile(name: str) -> SoftwareAssumptions:
    """The software profile of that name.

    Raises:
        StrettoError: there is none.
    """
    profiles = software_profiles()
    if name not in profiles:
        raise StrettoError(f"there is no software {name!r}", hint=f"one of {', '.join(profiles)}")
    return profiles[name]


def _today() -> SoftwareAssumptions:
    return software_profile("today")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """How the software executes a job: what times and memory depend on besides the job and the cluster.

    Attributes:
        overlap: reductions and gathers of data parallelism overlap with computation.
        blocking: a rank waits until what it sends to the next stage has arrived.
        products: type of matrix products that Stretto itself cannot train in ("fp4"), or None for the job's.
        reserve: bytes of the process besides tensors, or None for the defaults of the device.
        software: launch overheads, kernel efficiency and overlap.
    """

    overlap: bool = True
    blocking: bool = False
    products: Precision | None = None
    reserve: float | None = None
    software: SoftwareAssumptions = field(default_factory=_today)
