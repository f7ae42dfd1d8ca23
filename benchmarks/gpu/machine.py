"""What the machine is and what its device does at best: ceilings for everything after it."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from torch.cuda import nccl

from gpu.setting import Setting
from gpu.speed import peak, timed
from stretto.engine.device import model_name, total_memory


def look(setting: Setting) -> dict[str, Any]:
    """Names, versions, memory, and the speed of a copy and of a product of random matrices."""
    device, n = setting.device, 256 if setting.tiny else 8192
    driver = getattr(torch._C, "_cuda_getDriverVersion", None)  # pyright: ignore[reportPrivateUsage]
    facts: dict[str, Any] = {
        "device": model_name(device) if setting.on_gpu else platform.processor() or platform.machine(),
        "memory_bytes": total_memory(device) if setting.on_gpu else None,
        "driver": driver() if setting.on_gpu and driver is not None else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if setting.on_gpu else None,
        "peak_flops": peak(setting),
        "packages": packages(),
    }
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(timed(lambda: torch.mm(a, b), setting, steps=10)["seconds"])
    facts["product_flops"] = 2 * n**3 / seconds
    source = torch.randn(n * n * (1 if setting.tiny else 8), device=device)
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source), setting, steps=10)["seconds"])
    facts["copy_bytes_per_s"] = 2 * source.nbytes / seconds
    host = torch.empty(n * n, pin_memory=setting.on_gpu)
    there = torch.empty_like(host, device=device)
    seconds = min(timed(lambda: there.copy_(host, non_blocking=True), setting, steps=10)["seconds"])
    facts["to_device_bytes_per_s"] = host.nbytes / seconds
    return facts


def packages() -> dict[str, str | None]:
    """Versions of what contestants need, None where it cannot be imported."""
    installed: dict[str, str | None] = {}
    for name in ("torch", "triton", "torchao", "torchrec", "fbgemm_gpu", "transformer_engine", "pytest"):
        try:
            installed[name] = str(getattr(__import__(name), "__version__", "?"))
        except Exception:  # a broken installation is as good as none
            installed[name] = None
    return installed
