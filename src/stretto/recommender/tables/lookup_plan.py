"""Embedding lookups for one table: query its shards, combine their replies.

A shard answers bags of its rows with their sums. It is asked either for samples, a bag each, of which a
row-split table gets one for each part and the partial sums add up here; or for single rows, which are summed
here. Single rows are the smaller answer where ids are few or often the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.recommender.tables.jagged import VARYING, Bags
from stretto.recommender.tables.kernels.plain import Divided, Kernels, divide_by
from stretto.recommender.tables.splitmix import owner


@dataclass(kw_only=True)
class Ask:
    """What the shards of one table are asked for.

    Attributes:
        bags: of the samples, of rows of the table.
        parts: for each shard.
        by_rows: the parts have different rows; otherwise all the same ones (of perhaps different columns).
        back: for single rows: [n] the place of each id's row in the answers, those of all parts after one
            another; None: the answers are of samples.
        total: the single rows of all parts.
    """

    bags: Bags
    parts: list[Bags]
    by_rows: bool
    back: Tensor | None = None
    total: int = 0

    def gather(self, answers: Sequence[Tensor]) -> Tensor:
        """The table's vectors from its shards' answers: [samples, dim], or [total, dim] of single rows."""
        if len(answers) == 1:
            return answers[0]
        if not self.by_rows:
            return torch.cat(list(answers), 1)
        if self.back is not None:
            return torch.cat(list(answers))
        total = answers[0] + answers[1]
        for more in answers[2:]:
            total += more
        return total

    def scatter(self, gradient: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """The gradient of each shard's answers from that of what `gather` made."""
        if len(self.parts) == 1:
            return [gradient]
        if not self.by_rows:
            return list(gradient.split(list(widths), 1))
        if self.back is not None:
            return list(gradient.split([part.samples for part in self.parts]))
        return [gradient] * len(self.parts)

    def pool(self, vectors: Tensor, kernels: Kernels) -> Tensor:
        """Sums of the samples [samples, dim] from what `gather` made."""
        if self.back is None:
            return vectors
        if self.bags.single:
            return vectors.index_select(0, self.back)
        return kernels.lookup(vectors, self.back, self.bags.offsets, self.bags.scale)

    def unpool(self, gradient: Tensor, kernels: Kernels) -> Tensor:
        """The gradient of what `gather` made from that of the samples' sums."""
        if self.back is None:
            return gradient
        grouped = kernels.group(self.back)
        return kernels.segment_sum(gradient, self.bags.offsets, grouped, self.bags.scale)


def ask_samples(bags: Bags, parts: int, by_rows: bool, hashed: bool, kernels: Kernels) -> Ask:
    """Of every shard, sums of samples."""
    if not by_rows:
        return Ask(bags=bags, parts=[bags] * parts, by_rows=False)
    divided = _divided(bags.ids, bags.offsets, parts, hashed, kernels)
    sizes = divided.lengths.sum(1).tolist()
    scales = [None] * parts if bags.scale is None else bags.scale[divided.order].split(sizes)
    pieces = [
        Bags(ids=rows, samples=bags.samples, hot=VARYING, lengths=lengths, scale=scale)
        for rows, lengths, scale in zip(divided.local_rows.split(sizes), divided.lengths, scales, strict=True)
    ]
    return Ask(bags=bags, parts=pieces, by_rows=True)


def ask_rows(
    bags: Bags, parts: int, by_rows: bool, once: bool, kernels: Kernels, hashed: bool = False
) -> Ask:
    """Of the shards, single rows; each row only `once`, or as often as there are ids of it."""
    rows, back = bags.ids, None
    if once:
        grouped = kernels.group(rows)
        rows, back = grouped.rows, torch.empty_like(bags.ids)
        times = torch.diff(grouped.starts)
        back[grouped.order] = torch.repeat_interleave(
            torch.arange(len(rows), device=rows.device), times, output_size=len(back)
        )
    if not by_rows:
        back = torch.arange(len(rows), device=rows.device) if back is None else back
        return Ask(bags=bags, parts=[_singles(rows)] * parts, by_rows=False, back=back, total=len(rows))
    whole = torch.tensor([0, len(rows)], device=rows.device)
    divided = _divided(rows, whole, parts, hashed, kernels)
    place = torch.empty_like(divided.order)
    place[divided.order] = torch.arange(len(rows), device=rows.device)
    singles = [_singles(piece) for piece in divided.local_rows.split(divided.lengths[:, 0].tolist())]
    return Ask(
        bags=bags, parts=singles, by_rows=True, back=place if back is None else place[back], total=len(rows)
    )


def _divided(rows: Tensor, offsets: Tensor, parts: int, hashed: bool, kernels: Kernels) -> Divided:
    """Lookups by the part that has their row, or that owns the id."""
    if hashed:
        return divide_by(owner(rows, parts), rows, offsets, parts)
    return kernels.divide(rows, offsets, parts)


def _singles(rows: Tensor) -> Bags:
    return Bags(ids=rows, samples=len(rows), hot=1, lengths=torch.ones_like(rows))


class Chooser:
    """Whether to ask for samples or for rows, whichever is smaller: by how often ids repeat, which is looked
    at now and then.
    """

    EVERY = 64

    def __init__(self, tables: int) -> None:
        self._seen = [0] * tables
        self._distinct = [1.0] * tables  # distinct rows by lookups

    def ask(self, table: int, bags: Bags, parts: int, by_rows: bool, hashed: bool, kernels: Kernels) -> Ask:
        """What to ask the `parts` shards of a table for.

        In vectors of a whole row, the answers are one for each sample and part that has other rows, or one
        for each row. The owner of a hash table counts ids: it is to see each as often as it comes.
        """
        lookups = len(bags.ids)
        samples = bags.samples * (parts if by_rows else 1)
        if hashed:
            if by_rows and lookups < samples:
                return ask_rows(
                    bags=bags, parts=parts, by_rows=by_rows, once=False, kernels=kernels, hashed=hashed
                )
            return ask_samples(bags, parts, by_rows, hashed, kernels)
        if lookups and self._seen[table] % self.EVERY == 0:
            self._distinct[table] = len(torch.unique(bags.ids)) / lookups
        self._seen[table] += 1
        distinct = self._distinct[table]
        if min(lookups, distinct * lookups) < 0.9 * samples:
            return ask_rows(bags, parts, by_rows, distinct < 0.8, kernels)
        return ask_samples(bags, parts, by_rows, hashed, kernels)
