"""Where a step of the campaign runs, and at what size."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.run.dryrun.allocator import simulated_choices


@dataclass(frozen=True)
class Setting:
    """What every step is given.

    Attributes:
        tiny: sizes for a CPU: a rehearsal, whose figures mean nothing.
        simulated: the GPU is simulated: what is computed and how long it takes mean nothing.
        folder: of the results; a step may read those of earlier ones.
        step: its name.
    """

    device: torch.device
    tiny: bool
    folder: Path
    step: str = "step"
    simulated: bool = False

    @property
    def partial(self) -> Path:
        """Where the step keeps what it has so far, for the case that it is stopped."""
        return self.folder / f"{self.step}.partial"

    def keep(self, result: dict[str, Any]) -> None:
        """Write what the step has so far."""
        self.partial.write_text(json.dumps(result), encoding="utf-8")

    @property
    def on_gpu(self) -> bool:
        """Whether torch.cuda can be asked about the device."""
        return self.device.type == "cuda"

    @property
    def compiler(self) -> str:
        """The backend of torch.compile: a rehearsal needs no compiler."""
        return "eager" if self.tiny or self.simulated else "inductor"

    @contextmanager
    def choices(self) -> Generator[None]:
        """Where the GPU is simulated: experts chosen evenly, and kernels of attention that run there."""
        with simulated_choices() if self.simulated else nullcontext():
            yield

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def forget_peak(self) -> None:
        """Free what nobody holds, and let the next `peak_bytes` know only of what follows."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> tuple[int, int]:
        """The most bytes of tensors, and the most that the allocator had reserved; 0 on a CPU."""
        if not self.on_gpu:
            return 0, 0
        return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)

    @contextmanager
    def synchronisations(self) -> Generator[list[str]]:
        """Every call within that makes the host wait for the device, by file and line; none on a CPU."""
        calls: list[str] = []
        if not self.on_gpu:
            yield calls
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield calls
            finally:
                torch.cuda.set_sync_debug_mode("default")
        calls += [
            f"{one.filename}:{one.lineno}" for one in caught if "called a synchroniz" in str(one.message)
        ]
