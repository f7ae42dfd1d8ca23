"""Attention in rounds that cover each visible score once; what is kept and what is sent."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ranks import on_ranks
from stretto.engine.documents import DocumentStarts
from stretto.engine.kernels import ScoreOptions
from stretto.engine.models.causal import CausalAttention
from stretto.engine.parallel.context import ring as ring_attention
from stretto.engine.parallel.context.ring import RingMember
from stretto.engine.parallel.context.style import ContextAttention
from stretto.engine.parallel.mesh import Mesh
from stretto.engine.parallel.tensor.sequence import zigzag
from stretto.engine.parallel.traffic import traffic
from stretto.layout.layout import Layout

# ---------------------------------------------------------------------- the rounds


def ring(index: int, size: int, window: int | None = None) -> RingMember:
    no_group: Any = None  # nothing is sent
    return RingMember(group=no_group, index=index, size=size, scores=ScoreOptions(1.0, window=window))


@given(st.integers(2, 7), st.integers(1, 4), st.none() | st.integers(1, 60))
@settings(deadline=None)
def test_rounds_cover_each_visible_score_once(size: int, chunk: int, window: int | None) -> None:
    n, s = 2 * chunk, 2 * chunk * size
    seen = torch.zeros(s, s, dtype=torch.int64)
    for index in range(size):
        mine, work = zigzag(s, size, index), list[int]()
        for step, here in enumerate(ring(index, size, window).rounds(n)):
            assert here.owner == (index + step) % size
            pairs = torch.zeros(n, n, dtype=torch.int64)
            for piece in here.pieces:
                part = pairs[piece.queries, piece.keys]
                visible = piece.band.mask(*part.shape, torch.device("cpu"))
                assert part.numel(), "a piece without scores"
                assert visible.any(1).all(), "a query that sees no key"
                part += visible
            assert pairs[here.queries, here.keys].sum() == pairs.sum(), "keys that are not sent"
            seen[mine[:, None], zigzag(s, size, here.owner)[None]] += pairs
            work.append(int(pairs.sum()))
        if window is None or window >= s:
            assert work == [n * (n + 1) // 2, *[n * n // 2] * (size - 1)], "ranks wait for each other"
    visible = torch.ones(s, s, dtype=torch.int64).tril()
    assert torch.equal(seen, visible if window is None else visible.triu(1 - window))


@given(st.integers(2, 4), st.integers(1, 4), st.none() | st.integers(1, 20), st.data())
@settings(deadline=None)
def test_rounds_cover_each_visible_score_inside_documents_once(
    size: int, chunk: int, window: int | None, data: st.DataObject
) -> None:
    n, s, b = 2 * chunk, 2 * chunk * size, 2
    length = s - data.draw(st.integers(0, min(s - 1, 2 * size)))  # padding behind the sample
    firsts = data.draw(st.lists(st.sets(st.integers(0, length - 1)), min_size=b, max_size=b))
    begins = torch.zeros(b, length, dtype=torch.int64)
    for row, some in zip(begins, firsts, strict=True):
        row[list(some)] = torch.tensor(list(some), dtype=torch.int64)
    begins = begins.cummax(1).values
    seen = torch.zeros(b, s, s, dtype=torch.int64)
    for index in range(size):
        mine = zigzag(s, size, index)
        for here in replace(ring(index, size, window), documents=DocumentStarts(begins)).rounds(n):
            pairs = torch.zeros(b, n, n, dtype=torch.int64)
            for piece in here.pieces:
                part = pairs[piece.rows, piece.queries, piece.keys]
                visible = piece.band.mask(*part.shape[1:], torch.device("cpu"))
                assert part.numel(), "a piece without scores"
                assert visible.any(1).all(), "a query that sees no key"
                part += visible
            assert pairs[:, here.queries, here.keys].sum() == pairs.sum(), "keys that are not sent"
            seen[:, mine[:, None], zigzag(s, size, here.owner)[None]] += pairs
    of = begins[:, torch.arange(s).clamp(max=length - 1)]
    visible = torch.ones(s, s, dtype=torch.int64).tril()
    visible = visible if window is None else visible.triu(1 - window)
    assert torch.equal(seen, visible * (of.unsqueeze(1) == of.unsqueeze(2)))


def test_blocks_out_of_the_window_are_computed_by_nobody() -> None:
    n, size = 8, 4
    for index in range(size):
        owners = {here.owner for here in ring(index, size, window=3).rounds(n) if here.pieces}
        assert owners == {index, index - 1, index + 1} & set(range(size)), "halves that touch"


@dataclass(frozen=True, kw_only=True)
class RecordingRing(RingMember):
    """A ring that records its messages instead of sending them."""

    log: list[str] = field(default_factory=list[str])

    def pass_on(self, going: Tensor, coming: Tensor) -> list[Any]:
        self.log.append(f"start {len(going)} for {len(coming)}")
        return [self]

    def wait(self) -> None:
        self.log.append("wait")


def test_the_next_block_is_sent_while_one_is_used() -> None:
    no_group: Any = None
    middle = RecordingRing(group=no_group, index=1, size=4, scores=ScoreOptions(1.0))
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
    last = RecordingRing(group=no_group, index=2, size=3, scores=ScoreOptions(1.0))

    class Nothing:
        def backward(self, q: Tensor, k: Tensor, **_: object) -> tuple[Tensor, Tensor, Tensor]:
            last.log.append(f"{q.shape[2]} x {k.shape[2]}")
            return q, k, k

    monkeypatch.setattr(ring_attention, "kernel_for", lambda *_: Nothing())
    q = torch.zeros(1, 1, 4, 8)
    ring_attention.Backward(q, q, torch.zeros(4, 1, 1, 16), q, q[..., 0], last, None).run()
    keys, gradients = "start 4 for 2", "start 2 for 4"
    assert last.log == [
        *(keys, "2 x 2", "wait"),  # below the diagonal of its own block
        *("start 2 for 2", "4 x 2", gradients, "wait"),  # keys of rank 0; their gradient goes on
        *("4 x 2", "wait", "start 4 for 4"),  # keys of rank 1, whose gradient came meanwhile
        *("2 x 2", "2 x 2", "wait"),  # triangles, while its own gradient comes
    ]


# ---------------------------------------------------------------------- on ranks: kept and sent


def saved_bytes(module: nn.Module, inputs: list[Tensor]) -> int:
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
    module = ContextAttention("ring", n * size).replace_module(CausalAttention(0.0), mesh)
    q_bytes, kv_bytes, lse = 4 * n * heads * 8, 2 * 4 * n * kv_heads * 8, 4 * n * heads
    for kind in ("fused", "turned"):
        saved = saved_bytes(module, given_to(kind, n, heads, kv_heads))
        assert saved == 2 * q_bytes + kv_bytes + lse, kind  # q, k, v, the output, the log-sum-exp
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
            module = ContextAttention(method, 8).replace_module(core, mesh)
            with torch.autocast("cpu", torch.bfloat16):
                y = module(*(torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)))
            assert y.dtype == torch.bfloat16, (method, explicit)
            y.sum().backward()
    mesh.close()


def test_under_autocast_attention_runs_in_16_bits() -> None:
    on_ranks(2, autocast)
