"""What the ranks of a job agree on in a step or an evaluation: one all-reduce, read by the host once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank reports of a step or an evaluation. Tensors are on the rank's device, and stay there."""

    loss: float | Tensor = 0.0  # this rank's part of the sum of all losses
    # one more than the number of the first microbatch whose loss is not finite; 0 if all are
    bad_microbatch: float | Tensor = 0.0
    bad_weights: bool = False  # the step left weights that are not finite
    overflow: bool | Tensor = False  # a gradient is not finite, or an update within the step was skipped
    memory_changed: float | Tensor = 0.0  # tensors that are not as the last update left them
    stop: bool = False  # the rank was asked to stop
    end: bool = False  # a hook has asked to end the run
    memory_gib: float = 0.0  # its peak so far, on the device
    host_gib: float = 0.0  # the peak of its process
    busy_s: float = 0.0  # time since its last report in which it waited for no other rank; 0 if not measured
    written: bool = False  # it has done its part of a checkpoint that is saved in the background
    write_failed: bool = False


# summed over all ranks
_SUMMED = ("loss", "bad_weights", "overflow", "memory_changed", "stop", "written", "write_failed", "end")
_PER_RANK = ("bad_microbatch", "memory_gib", "busy_s", "host_gib")  # every rank learns those of each rank


@dataclass(frozen=True, kw_only=True)
class StepAgreement:
    """The reports of all ranks together, the same on every one of them."""

    loss: float  # sum over the ranks
    bad_microbatches: Mapping[int, int]  # by rank, the first microbatch whose loss is not finite
    bad_weights: bool
    overflow: bool
    memory_changed: bool
    stop: bool
    memory_gib: float | None  # of the fullest rank; None if no rank measures it
    busy_s: tuple[float, ...]  # by rank
    save_ready: bool  # all have done their part of a checkpoint, or one has failed: `BackgroundSave.advance`
    save_failed: bool
    end: bool = False
    memory: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """By rank, GiB: the peaks of its `device` and of its process on the `host`."""
    statistics: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """Numbers that were the same on every rank before, now on the host."""

    def statistic(self, name: str) -> float | None:
        """A statistic of one number, or None if the step has none of this name."""
        values = self.statistics.get(name)
        return None if values is None else values[0]


class Agreement:
    """The reports of all ranks, on their way to each of them: one all-reduce, started here and waited for
    later. Without a process group this rank is alone.

    Of all that a step computes, the host reads nothing but this, in one copy from the device.

    Args:
        statistics: numbers that are the same on every rank, [n] each, to be read with it.
    """

    def __init__(
        self, report: StepReport, device: torch.device, statistics: Mapping[str, Tensor] | None = None
    ) -> None:
        rank, self._world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        indices = {name: index for index, name in enumerate(_SUMMED)}
        indices |= {name: len(_SUMMED) + i * self._world + rank for i, name in enumerate(_PER_RANK)}
        reported = {name: getattr(report, name) for name in indices}
        on_host = torch.zeros(len(_SUMMED) + len(_PER_RANK) * self._world, dtype=torch.float64)
        for name, value in reported.items():
            if not isinstance(value, Tensor):
                on_host[indices[name]] = value
        self._values, self._work = on_host.to(device, non_blocking=True), None
        for name, value in reported.items():
            if isinstance(value, Tensor):
                self._values[indices[name]] = value
        self._statistics = {
            name: tensor.to(device, torch.float64, non_blocking=True)
            for name, tensor in (statistics or {}).items()
        }
        if self._world > 1:
            self._work = dist.all_reduce(self._values, async_op=True)

    def wait(self) -> StepAgreement:
        """Return what all ranks report."""
        if self._work is not None:
            self._work.wait()
        values = iter(torch.cat([self._values, *self._statistics.values()]).tolist())
        summed = dict(zip(_SUMMED, values, strict=False))
        per_rank = {name: list(islice(values, self._world)) for name in _PER_RANK}
        return StepAgreement(
            loss=summed["loss"],
            bad_microbatches={rank: int(n) - 1 for rank, n in enumerate(per_rank["bad_microbatch"]) if n},
            bad_weights=summed["bad_weights"] > 0,
            overflow=summed["overflow"] > 0,
            memory_changed=summed["memory_changed"] > 0,
            stop=summed["stop"] > 0,
            end=summed["end"] > 0,
            memory_gib=max(per_rank["memory_gib"]) or None,
            busy_s=tuple(per_rank["busy_s"]),
            memory={"device": tuple(per_rank["memory_gib"]), "host": tuple(per_rank["host_gib"])},
            save_ready=summed["written"] == self._world or summed["write_failed"] > 0,
            save_failed=summed["write_failed"] > 0,
            statistics={name: tuple(islice(values, len(t))) for name, t in self._statistics.items()},
        )


def agree(
    report: StepReport, device: torch.device, statistics: Mapping[str, Tensor] | None = None
) -> StepAgreement:
    """Combine the reports of all ranks; see `Agreement`. Collective."""
    return Agreement(report, device, statistics).wait()


def describe_bad_loss(agreed: StepAgreement) -> str:
    """Which loss was the first that is not finite."""
    rank, microbatch = next(iter(agreed.bad_microbatches.items()))
    return f"the loss of microbatch {microbatch} on rank {rank} is not finite"
