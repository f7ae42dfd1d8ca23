"""Sums over whole tensors of the plain model, whose pieces are spread over their holders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.optim.base import depth_of, members_of
from stretto.engine.parallel.collectives import start_sum
from stretto.engine.parallel.fragment import Fragment, Piece


def counted_pieces(fragment: Fragment) -> tuple[Piece, ...]:
    """The pieces that this rank contributes to a sum over the holders, so that each element of the plain
    tensor counts once.
    """
    if fragment.holders is None:  # the whole tensor is here, even where another rank owns it
        return fragment.placed.pieces
    return tuple(piece for piece in fragment.placed.pieces if piece.owned)


def stack_slice(piece: Piece, depth: int) -> tuple[slice, ...]:
    """The members of the stack that the piece covers."""
    return tuple(slice(o, o + n) for o, n in zip(piece.offsets[:depth], piece.sizes[:depth], strict=True))


def sum_over_holders(parts: Iterable[tuple[Fragment, Tensor]]) -> None:
    """Sum each tensor over the holders of its fragment, in place, with one all-reduce for each group of
    holders. The tensors are float64, of the same shape on all holders.
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
    """The tensor on a device that the group can send from: offloaded fragments of NCCL ranks are on
    the host.
    """
    devices = group._device_types
    return tensor if any(d.type == tensor.device.type for d in devices) else tensor.to(devices[0].type)


def member_squares(fragments: Sequence[Fragment], tensors: Sequence[Tensor]) -> list[Tensor]:
    """For each fragment, the sum of squares of the counted elements of its local tensor: float64, of the
    shape of the stack (() for a single tensor), not yet summed over the holders.
    """
    totals = [torch.zeros(members_of(f), dtype=torch.float64, device=f.parameter.device) for f in fragments]
    views, into = list[Tensor](), list[Tensor]()
    for fragment, tensor, total in zip(fragments, tensors, totals, strict=True):
        depth, pieces = depth_of(fragment), counted_pieces(fragment)
        if depth == 0 and len(pieces) == len(fragment.placed.pieces):
            views.append(tensor)  # with its padding, which is zero
            into.append(total)
            continue
        for piece in pieces:
            view = piece.of_local(tensor)
            if depth:
                norms = torch.linalg.vector_norm(view, dim=tuple(range(depth, view.dim())))
                total[stack_slice(piece, depth)] += norms.double().square_()
            else:
                views.append(view)
                into.append(total)
    if views:
        for total, norm in zip(into, torch.stack(torch._foreach_norm(views)).double().square_(), strict=True):
            total += norm
    return totals


def subtract_scaled(fragment: Fragment, update: Tensor, factor: Tensor) -> None:
    """Subtract factor x update from the parameter; `factor` has the shape of the stack."""
    depth, parameter = depth_of(fragment), fragment.parameter
    factor = factor.to(parameter.dtype)
    if not depth:
        parameter.addcmul_(update, factor, value=-1.0)  # a tensor factor: nothing is read back to the host
        return
    for piece in fragment.placed.pieces:
        view = piece.of_local(update)
        each = factor[stack_slice(piece, depth)]
        each = each.reshape(*each.shape, *(1,) * (view.dim() - depth))
        piece.of_local(parameter).addcmul_(view, each, value=-1.0)
