"""Collectives, and pairs of autograd operators that are each other's adjoint.

`copy_to` (identity forward, all-reduce backward) and `reduce_from` (all-reduce forward, identity backward)
are the f and g of Shoeybi et al. 2019, section 3; `gather_from` (all-gather, reduce-scatter) and `scatter_to`
(reduce-scatter, all-gather) are the g and its conjugate of Korthikanti et al. 2022, section 4.2.2.

If the group is None, this rank is alone and nothing is sent. Process groups are called directly, since
torch's wrappers cost as much as a small message. The result of a `start_...` is complete after its
`work.wait()`, which on CUDA makes the current stream wait, not the host; until then the input must not be
modified.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    Work,
)

from stretto.engine.parallel.traffic import counted_as

_SUM = AllreduceOptions()
_SUM.reduceOp = ReduceOp.SUM  # pyright: ignore[reportAttributeAccessIssue]
_MAX = AllreduceOptions()
_MAX.reduceOp = ReduceOp.MAX  # pyright: ignore[reportAttributeAccessIssue]
_SCATTER = ReduceScatterOptions()
_EXCHANGE = AllToAllOptions()
# options by which `traffic` recognises the kind of collective that a call counts as
_REGATHER = counted_as("re-gather", AllgatherOptions())
_GATHER_BY_EXCHANGE = counted_as("all-gather", AllToAllOptions())
_SCATTER_BY_EXCHANGE = counted_as("reduce-scatter", AllToAllOptions())


class Pending(Protocol):
    """A communication in progress."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        pass


DONE: Pending = _Done()


# ---------------------------------------------------------------------- sums in place


def start_sum(tensor: Tensor, group: ProcessGroup) -> Work:
    """Start an in-place sum over the group."""
    return group.allreduce([tensor], _SUM)


def all_sum(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over the group, in place; returns the tensor."""
    if group is not None:
        start_sum(tensor, group).wait()
    return tensor


def all_max(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Elementwise maximum over the group, in place; returns the tensor."""
    if group is not None:
        group.allreduce([tensor], _MAX).wait()
    return tensor


def start_broadcast(tensor: Tensor, root: int, group: ProcessGroup) -> Work:
    """Start overwriting the tensor with that of rank `root` of the group."""
    options = BroadcastOptions()
    options.rootRank = root
    return group.broadcast([tensor], options)


def start_sum_at(tensor: Tensor, root: int, group: ProcessGroup) -> Work:
    """Start a sum over the group, in place on its rank `root`; other ranks' tensors become undefined."""
    options = ReduceOptions()
    options.reduceOp = ReduceOp.SUM  # pyright: ignore[reportAttributeAccessIssue]
    options.rootRank = root
    return group.reduce([tensor], options)


def _all_to_all(
    out: Tensor,
    x: Tensor,
    receive: Sequence[int],
    send: Sequence[int],
    group: ProcessGroup,
    options: AllToAllOptions = _EXCHANGE,
) -> Work:
    """Exchange rows with every rank; `receive` and `send` are row counts, empty if all are equal."""
    return group.alltoall_base(out, x.contiguous(), list(receive), list(send), options)


# ---------------------------------------------------------------------- pieces, one per rank


def join(pieces: Tensor, dim: int) -> Tensor:
    """Concatenate pieces [n, ...] along `dim` of each; without a copy if strides allow."""
    dim %= pieces.dim() - 1
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def cut(x: Tensor, n: int, dim: int) -> Tensor:
    """Cut x into n equal pieces along `dim`: [n, ...], contiguous; without a copy if strides allow."""
    dim %= x.dim()
    return x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()


def local_part(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return this rank's part of x along `dim`, as a view."""
    size = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * size, size)


# ---------------------------------------------------------------------- all-gather, reduce-scatter


def start_gather(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Pending]:
    """Start gathering every rank's x, all of one shape, into pieces [n, *x.shape], by rank."""
    if group is None:
        return x.unsqueeze(0), DONE
    pieces = x.new_empty((group.size(), *x.shape))
    return pieces, group._allgather_base(
        pieces.view(-1), x.contiguous().view(-1)
    )  # gloo requires flat shapes


def start_gather_into(full: Tensor, part: Tensor, group: ProcessGroup) -> Work:
    """Start gathering the flat parts of all ranks, by rank; `part` may be this rank's part of `full`."""
    return group._allgather_base(full, part)


def start_regather(x: Tensor, group: ProcessGroup) -> tuple[Tensor, Pending]:
    """`start_gather` in the backward, for a tensor that the forward has already gathered; `traffic` counts it
    separately.
    """
    pieces = x.new_empty((group.size(), *x.shape))
    return pieces, group._allgather_base(pieces.view(-1), x.contiguous().view(-1), _REGATHER)


def gather(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Concatenate every rank's x along `dim` by rank."""
    if group is None:
        return x
    pieces, work = start_gather(x, group)
    work.wait()
    return join(pieces, dim)


_native = list[bool]()  # not empty while CPU tensors simulate an accelerator's (dry runs)


@contextmanager
def native_collectives() -> Generator[None]:
    """Within this context, reduce-scatters use the backend's collective on CPUs too."""
    _native.append(True)
    try:
        yield
    finally:
        _native.pop()


class _SumOnArrival:
    """A reduce-scatter by all-to-all: the received pieces are summed in `wait`."""

    def __init__(self, work: Work, arriving: Tensor, out: Tensor) -> None:
        self._work = work
        self._arriving = arriving
        self._out = out

    def wait(self) -> None:
        self._work.wait()
        if len(self._arriving) == 2:
            torch.add(self._arriving[0], self._arriving[1], out=self._out)
        else:
            torch.sum(self._arriving, 0, out=self._out)


def start_scatter_sum(
    pieces: Tensor, group: ProcessGroup | None, out: Tensor | None = None
) -> tuple[Tensor, Pending]:
    """Start summing pieces [n, ...] over the ranks; rank i gets the sum of piece i.

    On CPUs this is an all-to-all, since gloo implements reduce-scatter as an all-reduce of twice the bytes.

    Args:
        out: memory for the result, which may be this rank's piece of `pieces`; by default new memory.
    """
    if group is None:
        return pieces.squeeze(0), DONE
    if out is None:
        out = pieces.new_empty(pieces.shape[1:])
    if _native or pieces.device.type != "cpu":
        return out, group._reduce_scatter_base(out.view(-1), pieces.contiguous().view(-1), _SCATTER)
    arriving = torch.empty_like(pieces, memory_format=torch.contiguous_format)
    return out, _SumOnArrival(
        _all_to_all(out=arriving, x=pieces, receive=[], send=[], group=group, options=_SCATTER_BY_EXCHANGE),
        arriving,
        out,
    )


def scatter_sum(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Return this rank's part, along `dim`, of the sum of x over the ranks."""
    if group is None:
        return x
    out, work = start_scatter_sum(cut(x, group.size(), dim), group)
    work.wait()
    return out


# ---------------------------------------------------------------------- rows in uneven numbers


def start_exchange(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup | None
) -> tuple[Tensor, Pending]:
    """Start an all-to-all of rows: the first send[0] rows of x [sum(send), ...] go to rank 0, and so on; the
    result [sum(receive), ...] is ordered by sender.
    """
    if group is None:
        return x, DONE
    out = x.new_empty((sum(receive), *x.shape[1:]))
    return out, _all_to_all(out, x, receive, send, group)


def start_gather_uneven(
    x: Tensor, sizes: Sequence[int], group: ProcessGroup | None
) -> tuple[Tensor, Pending]:
    """Start gathering x along dimension 0, in which rank i has sizes[i] rows."""
    if group is None:
        return x, DONE
    n = group.size()
    out = x.new_empty((sum(sizes), *x.shape[1:]))
    copies = x.expand(n, *x.shape).flatten(0, 1)
    return out, _all_to_all(
        out=out, x=copies, receive=sizes, send=[len(x)] * n, group=group, options=_GATHER_BY_EXCHANGE
    )


def start_scatter_sum_uneven(
    x: Tensor, sizes: Sequence[int], group: ProcessGroup | None
) -> tuple[Tensor, Pending]:
    """Start summing x [sum(sizes), ...] over the ranks; rank i gets sizes[i] rows of the sum."""
    if group is None:
        return x, DONE
    n, own_rows = group.size(), sizes[group.rank()]
    arriving = x.new_empty((n, own_rows, *x.shape[1:]))
    out = x.new_empty((own_rows, *x.shape[1:]))
    work = _all_to_all(
        out=arriving.flatten(0, 1),
        x=x,
        receive=[own_rows] * n,
        send=sizes,
        group=group,
        options=_SCATTER_BY_EXCHANGE,
    )
    return out, _SumOnArrival(work, arriving, out)


def _exchanged_parts(x: Tensor, group: ProcessGroup, dims: tuple[int, int]) -> Tensor:
    gathered, split = dims
    pieces = cut(x, group.size(), split)
    out = torch.empty_like(pieces)
    _all_to_all(out=out, x=pieces, receive=[], send=[], group=group).wait()
    return join(out, gathered)


def _complete(started: tuple[Tensor, Pending]) -> Tensor:
    out, work = started
    work.wait()
    return out


# ---------------------------------------------------------------------- with gradients


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return all_sum(grads[0].contiguous().clone(), ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_sum(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


_Move = Callable[[Tensor, ProcessGroup, int], Tensor]


class _Conjugate(torch.autograd.Function):
    """One collective forward, its adjoint backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: ProcessGroup, dim: int, forward_move: _Move, backward_move: _Move
    ) -> Tensor:
        ctx.adjoint = group, dim, backward_move
        return forward_move(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        group, dim, backward_move = ctx.adjoint
        return backward_move(grads[0], group, dim), None, None, None, None


def _local_copy(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Return a copy of this rank's part of x along `dim`."""
    return local_part(x, group, dim).clone(memory_format=torch.contiguous_format)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        ctx.send = send
        ctx.receive = receive
        ctx.group = group
        return _complete(start_exchange(x, send, receive, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _complete(start_exchange(grads[0], ctx.receive, ctx.send, ctx.group)), None, None, None


class _ExchangeParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, gathered: int, split: int) -> Tensor:
        ctx.adjoint = group, (split, gathered)
        return _exchanged_parts(x, group, (gathered, split))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return _exchanged_parts(grads[0], *ctx.adjoint), None, None, None


class _GatherUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _complete(start_gather_uneven(x, sizes, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _complete(start_scatter_sum_uneven(grads[0], ctx.sizes, ctx.group)), None, None


class _ScatterUneven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _complete(start_scatter_sum_uneven(x, sizes, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _complete(start_gather_uneven(grads[0], ctx.sizes, ctx.group)), None, None


def copy_to(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """f: a replicated tensor enters a tensor-parallel region."""
    return x if group is None else cast(Tensor, _CopyTo.apply(x, group))


def reduce_from(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """g: partial results leave a tensor-parallel region as their sum."""
    return x if group is None else cast(Tensor, _ReduceFrom.apply(x, group))


def gather_from(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """All-gather along `dim` of a tensor that ranks then use differently: each has a part of the gradient, so
    the backward is a reduce-scatter.
    """
    return x if group is None else cast(Tensor, _Conjugate.apply(x, group, dim, gather, scatter_sum))


def gather_copy(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """All-gather along `dim` of a tensor that all ranks then use alike: each has the full gradient, so the
    backward takes this rank's part.
    """
    return x if group is None else cast(Tensor, _Conjugate.apply(x, group, dim, gather, _local_copy))


def scatter_to(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Return this rank's part, along `dim`, of the sum of partial results: reduce-scatter forward, all-gather
    backward.
    """
    return x if group is None else cast(Tensor, _Conjugate.apply(x, group, dim, scatter_sum, gather))


def slice_to(x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:
    """Return this rank's part, along `dim`, of a replicated tensor; all-gather backward."""
    return x if group is None else cast(Tensor, _Conjugate.apply(x, group, dim, _local_copy, gather))


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """All-to-all of rows, and of their gradients in reverse; see `start_exchange`."""
    return x if group is None else cast(Tensor, _Exchange.apply(x, send, receive, group))


def exchange_parts(x: Tensor, group: ProcessGroup | None, gathered: int, split: int) -> Tensor:
    """Turn parts of x along dimension `gathered` into parts along dimension `split`: all-to-all forward and
    backward.
    """
    return x if group is None else cast(Tensor, _ExchangeParts.apply(x, group, gathered, split))


def gather_uneven(x: Tensor, sizes: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """All-gather along dimension 0, in which rank i has sizes[i] rows; reduce-scatter backward."""
    return x if group is None else cast(Tensor, _GatherUneven.apply(x, sizes, group))


def scatter_uneven(x: Tensor, sizes: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Sum x [sum(sizes), ...] over the ranks; rank i gets sizes[i] rows of the sum; all-gather backward."""
    return x if group is None else cast(Tensor, _ScatterUneven.apply(x, sizes, group))
