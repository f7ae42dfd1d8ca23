"""What a config says of types and data-parallel modes, as parameters on ranks take it."""

from __future__ import annotations

import torch

from stretto.config.check import job_of
from stretto.config.schema import TrainConfig
from stretto.parallel.precision import HALVES, master_dtype, weight_dtype
from stretto.parallel.sharded import Sharing
from stretto.plan.reduction import reduction
from stretto.schedule.program import Program

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """The type of activations and of most weights."""
    return DTYPES[config.train.dtype]


def dtype_of(config: TrainConfig, name: str) -> torch.dtype:
    """The type of one parameter's weights."""
    return weight_dtype(name, compute_dtype(config), config.precision.keep)


def sharing_of(config: TrainConfig, program: Program) -> Sharing:
    """How this job keeps parameters, gradients and states."""
    job, dtype = job_of(config), compute_dtype(config)
    half = dtype in HALVES
    return Sharing(
        mode=job.dp.mode,
        sizes=job.dp.sizes(job.copies),
        master=master_dtype(dtype),
        gradients=torch.float32 if half and config.precision.gradients == "float32" else None,
        each=reduction(program, job.dp.mode, job.dp.reduce) == "microbatch",
        lasting=bool(program.versions),
        layers=job.dp.gathers(job.layout.pp) != "stage",
        host=job.dp.offload != "none",
        store=job.dp.offload_parameters,
        path=job.dp.path,
        bucket_bytes=int(config.train.bucket_mib * 2**20),
    )
