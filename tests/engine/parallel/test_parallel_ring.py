"""Attention in blocks: kernels beside the formula, blocks that add up, rounds that cover each score once;
what is kept and what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ranks import on_ranks
from stretto.engine.models.causal import CausalAttention
from stretto.engine.parallel.context import ring as ring_attention
from stretto.engine.parallel.context.kernels import TILE, DropoutMask, Efficient, Flash, Kernel, kernel_for
from stretto.engine.parallel.context.ring import Ring, add_block
from stretto.engine.parallel.context.style import ContextAttention
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.sequence import zigzag
from stretto.engine.parallel.traffic import traffic
from stretto.layout.layout import Layout


def formula(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention as it is written, and the log-sum-exp of its scores."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).to(scores).triu(1)
    p = scores.softmax(-1)
    return (p if factors is None else p * factors) @ v, scores.logsumexp(-1)


def strided(heads: int, n: int, batch: int, dtype: torch.dtype) -> Tensor:
    """[b, heads, n, 8] as attention gets it: a view of wider rows."""
    wide = torch.randn(batch, n + 3, heads + 2, 8, dtype=torch.float64).to(dtype)
    return wide[:, 2 : n + 2, 1 : heads + 1].transpose(1, 2)


def close(ours: Tensor, plain: Tensor, tolerance: float) -> None:
    plain = plain.detach()
    scale = float(plain.abs().max()) or 1.0
    assert float((ours.detach().double() - plain).abs().max()) <= tolerance * scale


TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "m", "causal"),
    [(4, 4, 7, 7, True), (4, 2, 5, 9, False), (6, 1, 40, 40, True), (2, 2, 1, 3, False), (4, 2, 1, 1, True)],
)
def test_kernels_are_the_formula(
    dtype: torch.dtype, explicit: bool, heads: int, kv_heads: int, n: int, m: int, causal: bool
) -> None:
    torch.manual_seed(n)
    q, k, v = strided(heads, n, 2, dtype), strided(kv_heads, m, 2, dtype), strided(kv_heads, m, 2, dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    y, lse = formula(exact[0], exact[1], exact[2], causal)
    kernel = kernel_for(q, explicit)
    ours, our_lse = kernel.forward(q, k, v, causal)
    close(ours, y, TOLERANCE[dtype])
    close(our_lse, lse, TOLERANCE[dtype])
    dy = strided(heads, n, 2, dtype)
    grads = torch.autograd.grad(y, exact, dy.double())
    for ours_d, plain in zip(
        kernel.backward(dy, q, k, v, ours.to(dtype), our_lse, causal), grads, strict=True
    ):
        assert ours_d.shape == plain.shape
        close(ours_d, plain, 3 * TOLERANCE[dtype])


@pytest.mark.parametrize(("kernel", "dtype"), [(Flash(), torch.bfloat16), (Efficient(), torch.float32)])
def test_cuda_kernels_get_valid_arguments(kernel: Kernel, dtype: torch.dtype) -> None:
    """Their arguments and shapes only, on the meta device."""
    q, k, v = (torch.empty(2, n, h, 64, dtype=dtype, device="meta") for n, h in ((48, 8), (40, 2), (40, 2)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y, lse = kernel.forward(q, k, v, False)
    assert (y.shape, y.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)
    grads = kernel.backward(torch.empty_like(y), q, k, v, y, lse, False)
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
    whole, whole_lse = formula(exact[0], exact[1], exact[2], False)
    kernel = kernel_for(q, explicit)
    blocks = [slice(0, cut), slice(cut, m)]
    y, lse = kernel.forward(q, k[:, :, blocks[0]], v[:, :, blocks[0]], False)
    add_block(y, lse, *kernel.forward(q, k[:, :, blocks[1]], v[:, :, blocks[1]], False))
    close(y, whole, 1e-13)
    close(lse, whole_lse, 1e-13)
    dy = torch.randn_like(q)
    parts = [kernel.backward(dy, q, k[:, :, b], v[:, :, b], y, lse, False) for b in blocks]
    dq, dk, dv = torch.autograd.grad(whole, exact, dy)
    close(parts[0][0] + parts[1][0], dq, 1e-13)
    close(torch.cat([p[1] for p in parts], 2), dk, 1e-13)
    close(torch.cat([p[2] for p in parts], 2), dv, 1e-13)


def test_scores_far_apart_overflow_nothing() -> None:
    q = torch.full((1, 1, 2, 8), 20.0)  # scores of +-1131, and exp overflows at 89
    k = torch.cat([-q, q], 2)
    v = torch.arange(4.0).repeat_interleave(8).reshape(1, 1, 4, 8)
    for order in ([0, 2], [2, 0]):
        for explicit in (False, True):
            kernel = kernel_for(q, explicit)
            parts = [kernel.forward(q, k[:, :, i : i + 2], v[:, :, i : i + 2], False) for i in order]
            (y, lse), other = parts
            add_block(y, lse, *other)
            close(y, torch.full_like(y, 2.5).double(), 1e-4)  # the log-sum-exp has float32's 24 bits


@pytest.mark.parametrize(("n", "kv_heads"), [(3, 1), (TILE + 9, 2)])
def test_dropout_in_a_block_is_dropout_of_its_probabilities(n: int, kv_heads: int) -> None:
    torch.manual_seed(n)
    q, k, v = (torch.randn(2, h, n, 8).double().requires_grad_() for h in (2, kv_heads, kv_heads))
    dropout = DropoutMask(torch.rand(2, 2, n, n) < 0.7, 1 / 0.7)
    y, lse = formula(q, k, v, True, dropout.mask.double() * dropout.scale)
    kernel = kernel_for(q, dropout=dropout)
    with torch.no_grad():
        ours, our_lse = kernel.forward(q, k, v, True)
        close(ours, y, 1e-13)
        close(our_lse, lse, 1e-13)
        dy = torch.randn_like(y)
        grads = kernel.backward(dy, q, k, v, ours, our_lse, True)
    for one, plain in zip(grads, torch.autograd.grad(y, [q, k, v], dy), strict=True):
        close(one, plain, 1e-13)


def scores(kernel: Kernel, n: int, causal: bool) -> int:
    """How many scores the written-out kernel forms."""
    made = 0
    plain = torch.Tensor.logsumexp

    def count(x: Tensor, dim: int) -> Tensor:
        nonlocal made
        made += x.numel()
        return plain(x, dim)

    x = torch.randn(1, 1, n, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "logsumexp", count)
        kernel.forward(x, x, x, causal)
    return made


def test_scores_above_the_diagonal_are_not_computed() -> None:
    n = 8 * TILE
    kernel = kernel_for(torch.empty(1, 1, 1, 8), explicit=True)
    assert scores(kernel, n, causal=False) == n * n
    assert scores(kernel, n, causal=True) == n * (n + TILE) // 2


# ---------------------------------------------------------------------- the rounds


def ring(index: int, size: int) -> Ring:
    return Ring(None, index, size)  # type: ignore[arg-type]  # nothing is sent


@given(st.integers(2, 7), st.integers(1, 4))
@settings(deadline=None)
def test_rounds_cover_each_causal_score_once_and_cost_the_same(size: int, chunk: int) -> None:
    n, s = 2 * chunk, 2 * chunk * size
    seen = torch.zeros(s, s, dtype=torch.int64)
    for index in range(size):
        mine, work = zigzag(s, size, index), list[int]()
        for step, here in enumerate(ring(index, size).rounds(n)):
            assert here.owner == (index + step) % size
            assert here.causal == (step == 0)
            queries, keys = mine[here.queries], zigzag(s, size, here.owner)[here.keys]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int64)
            if here.causal:
                pairs.tril_()
            seen[queries[:, None], keys[None]] += pairs
            work.append(int(pairs.sum()))
        assert work == [n * (n + 1) // 2, *[n * n // 2] * (size - 1)]
    assert torch.equal(seen, torch.ones(s, s, dtype=torch.int64).tril())


@dataclass(frozen=True)
class RecordingRing(Ring):
    """A ring that records its messages instead of sending them."""

    log: list[str] = field(default_factory=list[str])

    def pass_on(self, going: Tensor, coming: Tensor) -> list[Any]:
        self.log.append(f"start {len(going)} for {len(coming)}")
        return [self]

    def wait(self) -> None:
        self.log.append("wait")


def test_the_next_block_is_sent_while_one_is_used() -> None:
    no_group: Any = None
    middle = RecordingRing(no_group, 1, 4)
    for block, here in zip(middle.blocks(torch.zeros(4, 2)), middle.rounds(4), strict=True):
        middle.log.append(f"use {len(block)} of {here.owner}")
    assert middle.log == [
        *("start 4 for 4", "use 4 of 1", "wait"),  # the rank before needs all of this, as this of the next
        *("start 4 for 4", "use 4 of 2", "wait"),
        *("start 4 for 2", "use 4 of 3", "wait"),  # of the first rank only the lower keys matter here
        "use 2 of 0",
    ]


def test_ring_backward_overlaps_compute_with_every_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    no_group: Any = None
    last = RecordingRing(no_group, 2, 3)

    class Nothing:
        def backward(self, q: Tensor, k: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
            last.log.append(f"{q.shape[2]} x {k.shape[2]}")
            return q, k, k

    monkeypatch.setattr(ring_attention, "kernel_for", lambda *_: Nothing())
    q = torch.zeros(1, 1, 4, 8)
    ring_attention.Backward(q, q, torch.zeros(4, 2, 1, 1, 8), q, q[..., 0], last, None).run()
    keys, gradients = "start 4 for 2", "start 2 for 4"
    assert last.log == [
        *(keys, "2 x 2", "wait"),  # below the diagonal of its own block
        *("start 2 for 2", "4 x 2", gradients, "wait"),  # keys of rank 0; their gradient goes on
        *("4 x 2", "wait", "start 4 for 4"),  # keys of rank 1, whose gradient came meanwhile
        *("2 x 2", "2 x 2", "wait"),  # triangles, while its own gradient comes
    ]


# ---------------------------------------------------------------------- on ranks: kept and sent


def kept(module: nn.Module, inputs: list[Tensor]) -> int:
    """Bytes of the different memories that a backward through the module needs."""
    results = dict[int, int]()

    def pack(t: Tensor) -> Tensor:
        results[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(*inputs)
    y.sum().backward()
    return sum(results.values())


def given_to(kind: str, n: int, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v [1, heads, n, 8] in float32: "fused" views of one product, "turned" with q and k apart from
    it.
    """
    fused = torch.randn(1, n, heads + 2 * kv_heads, 8).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in fused.split([heads, kv_heads, kv_heads], 2))
    return [q, k, v] if kind == "fused" else [1.0 * q, 1.0 * k, v]


def kept_and_sent() -> None:
    size = torch.distributed.get_world_size()
    mesh, n, heads, kv_heads = Mesh(Layout(cp=size)), 6, 4, 2
    module = ContextAttention("ring", n * size).swap(CausalAttention(0.0), mesh)
    q_bytes, kv_bytes, lse = 4 * n * heads * 8, 2 * 4 * n * kv_heads * 8, 4 * n * heads
    for kind in ("fused", "turned"):
        held = kept(module, given_to(kind, n, heads, kv_heads))
        assert held == 2 * q_bytes + kv_bytes + lse, kind  # q, k, v, the output, the log-sum-exp
    with traffic() as sent:
        y = module(*given_to("fused", n, heads, kv_heads))
    index, block = mesh.index("cp"), kv_bytes
    # to the rank before: the blocks of ranks behind it whole, of ranks before it half
    before = (index - 1) % size
    forward = sum(block if j > before else block // 2 for j in range(size) if j != before)
    assert sent.bytes == {"send": forward}
    with traffic() as sent:
        y.sum().backward()
    # and as many gradients as it has visited blocks, whole but for those of the first rank
    gradients = sum(block if j else block // 2 for j in range(size) if j != index)
    assert sent.bytes == {"send": forward + gradients}
    mesh.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_saved_and_sent_by_ring_attention(ranks: int) -> None:
    on_ranks(ranks, kept_and_sent)


def autocast() -> None:
    mesh = Mesh(Layout(cp=2))
    for method in ("ring", "ulysses"):
        for explicit in (False, True):
            core = CausalAttention(0.0, explicit)
            module = ContextAttention(method, 8).swap(core, mesh)
            with torch.autocast("cpu", torch.bfloat16):
                y = module(*(torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)))
            assert y.dtype == torch.bfloat16, (method, explicit)
            y.sum().backward()
    mesh.close()


def test_under_autocast_attention_runs_in_16_bits() -> None:
    on_ranks(2, autocast)
