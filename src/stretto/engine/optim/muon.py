"""Muon (Jordan et al. 2024; scaled as in Liu et al. 2025, Muon is Scalable for LLM Training, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stretto.engine.device import compute_capability, on_accelerator
from stretto.engine.optim.base import (
    FragmentOptimizer,
    Group,
    TensorGroup,
    depth_of,
    member_shape,
    members_of,
)
from stretto.engine.optim.tensor_sums import sendable
from stretto.engine.parallel.collectives import start_exchange, start_gather
from stretto.engine.parallel.fragment import ParameterFragment
from stretto.engine.parallel.tensor.matmul import product as matrix_product


class MatrixPart(NamedTuple):
    """A rank's part of one matrix."""

    tensor: int  # index of its fragment
    piece: int  # index of its piece in the fragment
    member: tuple[int, ...]  # index in the stack
    offsets: tuple[int, ...]  # in the matrix
    sizes: tuple[int, ...]
    owned: bool

    @property
    def matrix(self) -> tuple[int, tuple[int, ...]]:
        return self.tensor, self.member

    def of(self, matrix: Tensor) -> Tensor:
        """Return the box as a view of its matrix."""
        return matrix[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))]


class MatrixExchange:
    """Gathers each matrix on one of the holders of some fragments, and scatters the results back.

    Matrices are assigned greedily: the most expensive first, each to the least loaded rank; the cost is rows
    x columns x the smaller of the two. Every rank computes the same assignment from all ranks' boxes, which
    are gathered by the constructor: collective over the holders.

    Args:
        fragments: matrices or stacks of matrices with the same `holders`.
    """

    def __init__(self, fragments: Sequence[ParameterFragment]) -> None:
        self._fragments = fragments
        self._group: ProcessGroup | None = fragments[0].holders
        self._rank = 0 if self._group is None else self._group.rank()
        self._boxes = _boxes_of_all(fragments, self._group)
        costs = dict[tuple[int, tuple[int, ...]], int]()
        present = {box.matrix for boxes in self._boxes for box in boxes}
        for i, fragment in enumerate(self._fragments):
            rows, columns = member_shape(fragment)
            for member in product(*map(range, members_of(fragment))):
                if (i, member) in present:  # under a parameter server, other ranks hold no elements
                    costs[i, member] = rows * columns * min(rows, columns)
        loads, owners = [0] * len(self._boxes), dict[tuple[int, tuple[int, ...]], int]()
        for matrix in sorted(costs, key=lambda m: -costs[m]):
            owners[matrix] = loads.index(min(loads))
            loads[owners[matrix]] += costs[matrix]
        n = range(len(self._boxes))
        assigned = [[b for b in boxes if owners[b.matrix] == self._rank] for boxes in self._boxes]
        self._arriving = [[b for b in boxes if b.owned] for boxes in assigned]  # by sender
        self._leaving_back = assigned  # by receiver: copies that are not owned also get their part
        boxes_here = self._boxes[self._rank]
        self._leaving = [[b for b in boxes_here if b.owned and owners[b.matrix] == rank] for rank in n]
        self._arriving_back = [[b for b in boxes_here if owners[b.matrix] == rank] for rank in n]
        self._matrices = [matrix for matrix, owner in owners.items() if owner == self._rank]

    def gather(self, tensors: Sequence[Tensor]) -> dict[tuple[int, tuple[int, ...]], Tensor]:
        """Send this rank's part of every tensor, in its local shape; return the matrices assigned to this
        rank.
        """
        received = self._move(
            [self._view(b, tensors) for part in self._leaving for b in part], tensors[0], back=False
        )
        matrices = {
            matrix: tensors[0].new_zeros(member_shape(self._fragments[matrix[0]]))
            for matrix in self._matrices
        }
        for box, values in zip((b for part in self._arriving for b in part), received, strict=True):
            box.of(matrices[box.matrix]).copy_(values.reshape(box.sizes))
        return matrices

    def scatter(self, matrices: dict[tuple[int, tuple[int, ...]], Tensor], tensors: Sequence[Tensor]) -> None:
        """Scatter the results into every rank's part of the tensors; padding is unchanged."""
        leaving = [b.of(matrices[b.matrix]) for part in self._leaving_back for b in part]
        received = self._move(leaving, tensors[0], back=True)
        for box, values in zip((b for part in self._arriving_back for b in part), received, strict=True):
            self._view(box, tensors).copy_(values.reshape(box.sizes))

    def _view(self, box: MatrixPart, tensors: Sequence[Tensor]) -> Tensor:
        fragment = self._fragments[box.tensor]
        piece = fragment.placed.pieces[box.piece]
        local_member = tuple(m - o for m, o in zip(box.member, piece.offsets, strict=False))
        return piece.of_local(tensors[box.tensor])[local_member]

    def _move(self, views: Sequence[Tensor], like: Tensor, back: bool) -> Sequence[Tensor]:
        """Run one all-to-all of the views, which are ordered by receiver; return the received ones, ordered
        by sender. Alone, these are the views.
        """
        if self._group is None:
            return views
        flat = torch.cat([v.reshape(-1) for v in views]) if views else like.new_empty(0)
        send, receive = (self._leaving_back, self._arriving_back) if back else (self._leaving, self._arriving)
        flat = sendable(flat, self._group)
        out, work = start_exchange(flat, _elements(send), _elements(receive), self._group)
        work.wait()
        return out.to(like.device).split([prod(box.sizes) for part in receive for box in part])


def _elements(parts: Sequence[Sequence[MatrixPart]]) -> list[int]:
    return [sum(prod(box.sizes) for box in part) for part in parts]


def _boxes(tensor: int, fragment: ParameterFragment) -> list[MatrixPart]:
    """Return this rank's boxes of one fragment."""
    depth = depth_of(fragment)
    return [
        MatrixPart(
            tensor=tensor,
            piece=i,
            member=member,
            offsets=piece.offsets[depth:],
            sizes=piece.sizes[depth:],
            owned=piece.owned or fragment.holders is None,
        )
        for i, piece in enumerate(fragment.placed.pieces)
        for member in product(
            *(range(o, o + n) for o, n in zip(piece.offsets[:depth], piece.sizes[:depth], strict=True))
        )
    ]


def _boxes_of_all(
    fragments: Sequence[ParameterFragment], group: ProcessGroup | None
) -> list[list[MatrixPart]]:
    """Return every holder's boxes. They are gathered as integers, one row for each box: tensor, piece, owned,
    offsets, sizes, and the member, padded to the deepest stack.
    """
    local_boxes = [box for i, fragment in enumerate(fragments) for box in _boxes(i, fragment)]
    if group is None:
        return [local_boxes]
    depths = [depth_of(fragment) for fragment in fragments]
    device = sendable(fragments[0].parameter.detach()[:0], group).device
    width = 7 + max(depths)
    rows = [
        [b.tensor, b.piece, b.owned, *b.offsets, *b.sizes, *b.member, *[0] * (width - 7 - len(b.member))]
        for b in local_boxes
    ]
    counts, work = start_gather(torch.tensor([len(local_boxes)], device=device), group)
    work.wait()
    lengths = counts.flatten().tolist()
    table = torch.zeros((max(lengths), width), dtype=torch.int64, device=device)
    if rows:
        table[: len(rows)] = torch.tensor(rows, device=device)
    tables, work = start_gather(table, group)
    work.wait()
    return [
        [
            MatrixPart(
                tensor=row[0],
                piece=row[1],
                member=tuple(row[7 : 7 + depths[row[0]]]),
                offsets=(row[3], row[4]),
                sizes=(row[5], row[6]),
                owned=bool(row[2]),
            )
            for row in part[:length]
        ]
        for part, length in zip(tables.tolist(), lengths, strict=True)
    ]


STACKED = 1 << 27  # elements of equal matrices that an accelerator orthogonalises together
STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0; values end in about [0.7, 1.2]
SMALLEST = 1e-7  # lower bound of the norm in the denominator
RMS = 0.2  # RMS of an update's elements, about AdamW's (Liu et al. 2025, equation 4)


class Muon(FragmentOptimizer):
    """Orthogonalised momentum for the blocks' matrices; the torch optimiser `fallback` updates all others.

    With momentum b, in Nesterov's form, m <- b m + (1 - b) g and

        w <- (1 - lr decay) w - 0.2 lr sqrt(max(rows, columns)) orthogonal((1 - b) g + b m)

    Each expert of a stack counts as a matrix. A matrix that ranks share is gathered on one of its holders,
    orthogonalised there and scattered back: two all-to-alls per step for each group of holders. Copies of a
    tensor, as on data-parallel ranks without sharded states, repeat the work.

    States: `momentum_buffer`, of the fragment's shape, or those of `fallback`.
    """

    def __init__(
        self,
        groups: list[Group],
        fragments: Iterable[ParameterFragment],
        lr: float,
        momentum: float,
        fallback: torch.optim.Optimizer | None,
    ) -> None:
        super().__init__(groups, fragments, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self.fallback = fallback
        if fallback is not None:  # callers see one optimiser, with the groups and states of both
            self.param_groups += fallback.param_groups
            fallback.state = self.state
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}

    def new_state(self, fragment: ParameterFragment) -> dict[str, Tensor]:
        """Return a zero momentum."""
        return {"momentum_buffer": torch.zeros_like(fragment.parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore
        """Run one update. Collective over the holders."""
        shared: dict[ProcessGroup, list[TensorGroup]] = {}
        for batch in self.begin():
            holders = batch.fragments[0].holders
            if holders is not None:
                shared.setdefault(holders, []).append(batch)
            else:
                self._update([batch])
        for batches in shared.values():
            self._update(batches)
        if self.fallback is not None:
            self.fallback.step()

    def _update(self, batches: Sequence[TensorGroup]) -> None:
        """Update fragments of the same holders."""
        updates = [_directions(batch) for batch in batches]
        fragments = [fragment for batch in batches for fragment in batch.fragments]
        flat = [update for of_batch in updates for update in of_batch]
        if all(map(_is_plain, fragments, flat)):
            shapes = [fragment.placed.shape[-2:] for fragment in fragments]
            orthogonalise([m for u, shape in zip(flat, shapes, strict=True) for m in u.view(-1, *shape)])
        else:
            key = tuple(map(id, fragments))
            if key not in self._exchanges:
                self._exchanges[key] = MatrixExchange(fragments)
            exchange = self._exchanges[key]
            gathered = exchange.gather(flat)
            orthogonalise(list(gathered.values()))
            exchange.scatter(gathered, flat)
        for batch, of_batch in zip(batches, updates, strict=True):
            lr = batch.group["lr"]
            torch._foreach_mul_(of_batch, [-RMS * lr * sqrt(max(member_shape(f))) for f in batch.fragments])
            torch._foreach_mul_(batch.parameters, 1.0 - lr * batch.group["weight_decay"])
            torch._foreach_add_(batch.parameters, of_batch)


def _is_plain(fragment: ParameterFragment, update: Tensor) -> bool:
    """True if the local tensor has all elements of the plain one, in its order."""
    placed = fragment.placed
    if fragment.holders is not None or update.numel() != prod(placed.shape) or not update.is_contiguous():
        return False
    pairs = [(piece.of_local(update), piece.of_full(update.view(placed.shape))) for piece in placed.pieces]
    return all(a.storage_offset() == b.storage_offset() and a.stride() == b.stride() for a, b in pairs)


def _directions(batch: TensorGroup) -> list[Tensor]:
    """Update the momenta; return their Nesterov form, in new memory."""
    momentum: float = batch.group["momentum"]
    buffers = batch.state("momentum_buffer")
    torch._foreach_lerp_(buffers, batch.gradients, 1.0 - momentum)
    return list(torch._foreach_lerp(batch.gradients, buffers, momentum))


def orthogonalise(matrices: Sequence[Tensor]) -> None:
    """Replace every matrix by its `orthogonal`, computed in the precision of `products_in`. On an
    accelerator, matrices of one shape are stacked, since single ones would not fill it.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
    for matrix in matrices:
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(matrix)
    for (shape, dtype, device), of_shape in alike.items():
        batch_size = max(1, STACKED // shape.numel()) if on_accelerator(device) else 1
        for first in range(0, len(of_shape), batch_size):
            batch = of_shape[first : first + batch_size]
            stack = torch.stack(batch) if len(batch) > 1 else batch[0]
            result = orthogonal(stack.to(products_in(device, dtype)))
            torch._foreach_copy_(batch, list(result.unbind()) if len(batch) > 1 else [result])


def products_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the precision of the iterations: bfloat16, as in Jordan et al. 2024, for float32 matrices on
    CUDA devices with such products (compute capability 8.0); otherwise the matrices' type.
    """
    fast = compute_capability(device) >= (8, 0)
    return torch.bfloat16 if fast and dtype == torch.float32 else dtype


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximate U V^T of the matrix U S V^T, or of each of a stack [..., rows, columns], by five
    Newton-Schulz iterations in the matrix's type: singular values above rounding error become 0.7 to 1.2.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp_(min=SMALLEST)
    for _ in range(STEPS):
        gram = matrix_product(x, x.mT)
        polynomial = matrix_product(gram, gram, factor=c, add=gram, weight=b)
        x = matrix_product(polynomial, x, add=x, weight=a)
    return x.mT if tall else x
