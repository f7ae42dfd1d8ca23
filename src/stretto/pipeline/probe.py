"""Find the shapes of the activations between stages by sending one microbatch through, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import StrettoError
from stretto.pipeline.executor import PipelineError
from stretto.pipeline.live import Boundary
from stretto.pipeline.transfer import FORWARD, Transfer
from stretto.schedule.program import Program

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LONGEST = 10  # dimensions that a message has room for


@torch.no_grad()
def probe_boundaries(
    program: Program,
    rank: int,
    stages: Mapping[int, nn.Module],
    transfer: Transfer | None,
    inputs: Sequence[Any],
    before: Callable[[int], None] | None,
    device: torch.device,
) -> dict[int, Boundary]:
    """Boundaries of the stages held here, and of the stage after each of them.

    A trial forward of the first microbatch in evaluation mode with the random state put back; only shapes
    cross ranks.
    """
    found = dict[int, Boundary]()
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
        for stage in range(program.stages - 1):
            here, there = program.placement[stage], program.placement[stage + 1]
            if rank == here:
                if before is not None:
                    before(0)
                x = (
                    inputs[0]
                    if stage == 0
                    else torch.zeros(found[stage].shape, dtype=found[stage].dtype, device=device)
                )
                y = _trial(stages[stage], x, rank, stage)
                if not isinstance(y, Tensor) or y.dtype not in _DTYPES or y.dim() > _LONGEST:
                    raise StrettoError(
                        f"stage {stage} returns {_told(y)}",
                        hint=f"stages hand over one floating-point tensor of at most {_LONGEST} dimensions",
                    )
                found[stage + 1] = Boundary(tuple(y.shape), y.dtype)
                if there != here:
                    assert transfer is not None
                    transfer.send(_pack(found[stage + 1], device), (here, there, FORWARD)).wait()
            elif rank == there:
                assert transfer is not None
                message = torch.empty(_LONGEST + 2, dtype=torch.int64, device=device)
                transfer.receive(message, (here, there, FORWARD)).wait()
                found[stage + 1] = _unpack(message)
    return found


def _trial(module: nn.Module, x: Any, rank: int, stage: int) -> object:
    """The stage's output in evaluation mode, so that running averages stay as they are."""
    was = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return module(x)
    except Exception as error:
        raise PipelineError(f"pipeline rank {rank} in the trial forward of stage {stage}: {error}") from error
    finally:
        for part, mode in was:
            part.training = mode


def _pack(boundary: Boundary, device: torch.device) -> Tensor:
    numbers = [_DTYPES.index(boundary.dtype), len(boundary.shape), *boundary.shape]
    return torch.tensor(numbers + [0] * (_LONGEST + 2 - len(numbers)), dtype=torch.int64, device=device)


def _unpack(message: Tensor) -> Boundary:
    code, dims, *shape = (int(n) for n in message.tolist())
    return Boundary(tuple(shape[:dims]), _DTYPES[code])


def _told(y: object) -> str:
    return (
        f"a {y.dtype} tensor of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
    )
