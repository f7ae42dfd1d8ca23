"""Causal attention of every family beside the formula, written out in float64: outputs and all gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import check_close
from example_counts import scaled
from stretto.engine.models.attention import merge_heads
from stretto.engine.models.causal import CausalAttention
from stretto.engine.parallel.recompute import recompute


@dataclass(frozen=True)
class Case:
    n: int
    m: int
    heads: int = 2
    kv_heads: int = 2
    d: int = 4
    dv: int = 4
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False
    explicit: bool = False

    def core(self) -> CausalAttention:
        return CausalAttention(0.0, self.explicit, window=self.window, softcap=self.softcap, scale=self.scale)

    def inputs(self) -> list[Tensor]:
        torch.manual_seed(self.n)
        shapes = [
            (2, self.heads, self.n, self.d),
            (2, self.kv_heads, self.m, self.d),
            (2, self.kv_heads, self.m, self.dv),
            *([(self.heads,)] if self.sinks else []),
        ]
        return [(2 * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]


def formula(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention as the papers write it, one query at a time."""
    k, v = (t.repeat_interleave(case.heads // case.kv_heads, 1) for t in (k, v))
    rows = list[Tensor]()
    for i in range(case.n):
        last = case.m - case.n + i + 1
        first = max(0, last - case.window) if case.window else 0
        scores = (k[:, :, first:last] @ q[:, :, i].unsqueeze(-1)).squeeze(-1)
        scores = scores * (case.d**-0.5 if case.scale is None else case.scale)
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1).expand(2, -1, 1)], -1)
        p = scores.softmax(-1)[..., : last - first]
        rows.append((p.unsqueeze(-2) @ v[:, :, first:last]).squeeze(-2))
    return torch.stack(rows, 2)


def check(case: Case) -> None:
    inputs = case.inputs()
    output, plain = case.core()(*inputs), formula(case, *inputs)
    check_close(output, plain.detach(), 1e-12, f"{case}: output")
    dy = torch.randn_like(plain)
    q, k, v = (float(tensor.detach().abs().max()) for tensor in inputs[:3])
    scale = case.d**-0.5 if case.scale is None else case.scale
    # where a query sees one key, or nearly, gradients of scores cancel
    terms = max(10.0, scale * max(q, k) * v * float(dy.abs().max()) * case.dv)
    for name, mine, other in zip(
        ("q", "k", "v", "sinks"),
        torch.autograd.grad(output, inputs, dy),
        torch.autograd.grad(plain, inputs, dy),
        strict=False,
    ):
        check_close(mine, other, 1e-12, f"{case}: gradient of {name}", terms=terms)


CASES = [
    Case(7, 7),
    Case(1, 1),
    Case(1, 9, 4, 2),
    Case(3, 9, 4, 1, dv=2),
    Case(9, 9, window=1, sinks=True),
    Case(9, 9, 6, 2, d=6, window=4, softcap=2.0, scale=0.3),
    Case(5, 11, 2, 1, window=3, sinks=True, softcap=5.0),
    Case(12, 12, 4, 4, d=6, dv=4, scale=0.7),
    Case(1, 30, 4, 2, window=5, sinks=True),
]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_the_formula(case: Case, explicit: bool) -> None:
    check(Case(**{**vars(case), "explicit": explicit}))


@given(
    n=st.integers(1, 12),
    before=st.integers(0, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    d=st.integers(1, 6),
    dv=st.integers(1, 6),
    window=st.none() | st.integers(1, 24),
    softcap=st.none() | st.floats(0.5, 50.0),
    scale=st.none() | st.floats(0.05, 2.0),
    sinks=st.booleans(),
    explicit=st.booleans(),
)
@settings(deadline=None, max_examples=scaled(150))
def test_attention_is_the_formula_for_any_shape(
    n: int,
    before: int,
    kv_heads: int,
    group: int,
    d: int,
    dv: int,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    sinks: bool,
    explicit: bool,
) -> None:
    check(
        Case(
            n=n,
            m=n + before,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            d=d,
            dv=dv,
            window=window,
            softcap=softcap,
            scale=scale,
            sinks=sinks,
            explicit=explicit,
        )
    )


LONG = 3 * 64 + 5  # more than one tile of every kernel
LONG_CASES = [
    Case(LONG, LONG, 4, 2),
    Case(LONG, LONG, 4, 2, window=40),
    Case(LONG, LONG, 4, 2, window=90, sinks=True),
    Case(LONG, LONG, 4, 2, softcap=3.0),
    Case(LONG, LONG, 4, 2, window=40, softcap=3.0, sinks=True),
    Case(LONG, LONG, 4, 2, sinks=True),
    Case(LONG, LONG, 4, 4, d=6, dv=4),
    Case(70, LONG, 4, 2, window=80, sinks=True),
]


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_attention_over_many_tiles_is_the_formula(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_nothing_quadratic_is_kept_for_the_backward(case: Case) -> None:
    """q, k, v, the output, and a number for each query and head; a tile of scores at most while computing."""
    inputs = [x.detach().requires_grad_() for x in case.inputs()]
    saved_bytes = dict[int, int]()

    def pack(t: Tensor) -> Tensor:
        saved_bytes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = case.core()(*inputs)
    a_number_each = 2 * case.heads * case.n * y.element_size()
    assert sum(saved_bytes.values()) <= sum(x.nbytes for x in inputs) + y.nbytes + a_number_each


@pytest.mark.parametrize("case", [*CASES, *LONG_CASES], ids=str)
def test_the_output_is_merged_without_a_copy(case: Case) -> None:
    y = case.core()(*case.inputs())
    assert merge_heads(y).untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_keys_before_the_window_get_no_gradient() -> None:
    case = Case(2, 30, window=5)
    inputs = case.inputs()
    case.core()(*inputs).sum().backward()
    for x in inputs[1:]:
        assert x.grad is not None
        assert not x.grad[:, :, :24].any()
        assert x.grad[:, :, 24:].any(-1).all()


@pytest.mark.parametrize("case", [case for case in CASES if case.sinks], ids=str)
def test_recomputed_attention_has_the_same_gradients(case: Case) -> None:
    inputs = case.inputs()
    plain, again = case.core(), case.core()
    recompute(again)
    dy = torch.randn_like(y := plain(*inputs))
    recomputed = again(*inputs)
    assert torch.equal(recomputed, y)
    for mine, other in zip(
        torch.autograd.grad(recomputed, inputs, dy), torch.autograd.grad(y, inputs, dy), strict=True
    ):
        assert torch.equal(mine, other)


def test_under_autocast_attention_runs_in_16_bits() -> None:
    for case in (Case(9, 9, window=4, sinks=True), Case(9, 9, softcap=2.0), Case(5, 9), Case(9, 9, dv=3)):
        inputs = [x.detach().float().requires_grad_() for x in case.inputs()]
        with torch.autocast("cpu", torch.bfloat16):
            y = case.core()(*inputs)
        assert y.dtype == torch.bfloat16, case
        y.sum().backward()
        assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in inputs)
        exact = formula(case, *(x.detach().double() for x in inputs))
        assert float((y.detach() - exact).abs().max()) < 0.03 * float(exact.abs().max())


def test_frozen_sinks_get_no_gradient() -> None:
    case = Case(9, 9, window=4, sinks=True)
    inputs = case.inputs()
    inputs[3] = inputs[3].detach()
    case.core()(*inputs).sum().backward()
    assert inputs[3].grad is None
    assert inputs[0].grad is not None
