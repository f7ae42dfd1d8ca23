"""Outputs of modules beside those of the plain model: which is the first that differs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.engine.parallel.control import gather_json
from stretto.engine.parallel.tensor.sequence import SequenceSplit
from stretto.prove.compare import share

Outputs = dict[str, Tensor]
Beside = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]
_SAME = 1e-9


@contextmanager
def recorded(modules: Iterable[tuple[str, nn.Module]]) -> Generator[Outputs]:
    """The first output of each module while in the `with`, by name, in the order of computing."""
    outputs = Outputs()

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and name not in outputs:
                outputs[name] = output.detach().clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules if name]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_difference(ours: Outputs, reference: Outputs | None, beside: Beside) -> str | None:
    """Name of the first module whose output differs; None when none does. Collective over the default group.

    Args:
        ours: outputs of the first microbatch; none on ranks that compute other samples.
        reference: the plain model's for the same samples; on rank 0.
        beside: this rank's output and the same part of the plain model's whole one; None where they cannot
            be laid side by side. Those are passed over: the module that brings them together is looked at.
    """
    named = None if reference is None else [(name, list(t.shape)) for name, t in reference.items()]
    order: list[tuple[str, list[int]]] = gather_json(named)[0]
    first = torch.tensor(len(order))
    for at, (name, shape) in enumerate(order):
        whole = share(None if reference is None else reference[name], tuple(shape))
        pair = beside(ours[name], whole) if name in ours else None
        if pair is not None and pair[0].numel():
            error = (pair[0] - pair[1]).abs().max() / whole.abs().max().clamp(min=_SAME)
            if not bool(error <= _SAME):
                first = torch.minimum(first, torch.tensor(at))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(first, dist.ReduceOp.MIN)
    return order[int(first)][0] if int(first) < len(order) else None


def beside_positions(mine: Tensor, whole: Tensor, split: SequenceSplit) -> tuple[Tensor, Tensor] | None:
    """This rank's output and the same part of the plain model's, without padding; None where it is split
    otherwise than along the sequence, or has no dimension of samples and positions.
    """
    if mine.dim() != whole.dim() or mine.dim() < 3:
        return None
    if mine.shape == whole.shape:
        return mine, whole
    unequal = [dim for dim, size in enumerate(whole.shape) if mine.shape[dim] != size]
    if len(unequal) != 1 or whole.shape[dim := unequal[0]] != split.length:
        return None
    for positions in (split.shard, split.positions):
        if len(positions) == mine.shape[dim]:
            real = positions < split.length
            return mine.index_select(dim, real.nonzero().flatten()), whole.index_select(dim, positions[real])
    return None
