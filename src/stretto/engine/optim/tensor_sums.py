"""Sums over full tensors of the plain model, whose boxes are on several ranks (the holders)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import moved
from stretto.engine.optim.base import TensorGroup, counted_pieces
from stretto.engine.parallel.collectives import start_sum
from stretto.engine.parallel.fragment import ParameterFragment, TensorBox

RUN = 1024  # elements whose squares are added in the tensors' own type


def stack_slice(piece: TensorBox, depth: int) -> tuple[slice, ...]:
    """Return the index of the stack members that the box covers."""
    return tuple(slice(o, o + n) for o, n in zip(piece.offsets[:depth], piece.sizes[:depth], strict=True))


def round_robin(batches: Sequence[TensorGroup], updates: Sequence[Iterator[Tensor]]) -> None:
    """Run the updates of several batches in lockstep, so that their all-reduces are shared.

    Args:
        updates: a generator per batch; each float64 tensor it yields, of the same shape on all holders, is
            summed in place over the holders of the batch.
    """
    for tensors in zip(*updates, strict=True):
        sum_over_holders((b.fragments[0], tensor) for b, tensor in zip(batches, tensors, strict=True))


def sum_over_holders(parts: Iterable[tuple[ParameterFragment, Tensor]]) -> None:
    """Sum each float64 tensor in place over the holders of its fragment, with one all-reduce per group.

    A tensor has the same shape on all its holders.
    """
    by_group: dict[ProcessGroup, list[Tensor]] = {}
    for fragment, tensor in parts:
        if fragment.holders is not None:
            by_group.setdefault(fragment.holders, []).append(tensor)
    packed = [sendable(torch.cat([t.flatten() for t in ts]), group) for group, ts in by_group.items()]
    started = [start_sum(flat, group) for flat, group in zip(packed, by_group, strict=True)]
    for tensors, flat, work in zip(by_group.values(), packed, started, strict=True):
        work.wait()
        for tensor, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def sendable(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tensor on a device that the group can send from.

    With NCCL, offloaded fragments are on the host and must be copied first.
    """
    devices = group._device_types
    return tensor if any(d.type == tensor.device.type for d in devices) else moved(tensor, devices[0])


def is_whole(fragment: ParameterFragment) -> bool:
    """True if the local tensor is the full tensor of the plain model, in the plain model's shape."""
    pieces, shape = fragment.placed.pieces, fragment.placed.shape
    complete = len(pieces) == 1 and pieces[0].strides is None and pieces[0].sizes == shape
    return complete and fragment.holders is None and tuple(fragment.parameter.shape) == shape


def member_squares(batch: TensorGroup, tensors: list[Tensor]) -> Tensor:
    """Return this rank's sum of squares of every member of the fragments' stacks, concatenated, in float64.

    Only counted elements are included; the result is not yet summed over the holders.

    Args:
        tensors: one per fragment, of its local shape.
    """
    if batch.plain and tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors)).double().square_()
    sums = list[Tensor]()
    for fragment, tensor, shape in zip(batch.fragments, tensors, batch.members, strict=True):
        pieces, depth = counted_pieces(fragment), len(shape)
        if not shape and len(pieces) == len(fragment.placed.pieces):  # padding is zero
            sums.append(_sum_of_squares(tensor).view(1))
            continue
        total = torch.zeros(shape, dtype=torch.float64, device=tensor.device)
        for piece in pieces:
            view = piece.of_local(tensor)
            rows = view if view.dim() == depth + 2 else view.unsqueeze(depth)
            norms = torch.linalg.vector_norm(rows, dim=-1) if view.dim() > depth else rows.abs()
            total[stack_slice(piece, depth)] += norms.double().square_().sum(-1)
        sums.append(total.flatten())
    return torch.cat(sums)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    """Sum squares over runs of `RUN` elements, then in float64: one long float32 sum loses digits on a
    CPU.
    """
    flat = tensor.reshape(-1)
    even = flat.numel() // RUN * RUN
    norms = torch.linalg.vector_norm(flat[:even].view(-1, RUN), dim=1)
    return torch.cat([norms, torch.linalg.vector_norm(flat[even:]).view(1)]).double().square_().sum()


def by_fragment(batch: TensorGroup, members: Tensor) -> list[Tensor]:
    """Split the result of `member_squares` into a view per fragment, in the shape of its stack: () for a
    single tensor.
    """
    parts, lead = members.split([prod(shape) for shape in batch.members], -1), members.shape[:-1]
    return [part.view((*lead, *shape)) for part, shape in zip(parts, batch.members, strict=True)]


def subtract_scaled(batch: TensorGroup, updates: Sequence[Tensor], factors: Tensor) -> None:
    """Subtract factor x update from the parameters.

    Args:
        factors: one per member, in the order of `member_squares`, on the device: nothing is read to the host.
    """
    factors = factors.to(batch.parameters[0].dtype)
    if not any(batch.members):
        torch._foreach_addcmul_(batch.parameters, list(updates), list(factors), value=-1.0)
        return
    each = by_fragment(batch, factors)
    for fragment, update, factor in zip(batch.fragments, updates, each, strict=True):
        depth = factor.dim()
        if not depth:
            fragment.parameter.addcmul_(update, factor, value=-1.0)
            continue
        for piece in fragment.placed.pieces:
            view, of_piece = piece.of_local(update), factor[stack_slice(piece, depth)]
            of_piece = of_piece.reshape((*of_piece.shape, *(1,) * (view.dim() - depth)))
            piece.of_local(fragment.parameter).addcmul_(view, of_piece, value=-1.0)
