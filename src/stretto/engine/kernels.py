"""Attention kernels: fused ones, and the formula for dropout, soft-capped scores, and cases without a fused
kernel. Ordinary attention and the rounds of ring attention share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.engine.device import has_cuda_kernels

BLOCK = 64  # queries per call of a fused kernel with a window
TILE = 64  # maximum number of queries of a tile of the formula; on accelerators 4 times as many
SCORES = 1 << 18  # scores of a tile: 1 MiB in float32, which fits a core's second-level cache
_aten: Any = torch.ops.aten


@dataclass(frozen=True)
class Band:
    """The keys that queries see: query i sees key j if 0 <= i + shift - j < window.

    Args:
        shift: distance of the first query from the first key; 0 for causal attention of as many queries as
            keys.
        window: number of keys seen; None for all up to the query's position.
    """

    shift: int = 0
    window: int | None = None

    def full(self, n: int, m: int) -> bool:
        """True if all of n queries see all of m keys."""
        return self.shift >= m - 1 and (self.window is None or self.shift + n - 1 < self.window)

    def triangle(self, n: int, m: int) -> bool:
        """True if there are as many queries as keys, and each query sees its key and those before it."""
        return self.shift == 0 and n == m and (self.window is None or self.window >= n)

    def keys(self, queries: slice, m: int) -> slice:
        """Return the range of m keys that any of these queries sees."""
        first = 0 if self.window is None else queries.start + self.shift - self.window + 1
        return slice(min(max(first, 0), m), min(max(queries.stop + self.shift, 0), m))

    def trim(self, n: int, m: int) -> tuple[slice, slice] | None:
        """Return the ranges of n queries and m keys with a partner among the others, or None."""
        last = n if self.window is None else min(n, m - 1 + self.window - self.shift)
        queries = slice(max(0, -self.shift), last)
        keys = self.keys(queries, m) if queries.start < queries.stop else slice(0, 0)
        return (queries, keys) if keys.start < keys.stop else None

    def at(self, queries: slice, keys: slice) -> Band:
        """Return the band of some of the queries and keys."""
        return Band(self.shift + queries.start - keys.start, self.window)

    def mask(self, n: int, m: int, device: torch.device) -> Tensor:
        """Return bool [n, m], True if a query sees a key."""
        visible = torch.ones(n, m, dtype=torch.bool, device=device).tril_(self.shift)
        return visible if self.window is None else visible.triu_(self.shift - self.window + 1)


@dataclass(frozen=True)
class AttentionTile:
    """A range of queries and one of keys, and the band of keys that the queries see.

    rows: the samples.
    """

    queries: slice
    keys: slice
    band: Band
    rows: slice = field(default_factory=lambda: slice(None))

    def part(self, queries: slice, keys: slice) -> AttentionTile | None:
        """Return the tile of some of these queries and keys, without those that attend to nothing or are not
        attended to; None if none are left.
        """
        first, before = queries.start, keys.start
        band = self.band.at(_shifted(queries, -self.queries.start), _shifted(keys, -self.keys.start))
        visible = band.trim(queries.stop - first, keys.stop - before)
        if visible is None:
            return None
        return AttentionTile(
            _shifted(visible[0], first), _shifted(visible[1], before), band.at(*visible), self.rows
        )

    def of_rows(self, rows: slice) -> AttentionTile:
        """Return the tile of these samples."""
        return AttentionTile(self.queries, self.keys, self.band, rows)

    def of_queries(self, x: Tensor) -> Tensor:
        """Return the tile's part of x [b, heads, n, ...]."""
        return x[self.rows, :, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        """Return the tile's part of x [b, heads, m, ...]."""
        return x[self.rows, :, self.keys]


def _shifted(x: slice, by: int) -> slice:
    return slice(x.start + by, x.stop + by)


@dataclass(frozen=True)
class PackedRuns:
    """Runs of positions in the concatenation of all samples; each run attends to itself.

    cuts: int32 [runs + 1], the start of each run, and the end of the last.
    longest: length of the longest run.
    """

    cuts: Tensor
    longest: int


@dataclass(frozen=True)
class ScoreOptions:
    """Options of the scores of queries and keys; see `CausalAttention`."""

    scale: float
    softcap: float | None = None
    window: int | None = None


class Kernel(Protocol):
    """Attention to one block of keys, forward and backward. Each query must see at least one of the keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """Attend with q [b, heads, n, d] to a block k [b, kv_heads, m, d] and v [b, kv_heads, m, dv].

        Returns the output for this block [b, heads, n, dv], and the log-sum-exp of its scores [b, heads, n]
        (float32; float64 for float64).
        """
        ...

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this block's part of the gradients of q, k and v; y and lse are those of all blocks
        combined.
        """
        ...


@dataclass(frozen=True)
class CpuFlash:
    """Torch's tiled attention on CPUs: any strides, any floating dtype, grouped heads; values as wide as
    keys.

    The kernel also computes scores that a mask hides. Attention with a window is therefore computed in blocks
    of queries, each with the keys that any of them attends to.
    """

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        blocks = list(_blocks(q, k, band))
        if len(blocks) == 1:
            return self._forward(q, k, v, *blocks[0][2:])
        y = torch.zeros_like(q, dtype=exact_type(q.dtype))
        lse = y.new_full(q.shape[:-1], float("-inf"))
        for queries, keys, causal, mask in blocks:
            part = self._forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], causal, mask)
            if mask is not None:  # the block has all keys of these queries
                y[:, :, queries], lse[:, :, queries] = part
            else:
                add_block(y[:, :, queries], lse[:, :, queries], *part)
        return y, lse

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=self.scale
        )

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        blocks, sums = list(_blocks(q, k, band)), list[Tensor]()
        if len(blocks) > 1:
            sums = [torch.zeros_like(t, dtype=exact_type(q.dtype)) for t in (q, k, v)]
        for queries, keys, causal, mask in blocks:
            at, of = (slice(None), slice(None), queries), (slice(None), slice(None), keys)
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy[at],
                q[at],
                k[of],
                v[of],
                y[at],
                lse[at],
                0.0,
                causal,
                attn_mask=mask,
                scale=self.scale,
            )
            if not sums:
                return parts
            for total, part, index in zip(sums, parts, (at, of, of), strict=True):
                total[index] += part
        return sums[0], sums[1], sums[2]


def _blocks(q: Tensor, k: Tensor, band: Band) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Yield queries, keys, whether the kernel's causal mask applies to them, and otherwise the mask to add to
    their scores, 0 or -inf, if any.
    """
    n, m = q.shape[2], k.shape[2]
    before, all_queries = m - n, slice(0, n)  # keys before the first query's
    if band.full(n, m):
        yield all_queries, slice(0, m), False, None
        return
    if band.shift == before >= 0 and (band.window is None or band.window >= m):
        yield all_queries, slice(before, m), True, None
        if before:
            yield all_queries, slice(0, before), False, None
        return
    previous, mask = None, None
    for start in range(0, n, BLOCK):
        rows = slice(start, min(start + BLOCK, n))
        keys = band.keys(rows, m)
        block_band = band.at(rows, keys), rows.stop - rows.start, keys.stop - keys.start
        if block_band != previous:  # all blocks but those at the ends share a mask
            previous, hidden = (
                block_band,
                block_band[0].mask(block_band[1], block_band[2], q.device).logical_not_(),
            )
            mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill_(hidden, float("-inf"))[None, None]
        yield rows, keys, False, mask


@dataclass(frozen=True)
class FlashAttention:
    """FlashAttention on CUDA: 16-bit types, grouped heads, windows; values as wide as keys."""

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        n, m = q.shape[2], k.shape[2]
        if band.full(n, m) or band.triangle(n, m):
            causal = not band.full(n, m)
            return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=self.scale)[:2]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y, lse = _aten._flash_attention_forward(
            q, k, v, None, None, n, m, 0.0, False, False, scale=self.scale, **_sides(n, m, band)
        )[:2]
        return y.transpose(1, 2), lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, m = q.shape[2], k.shape[2]
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's random state
        lse, none = lse.contiguous(), (None, None, n, m, 0.0)
        if band.full(n, m) or band.triangle(n, m):
            causal = not band.full(n, m)
            return _aten._scaled_dot_product_flash_attention_backward(
                dy, q, k, v, y, lse, *none, causal, unused, unused, scale=self.scale
            )
        turned = [t.transpose(1, 2) for t in (dy, q, k, v, y)]
        grads = _aten._flash_attention_backward(
            *turned, lse, *none, False, unused, unused, scale=self.scale, **_sides(n, m, band)
        )
        dq, dk, dv = (t.transpose(1, 2) for t in grads)
        return dq, dk, dv

    def forward_runs(
        self, q: Tensor, k: Tensor, v: Tensor, runs: PackedRuns, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Run causal attention inside each run of positions, in one call of the "varlen" kernel."""
        b, n = q.shape[0], q.shape[2]
        y, lse = _aten._flash_attention_forward(
            *(_end_to_end(t) for t in (q, k, v)), *_limits(runs), 0.0, True, False, **self._behind(window)
        )[:2]  # lse [heads, b n]
        return y.unflatten(0, (b, n)).transpose(1, 2), lse.unflatten(1, (b, n)).transpose(0, 1)

    def backward_runs(
        self,
        *,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        lse: Tensor,
        runs: PackedRuns,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of `forward_runs`."""
        b, n = q.shape[0], q.shape[2]
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's random state
        flat_lse = lse.transpose(0, 1).flatten(1).contiguous()
        flat = (_end_to_end(t) for t in (dy, q, k, v, y))
        grads = _aten._flash_attention_backward(
            *flat, flat_lse, *_limits(runs), 0.0, True, unused, unused, **self._behind(window)
        )
        dq, dk, dv = (t.unflatten(0, (b, n)).transpose(1, 2) for t in grads)
        return dq, dk, dv

    def _behind(self, window: int | None) -> dict[str, float]:
        """Return scale and window of a causal call."""
        before = -1 if window is None else window - 1
        return {"scale": self.scale, "window_size_left": before, "window_size_right": 0}


def _end_to_end(x: Tensor) -> Tensor:
    """Flatten [b, heads, n, d] to [b n, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)


def _limits(runs: PackedRuns) -> tuple[Tensor, Tensor, int, int]:
    """Return the limits of queries and keys, with at least 2 as the longest run: 1 would select a kernel for
    generation, whose results differ.
    """
    longest = max(runs.longest, 2)
    return runs.cuts, runs.cuts, longest, longest


def _sides(n: int, m: int, band: Band) -> dict[str, int]:
    """Return the band as FlashAttention's window: numbers of keys before and after a query's own key, -1 for
    all.

    A query's own key is as far from the last key as the query is from the last query.
    """
    after = band.shift - (m - n)
    before = -1 if band.window is None else band.window - 1 - after
    return {"window_size_left": before, "window_size_right": -1 if band.shift >= m - 1 else after}


@dataclass(frozen=True)
class MemoryEfficient:
    """Memory-efficient attention on CUDA: also float32, and values of another width than keys; no grouped
    heads.

    Bands other than full and triangular ones are computed by the formula.
    """

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        if not self._takes(q, k, band):
            return NaiveAttention(ScoreOptions(self.scale)).forward(q, k, v, band)
        causal = not band.full(q.shape[2], k.shape[2])
        k, v = (_repeat_heads(t, q.shape[1]) for t in (k, v))
        y, lse = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, causal, scale=self.scale
        )[:2]
        return y, lse[..., : q.shape[2]]

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._takes(q, k, band):
            written_out = NaiveAttention(ScoreOptions(self.scale))
            return written_out.backward(dy=dy, q=q, k=k, v=v, y=y, lse=lse, band=band)
        causal = not band.full(q.shape[2], k.shape[2])
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))  # the kernel's alignment
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        wide = (_repeat_heads(t, q.shape[1]) for t in (k, v))
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dy,
            q,
            *wide,
            None,
            y,
            lse,
            unused,
            unused,
            0.0,
            [True, True, True, False],
            causal,
            scale=self.scale,
        )
        return dq, _sum_heads(dk, k.shape[1]), _sum_heads(dv, k.shape[1])

    def _takes(self, q: Tensor, k: Tensor, band: Band) -> bool:
        n, m = q.shape[2], k.shape[2]
        return band.full(n, m) or band.triangle(n, m)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key head of [b, kv_heads, m, d] for all its query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Sum the gradients of repeated heads for each key head."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


@dataclass(frozen=True)
class DropoutMask:
    """A dropout mask of attention probabilities.

    mask: bool [b, heads, queries, keys], False for dropped ones.
    scale: factor of the others.
    """

    mask: Tensor
    scale: float

    def at(self, queries: slice, keys: slice, rows: slice = slice(None)) -> DropoutMask:
        """Return the mask of some queries and keys of some samples."""
        return DropoutMask(self.mask[rows, :, queries, keys], self.scale)

    def factors(self, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """Return the factors of the probabilities of these queries and keys: 0 or the scale."""
        return self.mask[:, :, queries, keys].to(dtype).mul_(self.scale)


@dataclass(frozen=True)
class _Tile:
    """Queries and all keys that they attend to, of a range of the key heads of all samples."""

    queries: slice
    keys: slice
    heads: slice


@dataclass(frozen=True)
class NaiveAttention:
    """The formula, for any device and dtype, soft-capped scores, and dropout.

    It is computed in tiles of queries, so that only one tile's scores are in memory, without the keys that a
    tile does not attend to.
    """

    scores: ScoreOptions
    dropout: DropoutMask | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        b, heads, n, _ = q.shape
        exact, cap = exact_type(q.dtype), self.scores.softcap or 1.0
        y = q.new_empty(b, n, heads, v.shape[-1], dtype=exact).transpose(1, 2)
        lse = q.new_empty(b, heads, n, dtype=exact)
        scaled, v3 = self._scaled(k.flatten(0, 1)), v.flatten(0, 1).contiguous()
        for queries, tiles in _tiles(q, k, band):
            q3 = _grouped(q[:, :, queries], k)
            sums, totals = list[Tensor](), list[Tensor]()
            for at in tiles:
                p = _hide(self._scores(q3[at.heads], scaled[at.heads, at.keys]), at, band)
                largest = p.amax(-1, keepdim=True).mul_(cap)
                total = torch.add(-largest, p, alpha=cap, out=p).exp_().sum(-1, keepdim=True)
                if self.dropout is not None:
                    p.mul_(_factors(self.dropout, at, k, exact))
                values = v3[at.heads, at.keys]
                if p.dtype == v.dtype:
                    sums.append((p @ values).div_(total))
                else:  # probabilities fit into any type
                    sums.append(p.div_(total).to(v.dtype) @ values)
                totals.append(total.log_().add_(largest))
            y[:, :, queries] = _ungrouped(sums, q[:, :, queries])
            lse[:, :, queries] = _ungrouped(totals, q[:, :, queries]).squeeze(-1)
        return y, lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; Dao et al. 2022, appendix B.2."""
        exact, kind = lse.dtype, q.dtype
        cap = self.scores.softcap or 1.0
        dq = torch.empty_like(q, dtype=exact)
        k3, v3 = k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()
        dk, dv = (torch.zeros_like(t, dtype=exact) for t in (k3, v3))
        scaled = self._scaled(k3)
        for queries, tiles in _tiles(q, k, band):
            q3, dy3 = _grouped(q[:, :, queries], k), _grouped(dy[:, :, queries].to(kind), k)
            # subtracted by the softmax's backward; dropout does not change it
            through = (dy[:, :, queries].to(exact) * y[:, :, queries]).sum(-1, keepdim=True)
            through, minus_lse = _grouped(through, k), _grouped(-lse[:, :, queries].unsqueeze(-1), k)
            sums = list[Tensor]()
            for at in tiles:
                of = at.heads
                keys = (of, at.keys)
                s = self._scores(q3[of], scaled[keys])
                p = _hide(torch.add(minus_lse[of], s, alpha=cap), at, band).exp_()
                dp = (dy3[of] @ v3[keys].transpose(1, 2)).to(exact)
                passed = p
                if self.dropout is not None:
                    factors = _factors(self.dropout, at, k, exact)
                    passed, dp = p * factors, dp.mul_(factors)
                dv[keys] += passed.to(kind).transpose(1, 2) @ dy3[of]
                ds = dp.sub_(through[of]).mul_(p)
                if self.scores.softcap is not None:  # the derivative of tanh is 1 - tanh^2
                    ds.addcmul_(ds * s, s, value=-1.0)
                ds = ds.to(kind)
                sums.append(ds @ k3[keys])
                dk[keys] += ds.transpose(1, 2) @ q3[of]
            dq[:, :, queries] = _ungrouped(sums, q[:, :, queries])
        scale = self.scores.scale
        return dq.mul_(scale), dk.mul_(scale).view(k.shape), dv.view(v.shape)

    def _scaled(self, k: Tensor) -> Tensor:
        """Return keys multiplied by the factor of the scores, unless that would round to 16 bits."""
        return (k * self._factor if k.dtype == exact_type(k.dtype) else k).contiguous()

    def _scores(self, q: Tensor, scaled: Tensor) -> Tensor:
        """Return the scores of a tile in the exact dtype; capped ones before the multiplication by the
        cap.
        """
        s = q @ scaled.transpose(1, 2)
        if s.dtype != exact_type(q.dtype):
            s = s.to(exact_type(q.dtype)).mul_(self._factor)
        return s if self.scores.softcap is None else s.tanh_()

    @property
    def _factor(self) -> float:
        return self.scores.scale / (self.scores.softcap or 1.0)


def _tiles(q: Tensor, k: Tensor, band: Band) -> Iterator[tuple[slice, list[_Tile]]]:
    """Yield ranges of queries, each with its tiles by heads, which cover all keys that the queries
    attend to.
    """
    n, m = q.shape[2], k.shape[2]
    count = k.shape[0] * k.shape[1]
    group = q.shape[1] // k.shape[1]
    on_cpu = q.device.type == "cpu"
    step, max_scores = (TILE, SCORES) if on_cpu else (4 * TILE, 64 * SCORES)  # a launch takes time, too
    for start in range(0, n, step):
        queries = slice(start, min(start + step, n))
        keys = band.keys(queries, m)
        size = group * (queries.stop - queries.start) * (keys.stop - keys.start)
        heads = min(max(max_scores // size, 1), count)
        yield queries, [_Tile(queries, keys, slice(h, min(h + heads, count))) for h in range(0, count, heads)]


def _hide(scores: Tensor, at: _Tile, band: Band) -> Tensor:
    """Set scores of hidden keys of a tile to -inf, in place; most keys are visible to all queries."""
    n, m = at.queries.stop - at.queries.start, at.keys.stop - at.keys.start
    tile_band, by_query = band.at(at.queries, at.keys), scores.unflatten(1, (-1, n))
    after = min(max(tile_band.shift + 1, 0), m)  # from here on keys are hidden from some
    before = 0 if tile_band.window is None else min(max(n + tile_band.shift - tile_band.window, 0), m)
    if after <= before:
        after, before = 0, 0
    for keys in (slice(0, before), slice(after, m)):
        if keys.start < keys.stop:
            hidden = (
                tile_band.at(slice(0, n), keys).mask(n, keys.stop - keys.start, scores.device).logical_not_()
            )
            by_query[..., keys].masked_fill_(hidden, float("-inf"))
    return scores


def _factors(dropout: DropoutMask, at: _Tile, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dropout factors of the probabilities of a tile."""
    factors = dropout.factors(at.queries, at.keys, dtype)
    return factors.unflatten(1, (k.shape[1], -1)).flatten(2, 3).flatten(0, 1)[at.heads]


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """View [b, heads, n, d] as [b kv_heads, heads / kv_heads n, d], with one matrix of queries per key
    head.
    """
    return x.reshape(x.shape[0] * k.shape[1], -1, x.shape[-1])


def _ungrouped(parts: list[Tensor], q: Tensor) -> Tensor:
    """Concatenate ranges of key heads, and view them as [b, heads, n, d] with q's b, heads and n."""
    x = parts[0] if len(parts) == 1 else torch.cat(parts)
    return x.view(*q.shape[:3], x.shape[-1])


def rows(x: Tensor) -> Tensor:
    """Return x with contiguous features of each position, which the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def exact_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores and of sums over blocks."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_block(y: Tensor, lse: Tensor, block_y: Tensor, block_lse: Tensor) -> None:
    """Combine a block's output [b, heads, n, dv] and log-sum-exp [b, heads, n] with those of other blocks, in
    place.
    """
    both = torch.logaddexp(lse, block_lse)
    y.mul_((lse - both).exp_().unsqueeze(-1))
    y.addcmul_(block_y.to(y.dtype), (block_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def add_sinks(y: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks [heads], scores whose value vectors are zero, to output [b, heads, n, dv] and log-sum-exp
    [b, heads, n]. A kernel's backward is correct with the results.
    """
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    return y * (lse - with_sinks).exp_().unsqueeze(-1).to(y.dtype), with_sinks


def sinks_gradient(dy: Tensor, y: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient [heads] of the sinks; y and lse are the results of `add_sinks`."""
    p = (sinks.to(lse.dtype).view(-1, 1) - lse).exp_()
    through = (dy.to(lse.dtype) * y).sum(-1)
    return p.mul_(through).sum((0, 2)).neg_().to(sinks.dtype)


def kernel_for(
    q: Tensor, v: Tensor, scores: ScoreOptions, explicit: bool = False, dropout: DropoutMask | None = None
) -> Kernel:
    """Return the fastest kernel for such queries and values; `NaiveAttention` with `explicit` or dropout."""
    if explicit or dropout is not None or scores.softcap is not None or not q.is_floating_point():
        return NaiveAttention(scores, dropout)
    d, equal = q.shape[-1], q.shape[-1] == v.shape[-1]
    if q.device.type == "cpu" and equal:  # padding the values takes longer than the formula in tiles
        return CpuFlash(scores.scale)
    if has_cuda_kernels(q.device) and d % 8 == 0 and v.shape[-1] % 8 == 0:
        half = q.dtype in (torch.float16, torch.bfloat16)
        if half and equal and d <= 256:
            return FlashAttention(scores.scale)
        if half or q.dtype == torch.float32:
            return MemoryEfficient(scores.scale)
    return NaiveAttention(scores, dropout)
