"""Samples packed with several documents: attention stays inside a document, and positions restart in each.

The tokens of a document are contiguous, so attention inside documents is causal attention of slices, without
a mask and without computing scores between documents.
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
Run = tuple[int, int, int]  # start of its document, first index, index after the last


class DocumentStarts:
    """The documents of the samples of one microbatch.

    Args:
        begins: int64 [b, s] on the CPU: for each position, the first position of its document.
    """

    def __init__(self, begins: Tensor) -> None:
        self.begins = begins
        self.length = begins.shape[1]
        self._cache = dict[Any, Any]()

    def cached(self, key: Any, make: Callable[[], T]) -> T:
        """Return the first result of `make` for this key, which all layers of a model share."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def positions(self, at: Tensor | None, device: torch.device) -> Tensor:
        """Return positions within documents, int64 [b, n].

        Args:
            at: positions within the samples [n], by default all; those after the last are padding.
        """

        def make() -> Tensor:
            real = torch.arange(self.length, device=device) if at is None else at.clamp(max=self.length - 1)
            return real - moved(self.begins, device)[:, real]

        return self.cached(("positions", id(at), device), make)

    def differ(self, n: int, device: torch.device) -> Tensor:
        """Return bool [b, 1, n, n], True if two positions are in different documents."""
        of = moved(self._of(torch.arange(n)), device)
        return (of.unsqueeze(2) != of.unsqueeze(1)).unsqueeze(1)

    def first_keys(self, n: int, window: int | None, device: torch.device) -> Tensor:
        """Return int64 [b, n], the first position that each of n sees in its document and the window."""
        first = moved(self._of(torch.arange(n)), device)
        if window is None:
            return first
        return torch.maximum(first, torch.arange(n, device=device) - (window - 1))

    def runs(self, at: Tensor) -> list[list[Run]]:
        """Return for each sample the documents of ascending positions `at` [n]; int64 on the CPU."""
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
        """Return the starts of the documents of positions [n], which identify the documents: [b, n].

        Padding belongs to the last document.
        """
        return self.begins[:, at.clamp(max=self.length - 1)]

    def inside(
        self, piece: AttentionTile, query_runs: Sequence[list[Run]], key_runs: Sequence[list[Run]]
    ) -> list[AttentionTile]:
        """Return the parts of a tile of attention that are inside documents.

        Args:
            query_runs, key_runs: the runs of all queries and of all keys, including those outside of the
                tile.
        """
        rows = dict[tuple[int, int, int, int], list[int]]()
        for row, (of_queries, of_keys) in enumerate(zip(query_runs, key_runs, strict=True)):
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
                parts += [part.of_rows(range_of_rows) for range_of_rows in _consecutive(members)]
        return parts

    def pieces(self, n: int, window: int | None) -> list[AttentionTile]:
        """Return tiles of the attention of n positions to themselves."""

        def make() -> list[AttentionTile]:
            all_positions, runs = (
                AttentionTile(slice(0, n), slice(0, n), Band(0, window)),
                self.runs(torch.arange(n)),
            )
            return self.inside(all_positions, runs, runs)

        return self.cached(("pieces", n, window), make)

    def laid_end_to_end(self, n: int, device: torch.device) -> PackedRuns:
        """Return the documents as runs in the concatenation of all samples."""

        def make() -> PackedRuns:
            runs = [
                (row * n + first, row * n + last)
                for row, of in enumerate(self.runs(torch.arange(n)))
                for _, first, last in of
            ]
            cuts = torch.tensor([0, *(last for _, last in runs)], dtype=torch.int32)
            return PackedRuns(moved(cuts, device), max(last - first for first, last in runs))

        return self.cached(("runs", n, device), make)

    def forward(
        self, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Run `Kernel.forward` for causal attention of n positions inside these documents."""
        b, heads, n, _ = q.shape
        if isinstance(kernel, FlashAttention):
            return kernel.forward_runs(q, k, v, self.laid_end_to_end(n, q.device), window)
        y = q.new_empty(b, n, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(b, heads, n, dtype=exact_type(q.dtype))
        for piece in self.pieces(n, window):
            part = kernel.forward(piece.of_queries(q), piece.of_keys(k), piece.of_keys(v), piece.band)
            for result, values in zip((y, lse), part, strict=True):
                piece.of_queries(result).copy_(values)
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
        """Run `Kernel.backward` for causal attention of n positions inside these documents."""
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
            for result, values in zip((at(dq), of(dk), of(dv)), grads, strict=True):
                result.copy_(values)
        return dq, dk, dv


def _common(part: slice, first: int, last: int) -> slice:
    return slice(max(part.start, first), min(part.stop, last))


def _consecutive(rows: Sequence[int]) -> list[slice]:
    """Return ascending integers as ranges."""
    cuts = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows)]
    return [slice(rows[first], rows[last - 1] + 1) for first, last in pairwise(cuts)]


class Packing:
    """Packing of the current microbatch, shared by the modules of a rank (`share_packing`).

    documents: documents of the samples; None if attention does not stop at their boundaries.
    decoder: tokens that the decoder of an encoder-decoder model reads, [b, s], int64.
    lengths: numbers of real tokens of the encoder, int64 [b]; None if all are.
    """

    def __init__(self) -> None:
        self.documents: DocumentStarts | None = None
        self.decoder: Tensor | None = None
        self.lengths: Tensor | None = None


def share_packing(model: nn.Module, packing: Packing) -> None:
    """Set the packing of all attention and positions of a model."""
    for module in model.modules():
        if isinstance(getattr(module, "packing", None), Packing):
            cast(Any, module).packing = packing
