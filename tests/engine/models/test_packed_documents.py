"""Samples that hold several documents equal the documents alone: loss and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_shapes import EXPERTS, ROUTERS, SHAPES
from torch import Tensor

from closeness import check_close
from stretto.engine import kernels
from stretto.engine.documents import DocumentStarts, Packing, share_packing
from stretto.engine.models.build import build
from stretto.engine.models.causal import CausalAttention
from stretto.engine.models.language import IGNORED, LanguageModel
from stretto.engine.parallel.recompute import recompute
from stretto.job.attention import AttentionShape, RopeScaling
from stretto.job.shape import ModelShape

LENGTH = 24
LLAMA = SHAPES["llama-grouped"]


def windowed(shape: ModelShape, **attention: Any) -> ModelShape:
    return replace(shape, attention=replace(shape.attention, **attention))


CASES = {
    **SHAPES,
    **{name: EXPERTS[name] for name in ("mixtral", "llama-experts", "gpt-experts")},
    **ROUTERS,
    "mistral": windowed(LLAMA, window=5),
    "gemma2": ModelShape(
        family="gemma2",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        vocab=51,
        sequence=24,
        attention=AttentionShape(window=4, full_every=2, softcap=3.0, query_scale=10.0),
    ),
    "qwen3": ModelShape(family="qwen3", layers=2, hidden=32, heads=4, kv_heads=2, vocab=51, sequence=24),
    "sinks": windowed(LLAMA, sinks=True),
    "yarn": replace(LLAMA, rope=RopeScaling(type="yarn", factor=4.0, original_positions=8)),
}


def begins_of(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the start of the document of each position, from the lengths of the documents of each sample."""
    rows = list[list[int]]()
    for row in lengths:
        edges = [0]
        for length in row:
            edges.append(edges[-1] + length)
        rows.append([first for first, last in pairwise(edges) for _ in range(first, last)])
    return torch.tensor(rows)


def targets_of(ids: Tensor, begins: Tensor) -> Tensor:
    """The next token, but none across the edge of a document."""
    targets = ids.roll(-1, 1)
    targets[:, :-1][begins.diff(dim=1) != 0] = IGNORED
    targets[:, -1] = IGNORED
    return targets


def model_of(shape: ModelShape) -> LanguageModel:
    torch.manual_seed(4)
    if shape.moe is not None:  # the balance loss is of a sample, whatever documents it holds
        shape = replace(shape, moe=replace(shape.moe, balance=0.0))
    model = build(shape).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def packed_loss(model: LanguageModel, ids: Tensor, begins: Tensor) -> Tensor:
    """With all documents at once."""
    packing = Packing()
    share_packing(model, packing)
    packing.documents = DocumentStarts(begins)
    loss = model.loss(model(ids), targets_of(ids, begins)) + model.auxiliary()
    packing.documents = DocumentStarts(begins[:1])  # another microbatch may come before the backward
    return loss


def separate_loss(model: LanguageModel, ids: Tensor, begins: Tensor) -> Tensor:
    """With each document alone."""
    loss = torch.zeros((), dtype=torch.float64)
    for row, starts in zip(ids, begins, strict=True):
        edges = [*starts.unique().tolist(), len(row)]
        for first, last in pairwise(edges):
            document = row[None, first:last]
            loss = (
                loss
                + model.loss(model(document), targets_of(document, torch.zeros_like(document)))
                + model.auxiliary()
            )
    return loss


def gradients(loss: Tensor, model: LanguageModel) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(shape: ModelShape, lengths: Sequence[Sequence[int]], label: str, explicit: bool = False) -> None:
    begins = begins_of(lengths)
    torch.manual_seed(7)
    ids = torch.randint(shape.vocab, begins.shape)
    model, alone = model_of(shape), model_of(shape)
    for module in model.modules():
        if isinstance(module, CausalAttention):
            module.explicit = explicit
    packed, separate = packed_loss(model, ids, begins), separate_loss(alone, ids, begins)
    check_close(packed, separate.detach(), 1e-12, f"loss of {label}")
    wanted = gradients(separate, alone)
    got = gradients(packed, model)
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        check_close(gradient, wanted[name], 1e-11, f"{label}: gradient of {name}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("explicit", [False, True])
def test_packed_documents_equal_documents_alone(name: str, explicit: bool) -> None:
    size = CASES[name].sequence
    lengths = [[size], [1] * 3 + [size - 3], [size // 2, size - size // 2], [size - 8, 7, 1]]
    check(CASES[name], lengths, name, explicit)


@st.composite
def some_lengths(draw: st.DrawFn) -> list[list[int]]:
    edges = st.sets(st.integers(1, LENGTH - 1), max_size=5)
    rows = draw(st.lists(edges, min_size=1, max_size=3))
    return [[b - a for a, b in pairwise([0, *sorted(row), LENGTH])] for row in rows]


@given(some_lengths(), st.sampled_from(["mistral", "gpt", "gpt-oss", "deepseek-v3"]))
@settings(max_examples=25)
def test_any_edges(lengths: list[list[int]], name: str) -> None:
    check(CASES[name], lengths, f"{name} with {lengths}")


def test_recomputation_sees_the_documents_of_its_microbatch() -> None:
    begins = begins_of([[5, 7, 12], [24]])
    ids = torch.randint(LLAMA.vocab, begins.shape, generator=torch.Generator().manual_seed(2))
    model, packing = model_of(LLAMA), Packing()
    wanted = gradients(packed_loss(model, ids, begins), model)
    share_packing(model, packing)
    for block in model.blocks:
        recompute(block)
    packing.documents = DocumentStarts(begins)
    loss = model.loss(model(ids), targets_of(ids, begins))
    got = gradients(loss, model)  # as the pipeline does before a backward, the documents are those of it
    for name, gradient in got.items():
        check_close(gradient, wanted[name], 1e-12, name)


def test_dynamic_frequencies_depend_on_the_sample() -> None:
    """They stretch with the length of what the model is given, which documents do not change."""
    dynamic = replace(LLAMA, rope=RopeScaling(type="dynamic", factor=4.0, original_positions=8))
    begins = begins_of([[10, 14]])
    ids = torch.randint(LLAMA.vocab, begins.shape)
    model, alone = model_of(dynamic), model_of(dynamic)
    for module in alone.modules():
        if hasattr(module, "length"):
            module.length = LENGTH
            module.positions = torch.arange(LENGTH)
    packed = packed_loss(model, ids, begins)
    wanted = torch.zeros((), dtype=torch.float64)
    for first, last in ((0, 10), (10, 24)):
        document = ids[:, first:last]
        for module in alone.modules():
            if hasattr(module, "length"):
                module.positions = torch.arange(last - first)
        wanted = wanted + alone.loss(alone(document), targets_of(document, torch.zeros_like(document)))
    check_close(packed, wanted.detach(), 1e-12, "loss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dv", [8, 6])
def test_other_types(dtype: torch.dtype, dv: int) -> None:
    begins = begins_of([[9, 1, 14], [4, 4, 16]])
    torch.manual_seed(1)
    q, k, v, dy = (
        torch.randn(2, h, LENGTH, d, dtype=torch.float64) for h, d in ((4, 8), (2, 8), (2, dv), (4, dv))
    )
    results = list[list[Tensor]]()
    for kind in (torch.float64, dtype):
        core = CausalAttention(0.0, window=6)
        core.packing.documents = DocumentStarts(begins)
        leaves = [t.to(dtype).to(kind).requires_grad_() for t in (q, k, v)]
        y = core(*leaves)
        assert y.dtype == kind
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(dtype).to(kind))])
    for computed, reference in zip(results[1], results[0], strict=True):
        assert computed.dtype == dtype
        check_close(computed.double(), reference, 2e-6 if dtype == torch.float32 else 2e-2, f"{dtype}")


def test_pieces_hold_no_work_between_documents() -> None:
    """Equal rows are one piece, and no score between documents is computed."""
    documents = DocumentStarts(begins_of([[8, 16], [8, 16], [24], [8, 16]]))
    pieces = documents.pieces(LENGTH, None)
    assert sorted((p.rows.start, p.rows.stop, p.queries.start, p.queries.stop) for p in pieces) == [
        *((0, 2, 0, 8), (0, 2, 8, 24), (2, 3, 0, 24), (3, 4, 0, 8), (3, 4, 8, 24)),
    ]
    assert all(piece.band.triangle(24, 24) and piece.queries == piece.keys for piece in pieces)


class _Varlen:
    """FlashAttention's kernels for runs laid end to end, by their definition."""

    def __init__(self) -> None:
        self.calls = 0

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, cuts: Tensor, limits: Any) -> tuple[Tensor, Tensor]:
        scale, window = limits["scale"], limits["window_size_left"]
        ys, sums = list[Tensor](), list[Tensor]()
        for first, last in pairwise(cuts.tolist()):
            n = last - first
            heads = [t[first:last].transpose(0, 1) for t in (q, k, v)]
            heads[1:] = [t.repeat_interleave(q.shape[1] // k.shape[1], 0) for t in heads[1:]]
            hidden = kernels.Band(0, None if window < 0 else window + 1).mask(n, n, q.device).logical_not_()
            scores = (heads[0] @ heads[1].transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
            ys.append((scores.softmax(-1) @ heads[2]).transpose(0, 1))
            sums.append(scores.logsumexp(-1))
        return torch.cat(ys), torch.cat(sums, 1)

    def _flash_attention_forward(self, q, k, v, cuts, cuts_k, most, most_k, p, causal, debug, **limits):
        self.calls += 1
        assert cuts is cuts_k
        assert cuts.dtype == torch.int32
        assert most == most_k == max(2, int(cuts.diff().max()))
        assert (p, causal, debug, limits["window_size_right"]) == (0.0, True, False, 0)
        return *self._plain(q, k, v, cuts, limits), None, None, None

    def _flash_attention_backward(
        self, dy, q, k, v, y, lse, cuts, cuts_k, most, most_k, p, causal, seed, unused, **limits
    ):
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            again, sums = self._plain(*leaves, cuts, limits)
            assert torch.equal(sums.detach(), lse)
            assert torch.equal(again.detach(), y)
            return torch.autograd.grad(again, leaves, dy)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [[[9, 1, 14], [4, 4, 16]], [[1] * LENGTH]])
def test_flash_attention_takes_all_documents_in_one_call(
    window: int | None, lengths: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    b = len(lengths)
    sizes = ((4, LENGTH, 8), (2, LENGTH, 8), (2, LENGTH, 8), (4, LENGTH, 8))
    q, k, v, dy = (torch.randn(b, *size, dtype=torch.float64) for size in sizes)
    documents, varlen = DocumentStarts(begins_of(lengths)), _Varlen()
    results = list[list[Tensor]]()
    for kernel in (kernels.CpuFlash(0.3), kernels.FlashAttention(0.3)):
        if isinstance(kernel, kernels.FlashAttention):
            monkeypatch.setattr(kernels, "_aten", varlen)
        y, lse = documents.forward(kernel, q, k, v, window)
        grads = documents.backward(kernel, dy=dy, q=q, k=k, v=v, y=y, lse=lse, window=window)
        results.append([y, lse, *grads])
    assert varlen.calls == 1
    for name, computed, reference in zip(("y", "lse", "dq", "dk", "dv"), results[1], results[0], strict=True):
        check_close(computed, reference, 1e-12, name, terms=1.0)
