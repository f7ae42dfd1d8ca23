"""Shape inference: one trial forward determines the shapes of the activations between stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stretto.engine.device import forked_random
from stretto.engine.parallel.collectives import all_sum
from stretto.engine.pipeline.exchange import FORWARD, HEADER, Transfer, boundaries_of, pack, unpack
from stretto.engine.pipeline.executor import PipelineError, error_text
from stretto.engine.pipeline.rank_buffers import Boundaries
from stretto.errors import StrettoError
from stretto.program.program import Program


@torch.no_grad()
def probe_boundaries(
    program: Program,
    rank: int,
    stages: Mapping[int, nn.Module],
    transfer: Transfer | None,
    inputs: Sequence[Any],
    before: Callable[[int], None] | None,
    group: ProcessGroup | None,
    device: torch.device,
) -> dict[int, Boundaries]:
    """Return the boundaries before every stage of the model but the first, by stage, the same on all ranks of
    the pipeline (`group`). Collective.

    Runs the first microbatch through the first copy of the model, in evaluation mode, and restores the random
    state. Only shapes cross ranks; later stages compute on zeros.

    Raises:
        PipelineError: a stage's forward failed.
        StrettoError: a stage returns other values than tensors, or no floating-point tensor.
    """
    entering = dict[int, Boundaries]()
    with forked_random([device]):
        for stage in range(program.depth - 1):
            sender, receiver = program.placement[stage], program.placement[stage + 1]
            if rank == sender:
                if before is not None:
                    before(0)
                x = inputs[0]
                if stage:
                    x = tuple(torch.zeros(b.shape, dtype=b.dtype, device=device) for b in entering[stage])
                y = _trial(stages[stage], x if type(x) is tuple else (x,), rank, stage)
                results = y if isinstance(y, tuple) else (y,)
                tensors = [t for t in results if isinstance(t, Tensor)]
                if len(tensors) < len(results) or not any(t.is_floating_point() for t in tensors):
                    raise StrettoError(
                        f"stage {stage} returns {' and '.join(map(_describe, results)) or 'nothing'}",
                        hint="stages return tensors, at least one of them floating-point",
                    )
                entering[stage + 1] = boundaries_of(tuple(tensors))
                if receiver != sender:
                    assert transfer is not None
                    transfer.send(pack(entering[stage + 1], device), (sender, receiver, FORWARD)).wait()
            elif rank == receiver:
                assert transfer is not None
                message = torch.empty(HEADER, dtype=torch.int64, device=device)
                transfer.receive(message, (sender, receiver, FORWARD)).wait()
                entering[stage + 1] = unpack(message)
    if group is None or program.depth == 1:
        return entering
    # a rank may hold a later copy of a stage whose first copy is on another rank
    table = torch.zeros(program.depth - 1, HEADER, dtype=torch.int64, device=device)
    for stage, boundaries in entering.items():
        if program.placement[stage - 1] == rank:
            table[stage - 1] = pack(boundaries, device)
    return {stage + 1: unpack(row) for stage, row in enumerate(all_sum(table, group))}


def _trial(module: nn.Module, x: tuple[Any, ...], rank: int, stage: int) -> object:
    """Return the stage's output in evaluation mode, in which running averages do not change."""
    was = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return module(*x)
    except StrettoError:
        raise
    except Exception as error:
        raise PipelineError(
            f"pipeline rank {rank} in the trial forward of stage {stage}: {error_text(error)}"
        ) from error
    finally:
        for part, mode in was:
            part.training = mode


def _describe(y: object) -> str:
    return (
        f"a {y.dtype} tensor of shape {tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
    )
