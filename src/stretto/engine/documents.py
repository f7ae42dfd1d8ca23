"""Samples that are filled with several documents: attention stays inside each, positions begin anew in each.

The tokens of a document are contiguous, so attention inside documents is plain causal attention of slices:
no mask is made, and what lies between documents is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from stretto.engine.device import moved
from stretto.engine.kernels import AttentionTile, Band, FlashAttention, Kernel, PackedRuns, exact_type

T = TypeVar("T")
Run = tuple[int, int, int]  # the position at which its document begins, first index, and the index after


class DocumentStarts:
    """The documents of the samples of one microbatch.

    Args:
        begins: int64 [b, s] on the CPU: for each position the one at which its document begins.
    """

    def __init__(self, begins: Tensor) -> None:
        self.begins = begins
        self.length = begins.shape[1]
        self._kept = dict[Any, Any]()

    def kept(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returned for this key first: all layers of a model need the same."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def positions(self, at: Tensor | None, device: torch.device) -> Tensor:
        """Positions within their documents, int64 [b, n].

        Args:
            at: positions within the samples [n]; those after the last are padding. None: all.
        """

        def make() -> Tensor:
            real = torch.arange(self.length, device=device) if at is None else at.clamp(max=self.length - 1)
            return real - moved(self.begins, device)[:, real]

        return self.kept(("positions", id(at), device), make)

    def apart(self, n: int, device: torch.device) -> Tensor:
        """bool [b, 1, n, n]: whether two positions are in different documents."""
        of = moved(self._of(torch.arange(n)), device)
        return (of.unsqueeze(2) != of.unsqueeze(1)).unsqueeze(1)

    def first_keys(self, n: int, window: int | None, device: torch.device) -> Tensor:
        """int64 [b, n]: the first position that each of n positions sees in its document and the window."""
        first = moved(self._of(torch.arange(n)), device)
        if window is None:
            return first
        return torch.maximum(first, torch.arange(n, device=device) - (window - 1))

    def runs(self, at: Tensor) -> list[list[Run]]:
        """For each sample the documents of positions `at` [n], which ascend; int64 on the CPU."""
        of = self._of(at)
        cuts = of.diff(dim=1) != 0
        return [
            [
                (int(row[first]), first, last)
                for first, last in pairwise([0, *(cut.nonzero().flatten() + 1).tolist(), len(row)])
            ]
            for row, cut in zip(of, cuts, strict=True)
        ]

    def _of(self, at: Tensor) -> Tensor:
        """What identifies the documents of positions [n]: where they begin, [b, n]. Padding is taken to be of
        the last document, since it comes after it.
        """
        return self.begins[:, at.clamp(max=self.length - 1)]

    def inside(
        self, piece: AttentionTile, mine: Sequence[list[Run]], theirs: Sequence[list[Run]]
    ) -> list[AttentionTile]:
        """The parts of a piece of attention that are inside documents.

        Args:
            mine, theirs: the runs of all queries and of all keys, of which the piece takes some.
        """
        rows = dict[tuple[int, int, int, int], list[int]]()
        for row, (of_queries, of_keys) in enumerate(zip(mine, theirs, strict=True)):
            keys_of = {document: (first, last) for document, first, last in of_keys}
            for document, *queries in of_queries:
                if (keys := keys_of.get(document)) is None:
                    continue
                q, k = _common(piece.queries, *queries), _common(piece.keys, *keys)
                if q.start < q.stop and k.start < k.stop:
                    rows.setdefault((q.start, q.stop, k.start, k.stop), []).append(row)
        parts = list[AttentionTile]()
        for (*queries, first, last), members in rows.items():
            part = piece.part(slice(*queries), slice(first, last))
            if part is not None:
                parts += [part.of_rows(some) for some in _consecutive(members)]
        return parts

    def pieces(self, n: int, window: int | None) -> list[AttentionTile]:
        """All of the attention of n positions to themselves."""

        def make() -> list[AttentionTile]:
            whole, runs = AttentionTile(slice(0, n), slice(0, n), Band(0, window)), self.runs(torch.arange(n))
            return self.inside(whole, runs, runs)

        return self.kept(("pieces", n, window), make)

    def laid_end_to_end(self, n: int, device: torch.device) -> PackedRuns:
        """The documents as runs of the positions of all samples."""

        def make() -> PackedRuns:
            runs = [
                (row * n + first, row * n + last)
                for row, of in enumerate(self.runs(torch.arange(n)))
                for _, first, last in of
            ]
            cuts = torch.tensor([0, *(last for _, last in runs)], dtype=torch.int32)
            return PackedRuns(moved(cuts, device), max(last - first for first, last in runs))

        return self.kept(("runs", n, device), make)

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """As `Kernel.forward`, for causal attention of n positions inside self."""
        b, heads, n, _ = q.shape
        if isinstance(kernel, FlashAttention):
            return kernel.forward_runs(q, k, v, self.laid_end_to_end(n, q.device), window)
        y = q.new_empty(b, n, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(b, heads, n, dtype=exact_type(q.dtype))
        for piece in self.pieces(n, window):
            part = kernel.forward(piece.of_queries(q), piece.of_keys(k), piece.of_keys(v), piece.band)
            for whole, values in zip((y, lse), part, strict=True):
                piece.of_queries(whole).copy_(values)
        return y, lse

    def backward(
        self,
        kernel: Kernel,
        *,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        lse: Tensor,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Kernel.backward`, for causal attention of n positions inside self."""
        n = q.shape[2]
        if isinstance(kernel, FlashAttention):
            runs = self.laid_end_to_end(n, q.device)
            return kernel.backward_runs(dy=dy, q=q, k=k, v=v, y=y, lse=lse, runs=runs, window=window)
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        for piece in self.pieces(n, window):
            at, of = piece.of_queries, piece.of_keys
            grads = kernel.backward(
                dy=at(dy), q=at(q), k=of(k), v=of(v), y=at(y), lse=at(lse), band=piece.band
            )
            for whole, values in zip((at(dq), of(dk), of(dv)), grads, strict=True):
                whole.copy_(values)
        return dq, dk, dv


def _common(part: slice, first: int, last: int) -> slice:
    return slice(max(part.start, first), min(part.stop, last))


def _consecutive(rows: Sequence[int]) -> list[slice]:
    """Ascending numbers as ranges."""
    cuts = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows)]
    return [slice(rows[first], rows[last - 1] + 1) for first, last in pairwise(cuts)]


class Packing:
    """What the modules of a rank that `share_packing` reaches know of the current microbatch.

    documents: None where attention does not end at a document's.
    decoder: of a model with an encoder, the tokens that its decoder reads [b, s], int64.
    lengths: how many of the encoder's tokens are real, int64 [b]; None: all of them.
    """

    def __init__(self) -> None:
        self.documents: DocumentStarts | None = None
        self.decoder: Tensor | None = None
        self.lengths: Tensor | None = None


def share_packing(model: nn.Module, packing: Packing) -> None:
    """Let attention and positions of a model follow the documents of `packing`."""
    for module in model.modules():
        if isinstance(getattr(module, "packing", None), Packing):
            cast(Any, module).packing = packing
