"""Causal attention of every family beside the formula, written out in float64: outputs and all gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from closeness import check_close
from stretto.engine.models.causal import CausalAttention


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
    ours, plain = case.core()(*inputs), formula(case, *inputs)
    check_close(ours, plain.detach(), 1e-12, f"{case}: output")
    dy = torch.randn_like(plain)
    for name, mine, other in zip(
        ("q", "k", "v", "sinks"),
        torch.autograd.grad(ours, inputs, dy),
        torch.autograd.grad(plain, inputs, dy),
        strict=False,
    ):
        # where a query sees one key, gradients of scores cancel
        check_close(mine, other, 1e-12, f"{case}: gradient of {name}", terms=10.0)


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
@settings(deadline=None, max_examples=150)
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
