"""Kernels of attention beside the formula, for any band of keys; blocks of keys that add up; sinks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.engine.kernels import (
    BLOCK,
    TILE,
    Band,
    DropoutMask,
    FlashAttention,
    Kernel,
    MemoryEfficient,
    NaiveAttention,
    ScoreOptions,
    add_block,
    add_sinks,
    kernel_for,
    sinks_gradient,
)

HALF = ScoreOptions(8**-0.5)
FULL, CAUSAL = Band(10**6), Band()


def formula(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scores: ScoreOptions = HALF, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention as it is written, and the log-sum-exp of its scores."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.transpose(2, 3) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    distance = torch.arange(q.shape[2])[:, None] + band.shift - torch.arange(k.shape[2])
    unseen = (distance < 0) | (distance >= (band.window or 10**9))
    s = s.masked_fill(unseen, float("-inf"))
    p = s.softmax(-1)
    return (p if factors is None else p * factors) @ v, s.logsumexp(-1)


def strided(heads: int, n: int, batch: int, dtype: torch.dtype) -> Tensor:
    """[b, heads, n, 8] as attention gets it: a view of wider rows."""
    wide = torch.randn(batch, n + 3, heads + 2, 8, dtype=torch.float64).to(dtype)
    return wide[:, 2 : n + 2, 1 : heads + 1].transpose(1, 2)


def close(computed: Tensor, plain: Tensor, tolerance: float) -> None:
    plain = plain.detach()
    scale = float(plain.abs().max()) or 1.0
    assert float((computed.detach().double() - plain).abs().max()) <= tolerance * scale


TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "m", "band"),
    [
        (4, 4, 7, 7, CAUSAL),
        (4, 2, 5, 9, FULL),
        (6, 1, 40, 40, CAUSAL),
        (2, 2, 1, 3, FULL),
        (4, 2, 1, 1, CAUSAL),
        (4, 2, 5, 40, Band(35)),  # the last queries
        (2, 1, 2 * BLOCK + 9, 2 * BLOCK + 9, Band(0, BLOCK // 2)),
        (2, 2, BLOCK + 3, 30, Band(20, 100)),  # a corner of the window
    ],
)
def test_kernels_are_the_formula(
    dtype: torch.dtype, explicit: bool, heads: int, kv_heads: int, n: int, m: int, band: Band
) -> None:
    torch.manual_seed(n)
    q, k, v = strided(heads, n, 2, dtype), strided(kv_heads, m, 2, dtype), strided(kv_heads, m, 2, dtype)
    exact = [x.double().clone().requires_grad_() for x in (q, k, v)]
    y, lse = formula(exact[0], exact[1], exact[2], band)
    kernel = kernel_for(q, v, HALF, explicit)
    output, our_lse = kernel.forward(q, k, v, band)
    close(output, y, TOLERANCE[dtype])
    close(our_lse, lse, TOLERANCE[dtype])
    dy = strided(heads, n, 2, dtype)
    grads = torch.autograd.grad(y, exact, dy.double())
    for ours_d, plain in zip(
        kernel.backward(dy, q, k, v, output.to(dtype), our_lse, band), grads, strict=True
    ):
        assert ours_d.shape == plain.shape
        close(ours_d, plain, 3 * TOLERANCE[dtype])


@given(
    n=st.integers(1, 2 * BLOCK + 5),
    m=st.integers(1, 2 * BLOCK + 5),
    shift=st.integers(-9, 3 * BLOCK),
    window=st.none() | st.integers(1, 3 * BLOCK),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dv=st.sampled_from([8, 8, 3]),
    softcap=st.none() | st.floats(0.5, 20.0),
)
@settings(deadline=None, max_examples=80)
def test_any_band_is_the_formula(
    n: int,
    m: int,
    shift: int,
    window: int | None,
    kv_heads: int,
    group: int,
    dv: int,
    softcap: float | None,
) -> None:
    band = Band(shift, window)
    seen = band.mask(n, m, torch.device("cpu"))
    trimmed = band.trim(n, m)
    if trimmed is None:
        assert not seen.any()
        return
    queries, keys = trimmed
    assert seen.sum() == seen[queries, keys].sum(), "visible scores were cut off"
    band, seen = band.at(queries, keys), seen[queries, keys]
    assert seen.any(0).all(), "a key that no query sees"
    assert seen.any(1).all(), "a query that sees no key"
    assert torch.equal(seen, band.mask(*seen.shape, torch.device("cpu")))
    assert band.full(*seen.shape) == bool(seen.all())
    n, m = seen.shape
    scores = ScoreOptions(0.4, softcap)
    torch.manual_seed(n)
    q, k = (torch.randn(2, h, s, 8).double() for h, s in ((kv_heads * group, n), (kv_heads, m)))
    v = torch.randn(2, kv_heads, m, dv).double()
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    y, lse = formula(exact[0], exact[1], exact[2], band, scores)
    kernel = kernel_for(q, v, scores)
    output, our_lse = kernel.forward(q, k, v, band)
    close(output, y, 1e-13)
    close(our_lse, lse, 1e-13)
    dy = torch.randn_like(y)
    grads = kernel.backward(dy, q, k, v, output, our_lse, band)
    plain_terms = [float(x.detach().abs().max()) for x in exact]
    for gradient, plain in zip(grads, torch.autograd.grad(y, exact, dy), strict=True):
        error = float((gradient - plain).abs().max())
        assert error <= 1e-13 * max(float(plain.abs().max()), *plain_terms)  # terms of one score cancel


@pytest.mark.parametrize(
    ("kernel", "dtype", "dv"),
    [
        (FlashAttention(0.1), torch.bfloat16, 64),
        (MemoryEfficient(0.1), torch.float32, 64),
        (MemoryEfficient(0.1), torch.float32, 48),
    ],
)
@pytest.mark.parametrize("band", [FULL, Band(8, 30)])
def test_cuda_kernels_get_valid_arguments(kernel: Kernel, dtype: torch.dtype, dv: int, band: Band) -> None:
    """Their arguments and shapes only, on the meta device."""
    shapes = ((48, 8, 64), (40, 2, 64), (40, 2, dv))
    q, k, v = (torch.empty(2, n, h, d, dtype=dtype, device="meta").transpose(1, 2) for n, h, d in shapes)
    y, lse = kernel.forward(q, k, v, band)
    assert (y.shape, y.dtype) == ((2, 8, 48, dv), dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
    grads = kernel.backward(torch.empty_like(y), q, k, v, y, lse, band)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, dtype) for x in (q, k, v)]


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=30)
def test_attention_over_blocks_adds_up(n: int, cut: int, explicit: bool, grouped: bool) -> None:
    torch.manual_seed(n)
    m = cut + 3
    q, k, v = (torch.randn(2, h, s, 8).double() for h, s in ((4, n), (2, m), (2, m)))
    if not grouped:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    full, whole_lse = formula(exact[0], exact[1], exact[2], FULL)
    kernel = kernel_for(q, v, HALF, explicit)
    blocks = [slice(0, cut), slice(cut, m)]
    y, lse = kernel.forward(q, k[:, :, blocks[0]], v[:, :, blocks[0]], FULL)
    add_block(y, lse, *kernel.forward(q, k[:, :, blocks[1]], v[:, :, blocks[1]], FULL))
    close(y, full, 1e-13)
    close(lse, whole_lse, 1e-13)
    dy = torch.randn_like(q)
    parts = [kernel.backward(dy, q, k[:, :, b], v[:, :, b], y, lse, FULL) for b in blocks]
    dq, dk, dv = torch.autograd.grad(full, exact, dy)
    close(parts[0][0] + parts[1][0], dq, 1e-13)
    close(torch.cat([p[1] for p in parts], 2), dk, 1e-13)
    close(torch.cat([p[2] for p in parts], 2), dv, 1e-13)


def test_scores_far_apart_overflow_nothing() -> None:
    q = torch.full((1, 1, 2, 8), 20.0)  # scores of +-1131, and exp overflows at 89
    k = torch.cat([-q, q], 2)
    v = torch.arange(4.0).repeat_interleave(8).reshape(1, 1, 4, 8)
    for order in ([0, 2], [2, 0]):
        for explicit in (False, True):
            kernel = kernel_for(q, v, HALF, explicit)
            parts = [kernel.forward(q, k[:, :, i : i + 2], v[:, :, i : i + 2], FULL) for i in order]
            (y, lse), other = parts
            add_block(y, lse, *other)
            close(y, torch.full_like(y, 2.5).double(), 1e-4)  # the log-sum-exp has float32's 24 bits


@pytest.mark.parametrize("sink", [-700.0, -3.0, 0.0, 5.0, 700.0])
def test_sinks_far_from_the_scores_overflow_nothing(sink: float) -> None:
    q, k, v = (torch.randn(1, 2, 3, 8).double() for _ in range(3))
    sinks = torch.tensor([sink, 0.5], dtype=torch.float64)
    y, lse = add_sinks(*kernel_for(q, v, HALF).forward(q, k, v, CAUSAL), sinks)
    extra = torch.cat([torch.zeros(1, 2, 1, 8).double(), v], 2)  # the sink's value is zero
    s = (q @ k.transpose(2, 3) * HALF.scale).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    s = torch.cat([sinks.view(1, 2, 1, 1).expand(1, 2, 3, 1), s], -1).requires_grad_()
    plain = s.softmax(-1) @ extra
    close(y, plain, 1e-13)
    dy = torch.randn_like(y)
    (ds,) = torch.autograd.grad(plain, s, dy)
    close(sinks_gradient(dy, y, lse, sinks), ds[..., 0].sum((0, 2)), 1e-13)


@pytest.mark.parametrize(("n", "kv_heads"), [(3, 1), (4 * TILE + 9, 2)])
def test_dropout_in_a_block_is_dropout_of_its_probabilities(n: int, kv_heads: int) -> None:
    torch.manual_seed(n)
    q, k, v = (torch.randn(2, h, n, 8).double().requires_grad_() for h in (2, kv_heads, kv_heads))
    dropout = DropoutMask(torch.rand(2, 2, n, n) < 0.7, 1 / 0.7)
    y, lse = formula(q, k, v, CAUSAL, factors=dropout.mask.double() * dropout.scale)
    kernel = kernel_for(q, v, HALF, dropout=dropout)
    with torch.no_grad():
        output, our_lse = kernel.forward(q, k, v, CAUSAL)
        close(output, y, 1e-13)
        close(our_lse, lse, 1e-13)
        dy = torch.randn_like(y)
        grads = kernel.backward(dy, q, k, v, output, our_lse, CAUSAL)
    for gradient, plain in zip(grads, torch.autograd.grad(y, [q, k, v], dy), strict=True):
        close(gradient, plain, 1e-13)


def test_many_heads_in_tiles_are_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles with a range of the key heads each, and a rest."""
    monkeypatch.setattr("stretto.engine.kernels.SCORES", 3 * 2 * 20 * 20)
    q, k, v = (torch.randn(2, h, 20, 8).double().requires_grad_() for h in (8, 4, 4))
    y, lse = formula(q, k, v, CAUSAL)
    kernel = kernel_for(q, v, HALF, explicit=True)
    with torch.no_grad():
        output, our_lse = kernel.forward(q, k, v, CAUSAL)
        dy = torch.randn_like(y)
        grads = kernel.backward(dy, q, k, v, output, our_lse, CAUSAL)
    close(output, y, 1e-13)
    close(our_lse, lse, 1e-13)
    for gradient, plain in zip(grads, torch.autograd.grad(y, [q, k, v], dy), strict=True):
        close(gradient, plain, 1e-13)


def scores_formed(n: int, band: Band) -> int:
    """Return the number of scores that the formula computes."""
    elements = 0
    plain = torch.Tensor.amax

    def count(x: Tensor, dim: int, keepdim: bool) -> Tensor:
        nonlocal elements
        elements += x.numel()
        return plain(x, dim, keepdim)

    x = torch.randn(1, 1, n, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "amax", count)
        NaiveAttention(HALF).forward(x, x, x, band)
    return elements


def test_scores_outside_the_band_are_not_computed() -> None:
    n = 8 * TILE
    assert scores_formed(n, FULL) == n * n
    assert scores_formed(n, CAUSAL) == n * (n + TILE) // 2
    assert scores_formed(n, Band(0, TILE + 1)) == n * 2 * TILE - TILE * TILE
